"""Gradients summed over micro-batches and data-parallel ranks along one binary tree.

The bits of the sum do not depend on the number of data-parallel ranks or on the buckets. The leaves of the tree are the
micro-batches of the global batch. The micro-batches of a rank are successive leaves. As in `sums.tree_sum`, an even
number of leaves is split into halves, and an odd number is added from left to right. With 2^j ranks, each rank sums one
subtree. With any other number of ranks, the leaves of a rank form several subtrees, and the rank sends the sum of each
subtree.
"""

import functools
import itertools
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.gpt2.model.gpt2 import TIED_WEIGHT
from megatron.gpt2.optimizer.bucket_reducer import BucketReducer
from megatron.gpt2.optimizer.param_and_grad_buffer import ParamAndGradBuffer, slice_within
from mpu import ParallelState
from mpu.mappings import all_gather_single

# The tied matrix has two gradients: the embedding's and the head's. In a pipeline the two gradients are on two stages,
# so every layout reduces both separately and then adds the results. A rank with both gradients reduces the embedding's
# under the name EMBEDDING_GRADIENT.
EMBEDDING_GRADIENT = f"{TIED_WEIGHT}, the embedding's"

LeafRange = tuple[int, int]  # the leaves of a partial sum: the number of the first leaf, and that of the last plus 1
PartialSums = list[tuple[LeafRange, Any]]  # adjacent partial sums, with their values


def odd_factor(leaves: int) -> int:
    """Return the odd factor of the number of leaves: the size of a block, in which leaves are added from left to
    right."""
    return leaves // (leaves & -leaves) if leaves else 1


def are_siblings(left: LeafRange, right: LeafRange, block: int) -> bool:
    """Return True if the tree adds the adjacent partial sums `left` and `right`.

    block: the `odd_factor` of the number of leaves of the whole tree.
    """
    (start, middle), stop = left, right[1]
    size = stop - start
    if size <= block:
        return start % block == 0 and stop - middle == 1
    return middle - start == stop - middle and start % size == 0 and odd_factor(size) == block


def push(sums: PartialSums, leaves: LeafRange, value: Tensor | None, block: int) -> None:
    """Append the partial sum `value` of `leaves` to `sums`. Partial sums at the end of `sums` that the tree adds to
    `value` are first added in place. If `value` is None, the function only updates the ranges of leaves in
    `sums`, without tensors."""
    while sums and are_siblings(sums[-1][0], leaves, block):
        (start, _), before = sums.pop()
        leaves = start, leaves[1]
        if value is not None:
            torch.add(before, value, out=value)
    sums.append((leaves, value))


@functools.lru_cache(maxsize=4096)
def sums_of_rank(rank: int, num_microbatches: int, ranks: int) -> list[LeafRange]:
    """Return the partial sums that a rank sends after its `num_microbatches` leaves."""
    sums: PartialSums = []
    for leaf in range(rank * num_microbatches, (rank + 1) * num_microbatches):
        push(sums, (leaf, leaf + 1), None, odd_factor(num_microbatches * ranks))
    return [leaves for leaves, _ in sums]


class ExactBucketReducer(BucketReducer):
    """`BucketReducer` with sums in an order that does not depend on the layout.

    A rank stores about log2(micro-batches) partial sums in float32. An all-to-all sends the partial sums of a bucket.
    Each rank then adds the partial sums of its shard. Without a sharded optimizer, the ranks all-gather the shards.

    by_rows: the name of the gradient that `add_rows` adds to: EMBEDDING_GRADIENT if the rank has both the embedding and
        the head, TIED_WEIGHT if it has only the embedding, else None.
    """

    def __init__(self, buffer: ParamAndGradBuffer, parallel: ParallelState, *, by_rows: str | None) -> None:
        self._by_rows = by_rows
        self._rank, self._ranks = parallel.data_parallel_rank, parallel.data_parallel_size
        self._embedding_grad: Tensor | None = None
        super().__init__(buffer, parallel.data_parallel_group, embedding_group=parallel.embedding_group)

    def begin(self, num_microbatches: int) -> None:
        """See `BucketReducer.begin`."""
        self._block = odd_factor(num_microbatches * self._ranks)
        self._num_microbatches = num_microbatches
        self._sums_of_ranks = [sums_of_rank(rank, num_microbatches, self._ranks) for rank in range(self._ranks)]
        self._waiting: defaultdict[str, PartialSums] = defaultdict(list)  # finished sums of earlier leaves
        super().begin(num_microbatches)

    def register_grad_ready(self, name: str) -> None:
        """See `BucketReducer.register_grad_ready`. Add to the current partial sum the stored partial sums that the tree
        adds to it. Store the current partial sum if the next leaf starts a new partial sum."""
        grad, waiting, first_leaf = self._grad(name), self._waiting[name], self._rank * self._num_microbatches
        leaf = first_leaf + self._num_microbatches - self._awaited[name]
        push(waiting, (waiting[-1][0][1] if waiting else first_leaf, leaf + 1), grad, self._block)
        (start, end), _ = waiting.pop()
        # The next leaf of a block can be added directly to the current partial sum. A leaf of `by_rows` is a sum over
        # rows, which must start from zero.
        grows = end - start < self._block and start % self._block == 0 and name != self._by_rows
        if self._awaited[name] > 1 and not grows:
            waiting.append(((start, end), grad.clone()))
            self._begun.discard(name)
        super().register_grad_ready(name)

    def finish_grad_sync(self) -> None:
        """See `BucketReducer.finish_grad_sync`."""
        if self._group is None:
            self._add_tied_gradient()
        super().finish_grad_sync()
        self._embedding_grad = None
        self._waiting.clear()

    def _buckets_of_gradients(self) -> dict[str, int]:
        buckets = dict(self._buffer.bucket_of)
        if self._by_rows == EMBEDDING_GRADIENT:
            buckets[EMBEDDING_GRADIENT] = len(self._buffer.buckets)
        return buckets

    def _grad(self, name: str) -> Tensor:
        if name != EMBEDDING_GRADIENT:
            return self._buffer.grad(name)
        if self._embedding_grad is None:
            self._embedding_grad = torch.zeros_like(self._buffer.bucket_grads(self._buffer.bucket_of[TIED_WEIGHT]))
        return self._in_bucket(TIED_WEIGHT, self._embedding_grad)

    def _in_bucket(self, name: str, bucket: Tensor) -> Tensor:
        """Return the view of parameter `name` in `bucket`, a tensor that is as long as the parameter's bucket."""
        part = slice_within(self._buffer.ranges[name], self._buffer.buckets[self._buffer.bucket_of[name]].range)
        return bucket[part].view_as(self._buffer.parameters[name])

    def _bucket(self, index: int) -> Tensor:
        """Return the gradients of a bucket. The index after the last bucket stands for the embedding's gradient."""
        if index < len(self._buffer.buckets):
            return self._buffer.bucket_grads(index)
        assert self._embedding_grad is not None
        return self._embedding_grad

    def _bucket_sums(self, index: int) -> list[Tensor]:
        """Return the rank's finished partial sums of a bucket, each as long as the bucket."""
        last, names = self._bucket(index), [name for name, at in self._bucket_of.items() if at == index]
        before = [torch.zeros_like(last) for _ in self._waiting[names[0]]]
        for name in names:
            for bucket, (_, waiting) in zip(before, self._waiting[name], strict=True):
                self._in_bucket(TIED_WEIGHT if name == EMBEDDING_GRADIENT else name, bucket).copy_(waiting)
        return [*before, last]

    def _send(self, index: int) -> tuple[dist.Work, Tensor]:
        partial_sums = self._bucket_sums(index)
        part = partial_sums[0].numel() // self._ranks
        # [receiving rank, partial sum, elements of its shard]
        sent = partial_sums[0]
        if len(partial_sums) > 1:
            sent = torch.stack([x.view(self._ranks, part) for x in partial_sums], dim=1).view(-1)
        counts = [part * len(sums) for sums in self._sums_of_ranks]
        terms = sent.new_empty(sum(counts))
        work = dist.all_to_all_single(
            terms, sent, counts, [part * len(partial_sums)] * self._ranks, group=self._group, async_op=True
        )
        assert work is not None
        return work, terms

    def _receive(self, index: int) -> None:
        assert self._group is not None
        grads = self._bucket(index)
        terms = self._wait_for_bucket(index).view(-1, grads.numel() // self._ranks)
        sums: PartialSums = []
        for leaves, term in zip(itertools.chain.from_iterable(self._sums_of_ranks), terms, strict=True):
            push(sums, leaves, term, self._block)
        ((_, total),) = sums
        if self._buffer.is_sharded:
            grads.view(self._ranks, -1)[self._rank].copy_(total)
        else:
            all_gather_single(grads, total, group=self._group)
        if index == len(self._buffer.buckets):
            self._add_tied_gradient()

    def _add_tied_gradient(self) -> None:
        """Add the embedding's gradient of the tied matrix to the head's gradient."""
        if self._embedding_grad is not None:
            self._buffer.bucket_grads(self._buffer.bucket_of[TIED_WEIGHT]).add_(self._embedding_grad)
