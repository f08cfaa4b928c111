"""What of a run goes into a checkpoint, as boxes, and back: weights, optimizer state, random generators.

Tensors are named "<kind>.<parameter>" (model, master, exp_avg, exp_avg_sq) and "rng.mp_00.dp_00.<generator>". Ranks
and sizes are plain integers: no process group is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

import mpu
from megatron.checkpoint_files import Piece
from megatron.checkpoint_reader import Checkpoint
from mpu import PartitionSpec


def state_pieces(states: Iterable[tuple[str, str, Tensor]], specs: Mapping[str, PartitionSpec], *, mp_rank: int,
                 mp_size: int) -> dict[str, Piece]:
    """What this rank saves of `states`: (kind, parameter name, the rank's whole tensor, flat or in shape).

    Padding is left out; what is replicated is saved by model-parallel rank 0.
    """
    pieces = {}
    for kind, name, local in states:
        spec = specs[name]
        if spec.dim is not None or mp_rank == 0:
            true = spec.true_part(local.view(spec.local_shape(mp_size)), mp_rank, mp_size)
            pieces[f"{kind}.{name}"] = Piece(true, spec.global_shape, spec.box(mp_rank, mp_size).offset)
    return pieces


@torch.no_grad()
def load_state(states: Iterable[tuple[str, str, Tensor]], specs: Mapping[str, PartitionSpec], checkpoint: Checkpoint, *,
               mp_rank: int, mp_size: int) -> None:
    """The inverse of `state_pieces`, from a checkpoint of any layout, into `states`; padding becomes 0.

    ValueError unless the checkpoint holds the same tensors of these kinds, in the same global shapes.
    """
    kinds, names = set(), set()
    for kind, name, local in states:
        spec, full_name = specs[name], f"{kind}.{name}"
        kinds.add(kind)
        names.add(full_name)
        if full_name not in checkpoint.tensors:
            raise ValueError(f"{checkpoint.path}: holds no {full_name}: " + (
                "the model has another shape" if kind == "model" else "give --no-load-optim if it was left out"))
        if checkpoint.global_shape(full_name) != spec.global_shape:
            raise ValueError(f"{checkpoint.path}: {full_name} has shape {checkpoint.global_shape(full_name)} there and "
                             f"{spec.global_shape} in this run: give the shape that was saved, or no shape flags")
        box, local = spec.box(mp_rank, mp_size), local.view(spec.local_shape(mp_size))
        if box.shape != tuple(local.shape):
            local.zero_()
        spec.true_part(local, mp_rank, mp_size).copy_(checkpoint.read(full_name, box.offset, box.shape))
    if left := [name for name in checkpoint.names() if name.partition(".")[0] in kinds and name not in names]:
        raise ValueError(f"{checkpoint.path}: holds {left[0]}, which this run does not have: give the shape that was "
                         "saved, or no shape flags")


def model_pieces(named_parameters: Iterable[tuple[str, Tensor]], specs: Mapping[str, PartitionSpec], *, mp_rank: int,
                 mp_size: int) -> dict[str, Piece]:
    states = (("model", name, parameter.detach()) for name, parameter in named_parameters)
    return state_pieces(states, specs, mp_rank=mp_rank, mp_size=mp_size)


def load_model(named_parameters: Iterable[tuple[str, Tensor]], specs: Mapping[str, PartitionSpec],
               checkpoint: Checkpoint, *, mp_rank: int, mp_size: int) -> None:
    states = (("model", name, parameter.detach()) for name, parameter in named_parameters)
    load_state(states, specs, checkpoint, mp_rank=mp_rank, mp_size=mp_size)


def rng_pieces(*, mp_rank: int, dp_rank: int, device: torch.device) -> dict[str, Piece]:
    """The states of this rank's random generators: the CPU's, the GPU's where it computes on one, mpu's streams."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    states.update((f"tracker.{name}", state) for name, state in mpu.get_cuda_rng_tracker().get_states().items())
    return {f"rng.mp_{mp_rank:02d}.dp_{dp_rank:02d}.{name}": Piece(state, tuple(state.shape), (0,))
            for name, state in states.items()}


def load_rng(checkpoint: Checkpoint, *, mp_rank: int, dp_rank: int, mp_size: int, dp_size: int,
             device: torch.device) -> bool:
    """Set what `rng_pieces` saved. False, on every rank and with nothing changed, where the checkpoint has no states
    or has those of another layout or kind of device."""
    saved = [name.split(".", 3)[1:] for name in checkpoint.names() if name.startswith("rng.")]
    ranks = {(f"mp_{mp:02d}", f"dp_{dp:02d}") for mp in range(mp_size) for dp in range(dp_size)}
    on_gpu = any(name == "cuda" for _, _, name in saved)
    if {(mp, dp) for mp, dp, _ in saved} != ranks or on_gpu != (device.type == "cuda"):
        return False
    prefix = f"rng.mp_{mp_rank:02d}.dp_{dp_rank:02d}."
    states = {name: checkpoint.read(prefix + name) for mp, dp, name in saved if prefix == f"rng.{mp}.{dp}."}
    torch.set_rng_state(states["cpu"])
    if on_gpu:
        torch.cuda.set_rng_state(states["cuda"], device)
    mpu.get_cuda_rng_tracker().set_states(
        {name.removeprefix("tracker."): state for name, state in states.items() if name.startswith("tracker.")})
    return True
