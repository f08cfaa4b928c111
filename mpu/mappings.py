"""The collectives of tensor parallelism with their gradients (arXiv:1909.08053, section 3).

    copy     forward: none             backward: all-reduce       (f in the paper)
    reduce   forward: all-reduce       backward: none             (g in the paper)
    scatter  forward: keep own slice   backward: all-gather       of the last dimension
    gather   forward: all-gather       backward: keep own slice   of the last dimension

With sequence parallelism (arXiv:2205.05198, section 4.2.2), the tensors between a g and the next f are sharded by their
first dimension, and each all-reduce is replaced by its two halves:

    gather from sequence parallel region         forward: all-gather       backward: reduce-scatter   (g of 2205.05198)
    reduce-scatter to sequence parallel region   forward: reduce-scatter   backward: all-gather       (g's conjugate)

The two papers call different operations g. ColumnParallelLinear implements f and its gather itself, so that the
collective in backward overlaps the computation of the weight gradient. For other collectives, the layers and the
model's head call the functions below.

The group of an operation is the default tensor-parallel group if the argument is None. With one rank an operation
returns its input. No operation writes to the caller's tensor.

Legend: s sequence, n last dimension, tp tensor-parallel size.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mpu.initialize import get_tensor_model_parallel_group
from mpu.partition import divide

Collective = Callable[[Tensor, ProcessGroup], Tensor]

# torch 2.13 renamed these two functions and warns if the old names are used; torch 2.11 has only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_first_dim(x: Tensor, group: ProcessGroup, *, async_op: bool = False) -> tuple[Tensor, dist.Work | None]:
    """Return [s, ...], the concatenated x [s/tp, ...] of all ranks, and the work handle if async_op. No gradient flows
    back."""
    gathered = x.new_empty((x.size(0) * group.size(), *x.shape[1:]))
    return gathered, all_gather_single(gathered, x.contiguous(), group=group, async_op=async_op)


def reduce_scatter_first_dim(
    x: Tensor, group: ProcessGroup, *, async_op: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """[s, ...] -> this rank's [s/tp, ...] of the sum over the ranks, and the work handle if async_op. No gradient flows
    back. Raises ValueError if s is not divisible by tp."""
    part = x.new_empty((divide(x.size(0), group.size()), *x.shape[1:]))
    return part, reduce_scatter_single(part, x.contiguous(), group=group, async_op=async_op)


def _identity(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather_last_dim(x: Tensor, group: ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _local_slice_of_last_dim(x: Tensor, group: ProcessGroup) -> Tensor:
    part = divide(x.size(-1), group.size())
    return x.narrow(-1, group.rank() * part, part).contiguous()


def _all_gather_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather_first_dim(x, group)[0]


def _reduce_scatter_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    return reduce_scatter_first_dim(x, group)[0]


class _ApplyCollective(torch.autograd.Function):
    """Apply one function of (tensor, group) to the input in forward, and another function to the gradient in
    backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, forward: Collective, backward: Collective) -> Tensor:
        ctx.group, ctx.backward_op = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_op(grad, ctx.group), None, None, None


def apply_collective(x: Tensor, group: ProcessGroup | None, *, forward: Collective, backward: Collective) -> Tensor:
    """Apply `forward` to x over the group, and `backward` to the gradient. Return x itself if there is only one
    rank."""
    group = group if group is not None else get_tensor_model_parallel_group()
    if group is None or group.size() == 1:
        return x
    return _ApplyCollective.apply(x, group, forward, backward)  # type: ignore[no-any-return]


def copy_to_model_parallel_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return x on every rank. Backward sums the ranks' gradients. Any shape."""
    return apply_collective(x, group, forward=_identity, backward=_all_reduce)


def reduce_from_model_parallel_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum of x over the ranks. Backward returns the gradient unchanged. Any shape."""
    return apply_collective(x, group, forward=_all_reduce, backward=_identity)


def scatter_to_model_parallel_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """[..., n] -> [..., n/tp]: this rank's slice of the last dimension. Backward gathers the slices. Raises ValueError
    if n is not divisible by tp."""
    return apply_collective(x, group, forward=_local_slice_of_last_dim, backward=_all_gather_last_dim)


def gather_from_model_parallel_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """[..., n/tp] -> [..., n]: the slices of all ranks, in rank order. Backward keeps this rank's slice."""
    return apply_collective(x, group, forward=_all_gather_last_dim, backward=_local_slice_of_last_dim)


def gather_from_sequence_parallel_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """[s/tp, ...] -> [s, ...], before a computation that is split over the ranks. Backward sums the ranks' gradients
    and keeps this rank's part."""
    return apply_collective(x, group, forward=_all_gather_sequence, backward=_reduce_scatter_sequence)


def enter_model_parallel_region(x: Tensor, group: ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """The input of a computation that is split over the ranks: [s, ...], or [s/tp, ...] with sequence_parallel ->
    [s, ...]. Backward sums the ranks' gradients."""
    enter = gather_from_sequence_parallel_region if sequence_parallel else copy_to_model_parallel_region
    return enter(x, group)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """[s, ...] -> [s/tp, ...]: this rank's part of the sum over the ranks. Backward gathers the parts. Raises
    ValueError if s is not divisible by tp."""
    return apply_collective(x, group, forward=_reduce_scatter_sequence, backward=_all_gather_sequence)
