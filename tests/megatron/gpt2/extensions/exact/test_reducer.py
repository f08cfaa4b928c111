"""Every number of ranks makes the same sum out of successive micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.gpt2.extensions.exact import tree_sum
from megatron.gpt2.extensions.exact.reducer import Leaves, are_added, in_order, of_rank, sums_kept


def added(sums: list[tuple[Leaves, Tensor]], block: int) -> list[tuple[Leaves, Tensor]]:
    """What is left when sums that follow each other are added as the tree adds them."""
    left: list[tuple[Leaves, Tensor]] = []
    for new, term in sums:
        while left and are_added(left[-1][0], new, block):
            (start, _), older = left.pop()
            new, term = (start, new[1]), older + term
        left.append((new, term))
    return left


def test_every_number_of_ranks_has_the_bits_of_one() -> None:
    torch.manual_seed(0)
    for count in (1, 2, 3, 5, 6, 8, 12, 16, 24, 30, 36):
        leaves, block = list(torch.randn(count, 500).mul_(torch.logspace(-3, 3, 500)).unbind()), in_order(count)
        whole = tree_sum(leaves)
        for ranks in (size for size in range(1, count + 1) if count % size == 0):
            size, sent = count // ranks, []
            for rank in range(ranks):
                own = added([((n, n + 1), leaves[n]) for n in range(rank * size, (rank + 1) * size)], block)
                assert [there for there, _ in own] == of_rank(rank, size, ranks)
                sent += own
            ((there, total),) = added(sent, block)
            assert there == (0, count) and torch.equal(total, whole), (count, ranks)


def test_how_many_sums_are_sent_and_kept() -> None:
    assert [len(of_rank(rank, 4, 3)) for rank in range(3)] == [2, 3, 2]  # 12 leaves, in blocks of 3
    assert all(len(of_rank(rank, 6, ranks)) == 1 for ranks in (1, 2, 4) for rank in range(ranks))
    assert [sums_kept(count) for count in (1, 2, 3, 4, 6, 8, 12)] == [0, 1, 0, 2, 1, 3, 2]
    assert sums_kept(4, 3) >= 2
