"""The one order of a sum, and sums over the parts of a group in that order.

Legend: p ranks of the group, V parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mpu.initialize import group_rank_and_size
from mpu.mappings import all_gather_first_dim
from mpu.partition import divide

# Rows of a product that are summed at once, so that the terms stay in a core's cache until they are added. Another
# number could mean other bits. A GPU adds all rows at once.
ROWS = 512


def tree_sum(terms: Sequence[Tensor]) -> Tensor:
    """Σ terms in float32: the sum of the first half and that of the second, as long as their number is even, else one
    after the other. Any shape and dtype. Over 2^j equal ranks each has the sum of a subtree."""
    if len(terms) == 1:
        return terms[0].float()
    if len(terms) % 2:
        total = terms[0].float() + terms[1]
        for term in terms[2:]:
            total += term
        return total
    half = len(terms) // 2
    return tree_sum(terms[:half]) + tree_sum(terms[half:])


class Parts:
    """V parts of a sum over `group`, of which this rank has `own` successive ones, from number `first` on. Raises
    ValueError where the size of the group does not divide V."""

    def __init__(self, count: int, group: ProcessGroup | None) -> None:
        rank, size = group_rank_and_size(group)
        self.count, self.group, self.own = count, group if size > 1 else None, divide(count, size)
        self.first = rank * self.own

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the sum over this rank's parts of `dtype`: it is rounded once, where it is whole."""
        return dtype if self.group is None else torch.float32

    def everywhere(self, own: Tensor) -> Tensor:
        """The sum over the parts of all ranks, float32 [...], from that over this rank's, which is small."""
        return own if self.group is None else tree_sum(self.gathered(own.unsqueeze(0)).unbind())

    def gathered(self, own: Tensor) -> Tensor:
        """What each rank has, in the order of the ranks: [n, ...] -> [n · p, ...]."""
        if self.group is None:
            return own
        return all_gather_first_dim(own, self.group)[0]

    def complete(self, own: Tensor, dtype: torch.dtype, to_own_rows: bool) -> Tensor:
        """The sum over the parts of all ranks, of dtype, from [n, ...] of this rank's parts: all of it, or this rank's
        rows, [n/p, ...]. Raises ValueError if p does not divide what is split, the rows or the elements."""
        if self.group is None:
            return own.to(dtype)
        size, rows = self.group.size(), own if to_own_rows else own.reshape(-1)
        divide(rows.size(0), size)
        terms = torch.empty_like(rows, memory_format=torch.contiguous_format)
        dist.all_to_all_single(terms, rows.contiguous(), group=self.group)
        total = tree_sum(terms.chunk(size)).to(dtype)
        return total if to_own_rows else self.gathered(total).view(own.shape)


def sum_of_products(xs: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Σ x · w over the parts of a rank, each product rounded to its own dtype and their sum to `dtype`: [t, i] and
    [i, o] of each part -> [t, o]."""
    t = xs[0].size(0)
    out = xs[0].new_empty((t, weights[0].size(1)), dtype=dtype)
    at_once = ROWS if xs[0].is_cpu else t
    for start in range(0, t, at_once):
        rows = slice(start, start + at_once)
        out[rows] = tree_sum([x[rows] @ weight for x, weight in zip(xs, weights, strict=True)])
    return out


def sum_over_sequence(parts: Parts, of_part: Callable[[slice], Tensor], length: int) -> Tensor:
    """Σ over the sequence, in V parts of it, float32. of_part: the sum over some of this rank's `length` positions.
    parts: with a group where its ranks hold other parts of the sequence, else without."""
    return parts.everywhere(tree_sum([of_part(part) for part in slices(length, parts.own)]))


def slices(length: int, count: int) -> Iterator[slice]:
    """`count` equal parts of range(length). Raises ValueError where there are none."""
    size = divide(length, count)
    return (slice(start, start + size) for start in range(0, length, size))
