"""Sums in a fixed order, and collectives of virtual ranks that use this order.

Legend: p ranks of the group, V virtual ranks, n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mpu.initialize import group_rank_and_size
from mpu.mappings import all_gather_first_dim
from mpu.partition import divide

# Rows of a product that are summed at once on a CPU, so that the terms stay in a core's cache until they are added.
# A different number could change the bits. A GPU adds all rows at once.
ROWS = 512


def tree_sum(terms: Sequence[Tensor]) -> Tensor:
    """Sum the terms in float32 along a binary tree. Terms have any shape and dtype.

    An even number of terms is split into two halves, recursively; an odd number is added from left to right. If 2^j
    ranks hold equally many successive terms, each rank can sum its own subtree."""
    if len(terms) == 1:
        return terms[0].float()
    if len(terms) % 2:
        total = terms[0].float() + terms[1]
        for term in terms[2:]:
            total += term
        return total
    half = len(terms) // 2
    return tree_sum(terms[:half]) + tree_sum(terms[half:])


class VirtualRanks:
    """V virtual ranks of `group`. This rank emulates `per_rank` successive ones, starting with number `first`.

    Raises ValueError if the size of the group does not divide V."""

    def __init__(self, size: int, group: ProcessGroup | None) -> None:
        rank, ranks = group_rank_and_size(group)
        self.size, self.group, self.per_rank = size, group if ranks > 1 else None, divide(size, ranks)
        self.first = rank * self.per_rank

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of this rank's partial sums. Only the complete sum is rounded to `dtype`."""
        return dtype if self.group is None else torch.float32

    def all_reduce(self, local: Tensor) -> Tensor:
        """Sum small float32 partial sums [...] over all ranks."""
        return local if self.group is None else tree_sum(self.all_gather(local.unsqueeze(0)).unbind())

    def all_gather(self, local: Tensor) -> Tensor:
        """Concatenate the tensors of all ranks: [n, ...] -> [n · p, ...]."""
        if self.group is None:
            return local
        return all_gather_first_dim(local, self.group)[0]

    def reduce(self, local: Tensor, dtype: torch.dtype, scatter: bool) -> Tensor:
        """Sum the partial sums [n, ...] over all ranks and round to `dtype`. scatter: to this rank's [n/p, ...].

        Raises ValueError if p does not divide the number of elements or, with scatter, of rows."""
        if self.group is None:
            return local.to(dtype)
        size, rows = self.group.size(), local if scatter else local.reshape(-1)
        divide(rows.size(0), size)
        terms = torch.empty_like(rows, memory_format=torch.contiguous_format)
        dist.all_to_all_single(terms, rows.contiguous(), group=self.group)
        total = tree_sum(terms.chunk(size)).to(dtype)
        return total if scatter else self.all_gather(total).view(local.shape)


def sum_of_products(xs: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Σ x · w over this rank's virtual ranks: pairs of [t, i] and [i, o] -> [t, o]. Each product is rounded to its own
    dtype, the sum to `dtype`."""
    t = xs[0].size(0)
    out = xs[0].new_empty((t, weights[0].size(1)), dtype=dtype)
    at_once = ROWS if xs[0].is_cpu else t
    for start in range(0, t, at_once):
        rows = slice(start, start + at_once)
        out[rows] = tree_sum([x[rows] @ weight for x, weight in zip(xs, weights, strict=True)])
    return out


def sum_over_sequence(virtual: VirtualRanks, sum_of_slice: Callable[[slice], Tensor], length: int) -> Tensor:
    """Sum over the sequence in float32, in V slices. sum_of_slice: returns the sum over a slice of this rank's `length`
    positions. virtual: has a group only if its ranks hold different shards of the sequence."""
    size = divide(length, virtual.per_rank)
    return virtual.all_reduce(tree_sum([sum_of_slice(slice(at, at + size)) for at in range(0, length, size)]))
