"""How the state of a run goes into a checkpoint, as boxes, and back: weights, optimizer state, random generators.

Tensors are named "<kind>.<parameter>" (model, master, exp_avg, exp_avg_sq) and "rng.mp_00.dp_00.<generator>", with a
pipeline "rng.mp_00_001.dp_00.<generator>". Ranks and sizes are plain integers: no process group is needed.
"""

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

import mpu
from megatron.gpt2.checkpoint.reader import in_threads
from megatron.gpt2.checkpoint.source import Source
from megatron.gpt2.checkpoint.writer import Piece
from megatron.gpt2.optimizer.flat_parameters import FlatState
from mpu import Box, PartitionSpec


def state_pieces(
    states: Iterable[FlatState], specs: Mapping[str, PartitionSpec], *, mp_rank: int, mp_size: int
) -> dict[str, Piece]:
    """What this rank saves of `states`. Padding is left out; what is replicated is saved by model-parallel rank 0."""
    pieces = {}
    for kind, name, values, start in states:
        spec = specs[name]
        if spec.dim is not None or mp_rank == 0:
            for number, (box, part) in enumerate(_boxes(spec, mp_rank, mp_size, start, values)):
                key = f"{kind}.{name}" + (f"#{number}" if number else "")
                pieces[key] = Piece(part, spec.global_shape, box.offset)
    return pieces


@torch.no_grad()
def load_state(
    states: Iterable[FlatState], specs: Mapping[str, PartitionSpec], checkpoint: Source, *, mp_rank: int, mp_size: int
) -> None:
    """The inverse of `state_pieces`, from a checkpoint of any layout, into `states`; padding becomes 0.

    specs: of the whole model, of which `states` may be the part of one stage of a pipeline. ValueError unless the
    checkpoint holds the same tensors of these kinds, in the same global shapes, and no others.
    """
    kinds = set()
    parts: list[tuple[Tensor, str, tuple[int, ...]]] = []
    for kind, name, values, start in states:
        spec, full_name = specs[name], f"{kind}.{name}"
        kinds.add(kind)
        saved = checkpoint.tensors.get(full_name)
        if saved is None:
            hint = "the model has another shape" if kind == "model" else "give --no-load-optim if it was left out"
            raise ValueError(f"{checkpoint.path}: holds no {full_name}: {hint}")
        if saved.shape != spec.global_shape:
            raise ValueError(
                f"{checkpoint.path}: {full_name} has shape {saved.shape} there and "
                f"{spec.global_shape} in this run: give the shape that was saved, or no shape flags"
            )
        values.zero_()
        parts += [(part, full_name, box.offset) for box, part in _boxes(spec, mp_rank, mp_size, start, values)]
    for full_name in checkpoint.names():
        kind, _, name = full_name.partition(".")
        if kind in kinds and name not in specs:
            raise ValueError(
                f"{checkpoint.path}: holds {full_name}, which this run does not have: give the shape that was "
                "saved, or no shape flags"
            )
    in_threads(lambda part: checkpoint.read_into(*part), parts)


def _boxes(spec: PartitionSpec, mp_rank: int, mp_size: int, start: int, values: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """The true part of `values`, the elements from `start` on of a rank's tensor, as boxes of the global tensor, each
    with its view: a partial first row, whole rows, a partial last row, of which any may be absent."""
    held, shape = spec.box(mp_rank, mp_size), spec.local_shape(mp_size)
    assert held.shape[1:] == shape[1:], "padding is rows at the end, so that it ends a flat tensor as well"
    row = math.prod(shape[1:])
    at, stop = start, min(start + values.numel(), held.numel)
    while at < stop:
        top, left = divmod(at, row)
        if left or stop - at < row:
            height, width = 1, min(row - left, stop - at)
        else:
            height, width = (stop - at) // row, row
        offset = tuple(a + b for a, b in zip(held.offset, (top, left), strict=False))
        box = Box(offset, (height, width)[: len(shape)])
        yield box, values[at - start : at - start + box.numel].view(box.shape)
        at += box.numel


def whole_parameters(named_parameters: Iterable[tuple[str, Tensor]]) -> Iterator[FlatState]:
    """States of whole parameters, of kind "model", for `state_pieces` and `load_state`."""
    return (FlatState("model", name, parameter.detach().view(-1)) for name, parameter in named_parameters)


def place_name(parallel: mpu.ParallelState) -> str:
    """How files and random states name a rank's place in the model, as Megatron does: "mp_rank_00" has only the first
    number, with a pipeline "mp_rank_00_001" its stage too."""
    stage = f"_{parallel.pipeline_model_parallel_rank:03d}" if parallel.pipeline_model_parallel_size > 1 else ""
    return f"{parallel.tensor_model_parallel_rank:02d}{stage}"


def _rng_prefix(parallel: mpu.ParallelState) -> str:
    return f"rng.mp_{place_name(parallel)}.dp_{parallel.data_parallel_rank:02d}."


def rng_pieces(parallel: mpu.ParallelState, device: torch.device) -> dict[str, Piece]:
    """The states of this rank's random generators: the CPU's, the GPU's if it computes on one, mpu's streams."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    states |= {f"tracker.{name}": state for name, state in mpu.get_cuda_rng_tracker().get_states().items()}
    return {_rng_prefix(parallel) + name: Piece(state, tuple(state.shape), (0,)) for name, state in states.items()}


def load_rng(checkpoint: Source, parallel: mpu.ParallelState, device: torch.device) -> bool:
    """Set what `rng_pieces` saved. False, on every rank and with nothing changed, if the checkpoint has no states
    or has those of another layout or kind of device."""
    own, layout = _rng_prefix(parallel), checkpoint.facts.get("layout", {})
    names = {name.removeprefix(own): name for name in checkpoint.names() if name.startswith(own)}
    for said, here in (
        (layout.get("model_parallel_size"), parallel.tensor_model_parallel_size),
        (layout.get("pipeline_parallel_size", 1), parallel.pipeline_model_parallel_size),
        (layout.get("data_parallel_size"), parallel.data_parallel_size),
        ("cpu" in names, True),
        ("cuda" in names, device.type == "cuda"),
    ):
        if said != here:
            return False
    states = {generator: checkpoint.read(name) for generator, name in names.items()}
    torch.set_rng_state(states.pop("cpu"))
    if device.type == "cuda":
        torch.cuda.set_rng_state(states.pop("cuda"), device)
    mpu.get_cuda_rng_tracker().set_states({name.removeprefix("tracker."): state for name, state in states.items()})
    return True
