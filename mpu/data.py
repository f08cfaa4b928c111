"""The first rank of a model-parallel group reads the data and broadcasts it to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mpu.initialize import get_parallel_state

_MAX_DIMS = 4


def broadcast_data(keys: Sequence[str], data: Mapping[str, Tensor] | None, dtype: torch.dtype,
                   device: torch.device | str | None = None, *,
                   shapes: Sequence[tuple[int, ...]] | None = None) -> dict[str, Tensor]:
    """The tensors `data[key]`, all of `dtype`, of the group's first rank, on every rank of the group.

    keys: the same on every rank. data: is read on the first rank alone and may be None elsewhere.
    device: of the result (default: the current GPU if the process uses one, else the CPU).
    shapes: one for each key. Where every rank knows them, one broadcast is enough, and the host does not wait for a
    GPU. Without them the shapes are broadcast first. Raises ValueError for a tensor of another dtype or of more than 4
    dimensions.
    """
    state = get_parallel_state()
    if device is None:
        device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    first = state.model_parallel_rank == 0
    if first:
        assert data is not None
        for key in keys:
            if data[key].dtype != dtype:
                raise ValueError(f"broadcast_data: {key!r} is {data[key].dtype}, expected {dtype}")
            if data[key].dim() > _MAX_DIMS:
                raise ValueError(f"broadcast_data: {key!r} has more than {_MAX_DIMS} dimensions")
    if state.model_parallel_size == 1:
        assert data is not None
        return {key: data[key].to(device, non_blocking=True) for key in keys}

    group, source = state.model_parallel_group, state.model_parallel_src_rank
    if shapes is None:
        shapes = _broadcast_shapes(keys, data, device)
    lengths = [torch.Size(shape).numel() for shape in shapes]
    if first:
        assert data is not None
        flat = torch.cat([data[key].to(device, non_blocking=True).reshape(-1) for key in keys])  # [...] -> [n]
    else:
        flat = torch.empty(sum(lengths), dtype=dtype, device=device)
    dist.broadcast(flat, source, group=group)
    return {key: part.view(shape) for key, part, shape in zip(keys, flat.split(lengths), shapes, strict=True)}


def _broadcast_shapes(keys: Sequence[str], data: Mapping[str, Tensor] | None,
                      device: torch.device | str) -> list[tuple[int, ...]]:
    state = get_parallel_state()
    sizes = torch.full((len(keys), _MAX_DIMS), -1, dtype=torch.int64)
    if state.model_parallel_rank == 0:
        assert data is not None
        for row, key in zip(sizes, keys, strict=True):
            row[:data[key].dim()] = torch.tensor(data[key].shape)
    sizes = sizes.to(device)
    dist.broadcast(sizes, state.model_parallel_src_rank, group=state.model_parallel_group)
    return [tuple(n for n in row if n >= 0) for row in sizes.tolist()]
