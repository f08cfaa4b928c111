"""The communication operations of tensor parallelism, each with its gradient (arXiv:1909.08053, section 3).

    copy     forward: none             backward: all-reduce       (the paper's f)
    reduce   forward: all-reduce       backward: none             (the paper's g)
    scatter  forward: keep own slice   backward: all-gather       of the last dimension
    gather   forward: all-gather       backward: keep own slice   of the last dimension

Each takes the group (None: the default model-parallel group) and keeps it on `ctx`; over one rank they do nothing.
None of them writes into the caller's tensor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mpu.initialize import get_model_parallel_group, group_rank_and_size
from mpu.partition import divide


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather_last_dim(x: Tensor, group: ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _own_slice_of_last_dim(x: Tensor, group: ProcessGroup) -> Tensor:
    rank, size = group_rank_and_size(group)
    part = divide(x.size(-1), size)
    return x.narrow(-1, rank * part, part).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_slice_of_last_dim(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather_last_dim(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather_last_dim(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own_slice_of_last_dim(grad, ctx.group), None


def _apply(function: type[torch.autograd.Function], x: Tensor, group: ProcessGroup | None) -> Tensor:
    group = group if group is not None else get_model_parallel_group()
    if group is None or group.size() == 1:
        return x
    return function.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def copy_to_model_parallel_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """x on every rank; the gradients of the ranks are summed."""
    return _apply(_Copy, x, group)


def reduce_from_model_parallel_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The sum of x over the ranks."""
    return _apply(_Reduce, x, group)


def scatter_to_model_parallel_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """[..., n] -> [..., n/p]: this rank's slice of the last dimension."""
    return _apply(_Scatter, x, group)


def gather_from_model_parallel_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """[..., n/p] -> [..., n]: the slices of all ranks, in the order of ranks."""
    return _apply(_Gather, x, group)
