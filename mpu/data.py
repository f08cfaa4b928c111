"""The first rank of a model-parallel group reads the data and broadcasts it to the others."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mpu.initialize import get_parallel_state

_MAX_DIMS = 4


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    *,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> dict[str, Tensor]:
    """The tensors `data[key]`, all of `dtype`, of the group's first rank, on every rank of the group.

    keys: the same on every rank. data: is read on the first rank alone and may be None elsewhere.
    device: of the result (default: the current GPU if the process uses one, else the CPU).
    shapes: one for each key. Where every rank knows them, one broadcast is enough, and the host does not wait for a
    GPU. Without them the shapes are broadcast first. Raises ValueError for a tensor of another dtype, of more than 4
    dimensions or of another shape than `shapes` has: on every rank of the group, but with `shapes` on the first rank
    only, since the others are not told.
    """
    state = get_parallel_state()
    if device is None:
        device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    first = state.tensor_model_parallel_rank == 0
    data = data if data is not None and first else {}
    problem = _problem(keys, data, dtype, shapes) if first else ""
    if problem and (shapes is not None or state.tensor_model_parallel_size == 1):
        raise ValueError(problem)
    if state.tensor_model_parallel_size == 1:
        return {key: data[key].to(device, non_blocking=True) for key in keys}

    if shapes is None:
        shapes = _broadcast_shapes(keys, data, device, problem)
    lengths = [torch.Size(shape).numel() for shape in shapes]
    flat = (
        torch.cat([data[key].to(device, non_blocking=True).reshape(-1) for key in keys])
        if first
        else torch.empty(sum(lengths), dtype=dtype, device=device)
    )  # [...] of each -> [elements of all]
    dist.broadcast(flat, state.tensor_model_parallel_src_rank, group=state.tensor_model_parallel_group)
    return {key: part.view(shape) for key, part, shape in zip(keys, flat.split(lengths), shapes, strict=True)}


def _problem(
    keys: Sequence[str], data: Mapping[str, Tensor], dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] | None
) -> str:
    """Why the first rank cannot send its data, or ""."""
    for number, key in enumerate(keys):
        if key not in data:
            return f"broadcast_data: the first rank has no {key!r}"
        if data[key].dtype != dtype:
            return f"broadcast_data: {key!r} is {data[key].dtype}, expected {dtype}"
        if data[key].dim() > _MAX_DIMS:
            return f"broadcast_data: {key!r} has more than {_MAX_DIMS} dimensions"
        if shapes is not None and tuple(data[key].shape) != tuple(shapes[number]):
            return f"broadcast_data: {key!r} has the shape {tuple(data[key].shape)}, not {tuple(shapes[number])}"
    return ""


def _broadcast_shapes(
    keys: Sequence[str], data: Mapping[str, Tensor], device: torch.device | str, problem: str
) -> list[tuple[int, ...]]:
    """The shapes of the first rank's data, which is empty elsewhere. Where that rank has a problem, it sends -2, and
    every rank raises."""
    sizes = torch.full((len(keys), _MAX_DIMS), -2 if problem else -1, dtype=torch.int64)
    if data and not problem:
        for row, key in zip(sizes, keys, strict=True):
            row[: data[key].dim()] = torch.tensor(data[key].shape)
    sizes, state = sizes.to(device), get_parallel_state()
    dist.broadcast(sizes, state.tensor_model_parallel_src_rank, group=state.tensor_model_parallel_group)
    rows = sizes.tolist()
    if any(-2 in row for row in rows):
        raise ValueError(problem or "broadcast_data: the group's first rank cannot send its data; its error says why")
    return [tuple(n for n in row if n >= 0) for row in rows]
