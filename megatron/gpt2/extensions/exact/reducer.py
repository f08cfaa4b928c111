"""Gradients summed over micro-batches and data-parallel ranks along one tree, so that the bits of the sum do not depend
on how many ranks share the micro-batches of a step, or in which bucket a gradient is.

The leaves of the tree are the micro-batches of the global batch; each rank has successive ones. The sum halves as long
as the number of leaves is even, and adds what is left one after the other. So 2^j ranks each have a subtree. Another
number of ranks cuts subtrees: then a rank sends the parts of its branch that are whole, one by one.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.gpt2.model.gpt2 import TIED
from megatron.gpt2.optimizer.flat_parameters import FlatParameters, within
from megatron.gpt2.optimizer.gradient_reducer import GradientReducer
from mpu import ParallelState
from mpu.mappings import all_gather_single

# The gradient of the tied matrix by the embedding, where the same rank has the head's as well. In a pipeline two stages
# have them. So each is reduced by itself, and then they are added.
OF_EMBEDDING = f"{TIED}, the embedding's"

Leaves = tuple[int, int]  # of a sum: its first leaf, and the one after its last


def in_order(leaves: int) -> int:
    """How many successive leaves are added one after the other: the odd factor of their number."""
    return leaves // (leaves & -leaves) if leaves else 1


def are_added(left: Leaves, right: Leaves, block: int) -> bool:
    """Whether the tree adds two sums to each other, of which one follows the other. block: `in_order` of all leaves."""
    (start, middle), stop = left, right[1]
    size = stop - start
    if size <= block:
        return start % block == 0 and stop - middle == 1
    return middle - start == stop - middle and start % size == 0 and in_order(size) == block


def grows(last: Leaves, block: int) -> bool:
    """Whether the leaf after this sum is added to it as it is."""
    return last[1] - last[0] < block and last[0] % block == 0


def sums_after_each(leaves: Iterable[Leaves], block: int) -> list[list[Leaves]]:
    """The sums that are left of successive ones, when all are added that the tree adds to each other: at first none,
    then those after each of `leaves`."""
    states: list[list[Leaves]] = [[]]
    for new in leaves:
        sums = list(states[-1])
        while sums and are_added(sums[-1], new, block):
            new = sums.pop()[0], new[1]
        states.append([*sums, new])
    return states


@functools.lru_cache(maxsize=4096)
def of_rank(rank: int, micro_batches: int, ranks: int) -> list[list[Leaves]]:
    """The sums that a rank has after each of the `micro_batches` leaves that it has of a step. It sends the last ones."""
    leaves = range(rank * micro_batches, (rank + 1) * micro_batches)
    return sums_after_each(((leaf, leaf + 1) for leaf in leaves), in_order(micro_batches * ranks))


def sums_kept(micro_batches: int, ranks: int = 1) -> int:
    """How many whole sums wait at the most on a rank for the other half of theirs, in addition to the one that grows."""
    block = in_order(micro_batches * ranks)
    different = range(ranks if ranks & (ranks - 1) else 1)  # 2^j ranks do alike
    states = [sums for rank in different for sums in of_rank(rank, micro_batches, ranks)[1:-1]]
    return max((len(sums) - grows(sums[-1], block) for sums in states), default=0)


class ExactGradientReducer(GradientReducer):
    """The same sums as `GradientReducer`, each in its one order.

    A rank keeps about log2 of the number of micro-batches sums in float32. A bucket is sent by an all-to-all: each rank
    adds up the ranks' sums of what it owns, and without a sharded optimizer gathers the rest. by_rows: the gradient
    that comes by `add_rows`; `OF_EMBEDDING` where the rank has both the embedding and the head.
    """

    def __init__(self, flat: FlatParameters, parallel: ParallelState, *, by_rows: str | None) -> None:
        self._by_rows = by_rows
        self._rank, self._ranks = parallel.data_parallel_rank, parallel.data_parallel_size
        self._of_embedding: Tensor | None = None
        super().__init__(flat, parallel.data_parallel_group, embedding_group=parallel.embedding_group)

    def begin(self, micro_batches: int) -> None:
        """As `GradientReducer.begin`."""
        self._block = in_order(micro_batches * self._ranks)
        self._micro_batches, self._sums = micro_batches, of_rank(self._rank, micro_batches, self._ranks)
        sent = [of_rank(rank, micro_batches, self._ranks)[-1] for rank in range(self._ranks)]
        self._sent_by_rank = [len(sums) for sums in sent]
        everything = sums_after_each((leaves for sums in sent for leaves in sums), self._block)
        self._left_of_sent = [len(sums) for sums in everything[1:]]
        self._waiting: defaultdict[str, list[Tensor]] = defaultdict(list)  # whole sums before the one in `_grad`
        super().begin(micro_batches)

    def complete(self, name: str) -> None:
        """As `GradientReducer.complete`. Adds the sum that the new leaf is in to those before it, where the tree does,
        and puts it aside if the next leaf begins another one."""
        sums, grad, waiting = (
            self._sums[1 + self._micro_batches - self._awaited[name]],
            self._grad(name),
            self._waiting[name],
        )
        while len(waiting) >= len(sums):
            torch.add(waiting.pop(), grad, out=grad)
        goes_on = grows(sums[-1], self._block) and name != self._by_rows  # whose leaf is a sum over rows
        if self._awaited[name] > 1 and not goes_on:
            waiting.append(grad.clone())
            self._begun.discard(name)
        super().complete(name)

    def finish(self) -> None:
        """As `GradientReducer.finish`."""
        if self._group is None:
            self._join_tied()
        super().finish()
        self._of_embedding = None
        self._waiting.clear()

    def _buckets_of_gradients(self) -> dict[str, int]:
        buckets = dict(self._flat.bucket_of)
        return buckets | {OF_EMBEDDING: len(self._flat.buckets)} if self._by_rows == OF_EMBEDDING else buckets

    def _grad(self, name: str) -> Tensor:
        if name != OF_EMBEDDING:
            return self._flat.grad(name)
        if self._of_embedding is None:
            self._of_embedding = torch.zeros_like(self._flat.bucket_grads(self._flat.bucket_of[TIED]))
        return self._in_bucket(TIED, self._of_embedding)

    def _in_bucket(self, name: str, bucket: Tensor) -> Tensor:
        """The part of the parameter `name` in a tensor of its bucket's length."""
        own = within(self._flat.ranges[name], self._flat.buckets[self._flat.bucket_of[name]].range)
        return bucket[own].view_as(self._flat.parameters[name])

    def _bucket(self, index: int) -> Tensor:
        """The gradients of a bucket; past the last one those of the embedding, which are as long as the head's."""
        if index < len(self._flat.buckets):
            return self._flat.bucket_grads(index)
        assert self._of_embedding is not None
        return self._of_embedding

    def _bucket_sums(self, index: int) -> list[Tensor]:
        """The whole sums of this rank, each [length of the bucket]."""
        last, names = self._bucket(index), [name for name, at in self._bucket_of.items() if at == index]
        before = [torch.zeros_like(last) for _ in self._waiting[names[0]]]
        for name in names:
            for bucket, waiting in zip(before, self._waiting[name], strict=True):
                self._in_bucket(TIED if name == OF_EMBEDDING else name, bucket).copy_(waiting)
        return [*before, last]

    def _send(self, index: int) -> tuple[dist.Work, Tensor]:
        own = self._bucket_sums(index)
        part = own[0].numel() // self._ranks
        # By receiver, then by sum.
        sent = own[0] if len(own) == 1 else torch.stack([x.view(self._ranks, part) for x in own], dim=1).view(-1)
        counts = [part * sums for sums in self._sent_by_rank]
        terms = sent.new_empty(sum(counts))
        work = dist.all_to_all_single(
            terms, sent, counts, [part * len(own)] * self._ranks, group=self._group, async_op=True
        )
        assert work is not None
        return work, terms

    def _receive(self, index: int) -> None:
        assert self._group is not None
        grads = self._bucket(index)
        terms = self._arrived(index).view(-1, grads.numel() // self._ranks)
        own = self._sum_of(terms.unbind())
        if self._flat.is_sharded:
            grads.view(self._ranks, -1)[self._rank].copy_(own)
        else:
            all_gather_single(grads, own, group=self._group)
        if index == len(self._flat.buckets):
            self._join_tied()

    def _sum_of(self, terms: Sequence[Tensor]) -> Tensor:
        """The sum of all leaves, from the sums that the ranks have."""
        sums: list[Tensor] = []
        for term, left in zip(terms, self._left_of_sent, strict=True):
            while len(sums) >= left:
                term = sums.pop() + term
            sums.append(term)
        (whole,) = sums
        return whole

    def _join_tied(self) -> None:
        """Add the embedding's gradient of the tied matrix to the head's."""
        if self._of_embedding is not None:
            self._flat.bucket_grads(self._flat.bucket_of[TIED]).add_(self._of_embedding)
