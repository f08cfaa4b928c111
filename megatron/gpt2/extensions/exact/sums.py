"""Sums in a fixed order, and collectives of virtual ranks that use this order.

Legend: tp ranks of the group, V virtual ranks, n rows.
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

# A CPU multiplies and adds ROWS rows at a time, so that the products stay in a core's cache until they are added. A
# different number could change the bits. A GPU computes all rows at once.
ROWS = 512


def tree_sum(terms: Sequence[Tensor]) -> Tensor:
    """Sum the terms in float32 along a binary tree. Terms have any shape and dtype.

    An even number of terms is split into two halves, recursively. An odd number of terms is added from left to right.
    If 2^j ranks hold equally many successive terms, the terms of a rank are one subtree."""
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
    """V virtual ranks of `group`. The current rank emulates `per_rank` successive virtual ranks, from number `first`
    on.

    Raises ValueError if the size of the group does not divide V."""

    def __init__(self, size: int, group: ProcessGroup | None) -> None:
        rank, ranks = group_rank_and_size(group)
        self.size, self.group, self.per_rank = size, group if ranks > 1 else None, divide(size, ranks)
        self.first = rank * self.per_rank
        # With 2^j ranks, the terms of each rank form one subtree, so a rank sends one partial sum. Otherwise, for
        # example with 3 ranks and V = 6, the terms of a rank belong to different subtrees, so the rank sends each term.
        self.num_partial_sums = 1 if ranks & (ranks - 1) == 0 else self.per_rank

    def partial_sums(self, terms: Sequence[Tensor]) -> Tensor:
        """Sum the rank's own terms as far as the tree allows: V/tp of [...] -> [k, ...], k = `num_partial_sums`."""
        return tree_sum(terms).unsqueeze(0) if self.num_partial_sums == 1 else torch.stack([x.float() for x in terms])

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of partial sums. Only the complete sum is rounded to `dtype`."""
        return dtype if self.group is None else torch.float32

    def all_reduce(self, partial_sums: Tensor) -> Tensor:
        """Sum small float32 partial sums [k, ...] over all ranks: [...]."""
        return tree_sum(self.all_gather(partial_sums).unbind())

    def all_gather(self, local: Tensor) -> Tensor:
        """Concatenate the tensors of all ranks: [n, ...] -> [n · tp, ...]."""
        if self.group is None:
            return local
        return all_gather_first_dim(local, self.group)[0]

    def reduce(self, partial_sums: Tensor, dtype: torch.dtype, scatter: bool) -> Tensor:
        """Sum partial sums [k, n, ...] over all ranks and round to `dtype`: [n, ...], or this rank's [n/tp, ...] with
        scatter.

        Raises ValueError if tp does not divide the number of elements or, with scatter, of rows."""
        if self.group is None:
            return partial_sums[0].to(dtype)
        size, rows = self.group.size(), partial_sums if scatter else partial_sums.flatten(1)
        # [k, n, ...] -> [tp, k, n/tp, ...]
        sent = rows.unflatten(1, (size, divide(rows.size(1), size))).transpose(0, 1).contiguous()
        terms = torch.empty_like(sent)
        dist.all_to_all_single(terms, sent, group=self.group)
        total = tree_sum(terms.flatten(0, 1).unbind()).to(dtype)
        return total if scatter else self.all_gather(total).view(partial_sums.shape[1:])

    def sum_of_products(self, xs: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Σ x · w over this rank's virtual ranks: V/tp pairs of [t, i] and [i, o] -> [k, t, o]. The products have the
        dtype of their operands, and the sum has the dtype `sum_dtype(dtype)`."""
        t = xs[0].size(0)
        out = xs[0].new_empty((self.num_partial_sums, t, weights[0].size(1)), dtype=self.sum_dtype(dtype))
        at_once = ROWS if xs[0].is_cpu else t
        for start in range(0, t, at_once):
            rows = slice(start, start + at_once)
            out[:, rows] = self.partial_sums([x[rows] @ weight for x, weight in zip(xs, weights, strict=True)])
        return out


def sum_over_sequence(virtual: VirtualRanks, sum_of_slice: Callable[[slice], Tensor], length: int) -> Tensor:
    """Sum over the sequence in float32, in V slices.

    sum_of_slice: returns the sum over a slice of the rank's `length` positions.
    virtual: the virtual ranks of the group, if the sequence is sharded over the group, and else of one rank.
    """
    size = divide(length, virtual.per_rank)
    return virtual.all_reduce(
        virtual.partial_sums([sum_of_slice(slice(at, at + size)) for at in range(0, length, size)])
    )
