"""Names of Megatron's `mpu` of 2019 that nothing else here uses; they keep their meaning for code and tests written for
it. `mpu.checkpoint` adds to `mpu.random.checkpoint` a switch that holds for the whole process.

Legend: h hidden, p model-parallel size.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mpu import random
from mpu.initialize import get_parallel_state
from mpu.layers import Device, InitMethod, ParallelLayer
from mpu.mappings import gather_from_model_parallel_region
from mpu.partition import PartitionSpec

_partition_activations = False


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Whether `checkpoint` distributes what it saves unless it is told. This holds for the whole process."""
    global _partition_activations
    _partition_activations = partition_activation


def checkpoint(
    function: Callable[..., Any], *args: Any, distribute_saved_activations: bool | None = None, **options: Any
) -> Any:
    """`mpu.random.checkpoint`. distribute_saved_activations: see there (default: what
    `partition_activations_in_checkpoint` said)."""
    if distribute_saved_activations is None:
        distribute_saved_activations = _partition_activations
    return random.checkpoint(function, *args, distribute_saved_activations=distribute_saved_activations, **options)


class ParallelEmbedding(ParallelLayer):
    """The weight's columns are split by embedding dimension. Forward: all-gather; backward: nothing.

    [...] int64 -> [..., h]. Raises ValueError where embedding_dim is not divisible by p.
    """

    weight: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: InitMethod = nn.init.xavier_normal_,
        keep_master_weight_for_test: bool = False,
        *,
        group: ProcessGroup | None = None,
        device: Device = None,
    ) -> None:
        super().__init__(group, device)
        full = self.make_parameter("weight", PartitionSpec((num_embeddings, embedding_dim), 1), init_method)
        self.master_weight = full if keep_master_weight_for_test else None

    def forward(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., h]."""
        return gather_from_model_parallel_region(F.embedding(ids, self.weight), self.group)


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    dtype: torch.dtype,
    device: Device = None,
    *,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> dict[str, Tensor]:
    """The tensors `data[key]`, all of `dtype`, of the tensor-parallel group's first rank, on every rank of the group.

    keys: the same on every rank. data: is read on the first rank only and may be None elsewhere.
    device: of the result (default: the current GPU if the process uses one, else the CPU).
    shapes: one for each key. If every rank gives them, one broadcast is enough, and the host does not wait for a GPU.
    Without them the shapes are broadcast first. Raises ValueError for a missing key, for a tensor of a different dtype
    or of another shape than `shapes` has: on every rank of the group, but with `shapes` on the first rank only, since
    the others are not told.
    """
    state = get_parallel_state()
    if device is None:
        device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    src, group = state.tensor_model_parallel_src_rank, state.tensor_model_parallel_group
    size, first = state.tensor_model_parallel_size, state.tensor_model_parallel_rank == 0
    data = data if data is not None and first else {}
    problem = _problem(keys, data, dtype, shapes) if first else ""
    if size > 1 and shapes is None:
        told: list[Any] = [problem, [tuple(data[key].shape) for key in keys] if first and not problem else None]
        dist.broadcast_object_list(told, src, group=group, device=torch.device(device))
        problem, shapes = told
    if problem:
        raise ValueError(f"broadcast_data: {problem}")
    if size == 1:
        return {key: data[key].to(device, non_blocking=True) for key in keys}
    assert shapes is not None
    lengths = [torch.Size(shape).numel() for shape in shapes]
    flat = (
        torch.cat([data[key].to(device, non_blocking=True).reshape(-1) for key in keys])
        if first
        else torch.empty(sum(lengths), dtype=dtype, device=device)
    )  # [...] of each -> [elements of all]
    dist.broadcast(flat, src, group=group)
    return {key: part.view(shape) for key, part, shape in zip(keys, flat.split(lengths), shapes, strict=True)}


def _problem(
    keys: Sequence[str], data: Mapping[str, Tensor], dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] | None
) -> str:
    """Why the first rank cannot send its data, or ""."""
    for number, key in enumerate(keys):
        if key not in data:
            return f"the first rank has no {key!r}"
        if data[key].dtype != dtype:
            return f"{key!r} is {data[key].dtype}, expected {dtype}"
        if shapes is not None and tuple(data[key].shape) != tuple(shapes[number]):
            return f"{key!r} has the shape {tuple(data[key].shape)}, not {tuple(shapes[number])}"
    return ""
