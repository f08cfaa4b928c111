"""Convert a run's state (weights, optimizer state, random generators) to sharded tensors, and load the state.

Tensors have the names "<kind>.<parameter>" (model, master, exp_avg, exp_avg_sq) and "rng.mp_00.dp_00.<generator>", or
with a pipeline "rng.mp_00_001.dp_00.<generator>". Ranks and sizes are plain integers, so no process group is needed.
"""

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

import mpu
from data_utils.files import in_threads
from megatron.gpt2.checkpoint.interface import BaseCheckpoint
from megatron.gpt2.checkpoint.writer import ShardedTensor
from megatron.gpt2.optimizer.param_and_grad_buffer import ParamShard
from mpu import PartitionSpec, TensorSlice


def sharded_state_dict(
    states: Iterable[ParamShard], specs: Mapping[str, PartitionSpec], *, tp_rank: int, tp_size: int
) -> dict[str, ShardedTensor]:
    """Return the sharded tensors of `states` that this rank saves, by key, without padding. Only tensor-parallel rank 0
    of each pipeline stage saves replicated parameters."""
    shards = {}
    for kind, name, values, start in states:
        spec = specs[name]
        if spec.dim is not None or tp_rank == 0:
            for number, (tensor_slice, part) in enumerate(_shard_slices(spec, tp_rank, tp_size, start, values)):
                key = f"{kind}.{name}" + (f"#{number}" if number else "")
                shards[key] = ShardedTensor(part, spec.global_shape, tensor_slice.offset)
    return shards


@torch.no_grad()
def load_sharded_state_dict(
    states: Iterable[ParamShard],
    specs: Mapping[str, PartitionSpec],
    checkpoint: BaseCheckpoint,
    *,
    tp_rank: int,
    tp_size: int,
) -> None:
    """Load `states` from a checkpoint of any layout: the inverse of `sharded_state_dict`. Padding becomes 0.

    specs: all parameters of the model; `states` may belong to one pipeline stage. Raises ValueError if the checkpoint
    lacks a tensor of `states`, if a global shape differs, or if the checkpoint has a tensor of such a kind ("model",
    "master" or a moment) for a parameter that `specs` lacks.
    """
    kinds = set()
    parts: list[tuple[Tensor, str, tuple[int, ...]]] = []
    for kind, name, values, start in states:
        spec, full_name = specs[name], f"{kind}.{name}"
        kinds.add(kind)
        saved = checkpoint.tensors.get(full_name)
        if saved is None:
            hint = "the model has a different shape"
            if kind != "model":
                hint = "give the --optimizer that saved it, or --no-load-optim"
            raise ValueError(f"{checkpoint.path}: holds no {full_name}: {hint}")
        if saved.shape != spec.global_shape:
            raise ValueError(
                f"{checkpoint.path}: {full_name} has shape {saved.shape} in the checkpoint and "
                f"{spec.global_shape} in this run: give the saved shape, or leave out the shape flags"
            )
        values.zero_()
        parts += [
            (part, full_name, tensor_slice.offset)
            for tensor_slice, part in _shard_slices(spec, tp_rank, tp_size, start, values)
        ]
    for full_name in checkpoint.tensors:
        kind, _, name = full_name.partition(".")
        if kind in kinds and name not in specs:
            raise ValueError(
                f"{checkpoint.path}: holds {full_name}, which this run does not have: give the saved shape, or no "
                "shape flags"
            )
    in_threads(lambda part: checkpoint.read_into(*part), parts)


def _shard_slices(
    spec: PartitionSpec, tp_rank: int, tp_size: int, start: int, values: Tensor
) -> Iterator[tuple[TensorSlice, Tensor]]:
    """Split `values`, a flat range of a rank's tensor that begins at element `start`, into slices of the global tensor,
    each with a view of `values`. There are up to three slices: a partial first row, whole rows, and a partial last row.
    Padding is left out."""
    local_slice, shape = spec.local_slice(tp_rank, tp_size), spec.local_shape(tp_size)
    assert local_slice.shape[1:] == shape[1:], "padding must be whole rows at the end"
    row_size = math.prod(shape[1:])
    position, stop = start, min(start + values.numel(), local_slice.numel)
    while position < stop:
        row, column = divmod(position, row_size)
        if column or stop - position < row_size:
            height, width = 1, min(row_size - column, stop - position)
        else:
            height, width = (stop - position) // row_size, row_size
        offset = tuple(x + y for x, y in zip(local_slice.offset, (row, column), strict=False))
        tensor_slice = TensorSlice(offset, (height, width)[: len(shape)])
        yield tensor_slice, values[position - start : position - start + tensor_slice.numel].view(tensor_slice.shape)
        position += tensor_slice.numel


def parameter_states(named_parameters: Iterable[tuple[str, Tensor]]) -> Iterator[ParamShard]:
    """Return the parameters as states of kind "model", for `sharded_state_dict` and `load_sharded_state_dict`."""
    return (ParamShard("model", name, parameter.detach().view(-1)) for name, parameter in named_parameters)


def model_rank_name(parallel: mpu.ParallelState) -> str:
    """Return the rank's part of the names of files and random states, as in Megatron: "00" for tensor-parallel rank 0
    or, with a pipeline, "00_001" for tensor-parallel rank 0 of stage 1."""
    stage = f"_{parallel.pipeline_model_parallel_rank:03d}" if parallel.pipeline_model_parallel_size > 1 else ""
    return f"{parallel.tensor_model_parallel_rank:02d}{stage}"


def _rng_prefix(parallel: mpu.ParallelState) -> str:
    return f"rng.mp_{model_rank_name(parallel)}.dp_{parallel.data_parallel_rank:02d}."


def rng_state_dict(parallel: mpu.ParallelState, device: torch.device) -> dict[str, ShardedTensor]:
    """Return the states of the rank's random generators: of the CPU, of the GPU if `device` is one, and of mpu's
    tracker."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    states |= {f"tracker.{name}": state for name, state in mpu.get_cuda_rng_tracker().get_states().items()}
    return {
        _rng_prefix(parallel) + name: ShardedTensor(state, tuple(state.shape), (0,)) for name, state in states.items()
    }


def load_rng_state(checkpoint: BaseCheckpoint, parallel: mpu.ParallelState, device: torch.device) -> bool:
    """Restore the states that `rng_state_dict` saved. If the checkpoint has no states, or has those of a different
    layout or device type, return False on every rank and change nothing."""
    prefix = _rng_prefix(parallel)
    names = {name.removeprefix(prefix): name for name in checkpoint.tensors if name.startswith(prefix)}
    layout = {"pipeline_model_parallel_size": 1, **checkpoint.metadata.get("layout", {})}
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
    has_layout = all(layout.get(size) == getattr(parallel, size) for size in sizes)
    if not has_layout or "cpu" not in names or ("cuda" in names) != (device.type == "cuda"):
        return False
    states = {generator: checkpoint.read(name) for generator, name in names.items()}
    torch.set_rng_state(states.pop("cpu"))
    if device.type == "cuda":
        torch.cuda.set_rng_state(states.pop("cuda"), device)
    mpu.get_cuda_rng_tracker().set_states({name.removeprefix("tracker."): state for name, state in states.items()})
    return True
