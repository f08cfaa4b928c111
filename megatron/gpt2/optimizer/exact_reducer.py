"""Gradients summed over micro-batches and data-parallel ranks along one tree, so that the bits of the sum do not depend
on how many ranks share the micro-batches of a step, or in which bucket a gradient is.

The leaves of the tree are the micro-batches of the global batch; each rank has successive ones. The sum halves as long
as the number of leaves is even, and adds what is left one after the other. So 2^j ranks each have a subtree.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.gpt2.model.gpt2 import TIED
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from megatron.gpt2.optimizer.gradient_reducer import GradientReducer
from mpu import ParallelState, tree_sum
from mpu.mappings import all_gather_single

# The gradient of the tied matrix by the embedding, where the same rank has the head's as well. In a pipeline two stages
# have them. So each is reduced by itself, and then they are added.
OF_EMBEDDING = f"{TIED}, the embedding's"


def in_order(micro_batches: int) -> int:
    """How many successive micro-batches are added one after the other: the odd factor of their number."""
    return micro_batches // (micro_batches & -micro_batches) if micro_batches else 1


def sums_kept(micro_batches: int) -> int:
    """How many whole sums wait at the most for the other half of theirs, beside the one that grows."""
    return (micro_batches // in_order(micro_batches)).bit_length() - 1


class ExactGradientReducer(GradientReducer):
    """The same sums as `GradientReducer`, each in its one order.

    A rank keeps log2 of the number of micro-batches sums in float32. A bucket is sent by an all-to-all: each rank adds
    up the ranks' sums of what it owns, and without a sharded optimizer gathers the rest. is_whole: this rank has both
    the embedding and the head.
    """

    def __init__(self, flat: FlatParameters, parallel: ParallelState, *, is_whole: bool) -> None:
        self._is_whole = is_whole
        self._of_embedding: Tensor | None = None
        self._waiting: dict[tuple[str, int], Tensor] = {}  # by gradient and level of the tree
        super().__init__(flat, parallel.data_parallel_group, embedding_group=parallel.embedding_group)

    def begin(self, micro_batches: int) -> None:
        """As `GradientReducer.begin`."""
        self._micro_batches, self._in_order = micro_batches, in_order(micro_batches)
        super().begin(micro_batches)

    def complete(self, name: str) -> None:
        """As `GradientReducer.complete`."""
        done = self._micro_batches - self._awaited[name] + 1
        if done % self._in_order == 0:
            self._climb(name, done // self._in_order, is_last=done == self._micro_batches)
        super().complete(name)

    def finish(self) -> None:
        """As `GradientReducer.finish`."""
        if self._group is None:
            self._join_tied()
        super().finish()
        self._of_embedding = None

    def _climb(self, name: str, blocks: int, *, is_last: bool) -> None:
        """The sum in `_grad(name)` is whole: the `blocks`-th of those that are added in order. It is added to the one
        before it, as often as that makes a whole one of the next level, and then waits for its other half."""
        grad, level = self._grad(name), 0
        while blocks % 2 == 0:
            torch.add(self._waiting.pop((name, level)), grad, out=grad)
            blocks, level = blocks // 2, level + 1
        if not is_last:
            self._waiting[name, level] = grad.clone()
            self._begun.discard(name)

    def _buckets_of_gradients(self) -> dict[str, int]:
        buckets = dict(self._flat.bucket_of)
        return buckets | {OF_EMBEDDING: len(self._flat.buckets)} if self._is_whole else buckets

    def _grad(self, name: str) -> Tensor:
        if name != OF_EMBEDDING:
            return self._flat.grad(name)
        bucket = self._flat.buckets[self._flat.bucket_of[TIED]]
        whole, own = bucket.range, self._flat.ranges[TIED]
        if self._of_embedding is None:
            self._of_embedding = torch.zeros(whole.stop - whole.start, device=self._flat.params.device)
        return self._of_embedding[own.start - whole.start:own.stop - whole.start].view_as(self._flat.parameters[TIED])

    def _bucket(self, index: int) -> Tensor:
        """The gradients of a bucket; past the last one those of the embedding, which are as long as the head's."""
        if index < len(self._flat.buckets):
            return self._flat.bucket_grads(index)
        assert self._of_embedding is not None
        return self._of_embedding

    def _send(self, index: int) -> tuple[dist.Work, Tensor]:
        grads = self._bucket(index)
        terms = torch.empty_like(grads)
        work = dist.all_to_all_single(terms, grads, group=self._group, async_op=True)
        assert work is not None
        return work, terms

    def _receive(self, index: int) -> None:
        assert self._group is not None
        own = tree_sum(self._arrived(index).chunk(self._group.size()))
        grads = self._bucket(index)
        if self._flat.is_sharded:
            grads.view(self._group.size(), -1)[self._group.rank()].copy_(own)
        else:
            all_gather_single(grads, own, group=self._group)
        if index == len(self._flat.buckets):
            self._join_tied()

    def _join_tied(self) -> None:
        """Add the embedding's gradient of the tied matrix to the head's."""
        if self._of_embedding is not None:
            self._flat.bucket_grads(self._flat.bucket_of[TIED]).add_(self._of_embedding)
