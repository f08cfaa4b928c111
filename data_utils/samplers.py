"""The order of samples, the batch size of each step, and data loaders.

A sample id is the number of a training sample in the run. The order depends only on the seed, the epoch and the sample
id. In a step, each of `data_parallel_size` ranks takes n micro-batches. Micro-batch k of rank r has these sample ids:

    first + (k · data_parallel_size + r) · micro_batch_size + [0, micro_batch_size)    the ranks take turns
    first + (r · n + k) · micro_batch_size + [0, micro_batch_size)                     `contiguous`

`first` is the number of samples that the run has consumed or skipped before the step. A global batch therefore contains
the same samples in every layout.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

MISSING = -1  # the id that pads a window after the split's last token; the loss ignores this id as a label
ROUNDS = 6
# number of samples that the loader permutes in one call; a call for fewer samples takes nearly the same time
PERMUTED_AT_ONCE = 1024
END_OF_RUN = 1 << 62  # a number of samples that no run reaches

# a function from sample ids, int64 [k], to indices in a dataset, int64 [k]
Order = Callable[[np.ndarray], np.ndarray]


class SampleDataset(Protocol):
    """The interface of a dataset that a BatchLoader reads."""

    seq_length: int

    def __len__(self) -> int: ...

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Return the samples of `indices` [k] as int64 [k, seq_length + 1]."""
        ...


def splitmix64(values: np.ndarray) -> np.ndarray:
    """Hash each integer to uint64 with the finaliser of splitmix64."""
    values = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> 27)) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> 31)


def permutation_key(seed: int) -> np.ndarray:
    """Return the key of `permute` for a seed, as uint64 [1]."""
    return splitmix64(np.array([seed]))


def _feistel_round(half: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Mix half of the bits of a number with a key. With only one multiplication, the difference of two outputs would be
    nearly independent of the key."""
    half = (half ^ key) * np.uint64(0x9E3779B97F4A7C15)
    return ((half ^ (half >> 32)) * np.uint64(0xBF58476D1CE4E5B9)) >> 32


def permute(indices: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Permute range(size) as `key` chooses. Return the position of each index, int64 [k], in O(1) time and memory per
    index:

        >>> permute(np.arange(5), 5, permutation_key(1))
        array([1, 2, 0, 4, 3])

    A Feistel network permutes the numbers below a power of two. A position outside range(size) is permuted again until
    it is inside (cycle walking). This power of two is below 2 · size, except for the smallest sizes, so one or two
    passes are usual.

    indices: int64 [k], in range(size).
    key: uint64 [k], one for each index, or [1], one for all indices.
    """
    bits = max(4, (size - 1).bit_length())
    low_bits = bits // 2
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << (bits - low_bits)) - 1)
    keys = splitmix64(splitmix64(key) + np.arange(ROUNDS, dtype=np.uint64)[:, None])  # [rounds, k] or [rounds, 1]
    positions = indices.astype(np.uint64)
    walking = np.arange(len(positions))
    while len(walking):
        high, low = positions[walking] >> low_bits, positions[walking] & low_mask
        for index in range(0, ROUNDS, 2):
            high ^= _feistel_round(low, keys[index]) & high_mask
            low ^= _feistel_round(high, keys[index + 1]) & low_mask
        positions[walking] = high << low_bits | low
        outside = positions[walking] >= size
        walking = walking[outside]
        keys = keys[:, outside] if keys.shape[1] > 1 else keys
    return positions.astype(np.int64)


class SampleOrder:
    """Maps sample ids to indices of a dataset of `size` samples, with a new permutation in every epoch."""

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        assert size > 0
        self.size, self.shuffle = size, shuffle
        self._key = permutation_key(seed)

    def __call__(self, sample_ids: np.ndarray) -> np.ndarray:
        epochs, indices = np.divmod(sample_ids, self.size)
        if not self.shuffle:
            return indices
        if len(epochs) and epochs[0] == epochs[-1]:  # The ids are in ascending order.
            epochs = epochs[:1]
        return permute(indices, self.size, self._key ^ epochs.astype(np.uint64))


@dataclass(frozen=True)
class BatchSchedule:
    """The global batch size of each step.

    milestones: pairs (consumed samples, batch size), in ascending order. A pair's batch size applies to steps that
        begin after at least the pair's number of consumed samples. The first pair begins at 0 samples.
    """

    milestones: tuple[tuple[int, int], ...]

    @staticmethod
    def constant(size: int) -> BatchSchedule:
        """Return a schedule with the same size in every step."""
        return BatchSchedule(((0, size),))

    @staticmethod
    def rampup(start: int, increment: int, samples: int, final: int) -> BatchSchedule:
        """Return Megatron's --rampup-batch-size: the size grows from `start` to `final` by `increment`, at equal
        distances, while the first `samples` samples are consumed."""
        increments = (final - start) // increment
        milestones = {0: start}
        for index in range(1, increments + 1):
            consumed = -(-index * samples // increments)
            # Megatron divides floats. If the quotient is rounded below `index`, Megatron's batch grows one sample
            # later.
            delay = samples > 0 and int(consumed / (samples / increments)) < index
            milestones[consumed + delay] = start + index * increment
        return BatchSchedule(tuple(milestones.items()))

    @property
    def final(self) -> int:
        """The batch size after the ramp-up."""
        return self.milestones[-1][1]

    def size(self, consumed: int) -> int:
        """Return the batch size of the next step after `consumed` samples."""
        return self.milestones[bisect.bisect_right(self.milestones, (consumed, END_OF_RUN)) - 1][1]

    def spans(self, consumed: int = 0) -> Iterator[range]:
        """For each batch size, yield a range: the numbers of samples that are consumed before the steps of this size.
        The last range has no end."""
        ends = [samples for samples, _ in self.milestones[1:]] + [END_OF_RUN]
        for (_, size), end in zip(self.milestones, ends, strict=True):
            if consumed < end:
                yield (span := range(consumed, end, size))
                consumed = span[-1] + size

    def samples_after_steps(self, steps: int, consumed: int = 0) -> int:
        """Return the number of consumed samples after `steps` more steps."""
        for span in self.spans(consumed):
            if steps < len(span):
                break
            steps -= len(span)
        return span[steps]

    def samples_before_steps(self, steps: int) -> np.ndarray:
        """Return the consumed samples before each of the first `steps` steps and after the last one, int64 [steps +
        1]."""
        return np.fromiter(itertools.chain.from_iterable(self.spans()), np.int64, steps + 1)

    def steps_until(self, samples: int, consumed: int = 0) -> int:
        """Return the smallest number of steps after which at least `samples` samples are consumed."""
        steps = 0
        for span in self.spans(consumed):
            needed = max(0, -(-(samples - span.start) // span.step))
            if needed <= len(span):
                break
            steps += len(span)
        return steps + needed


def micro_batch_starts(
    size: int, micro_batch_size: int, rank: int, ranks: int, *, contiguous: bool = False
) -> np.ndarray:
    """Return the first sample of each micro-batch of a data-parallel rank, int64 [n], within a step of `size` samples.

    contiguous: the micro-batches of a rank are contiguous; otherwise the ranks take turns.
    """
    if contiguous:
        return np.arange(size // ranks * rank, size // ranks * (rank + 1), micro_batch_size)
    return np.arange(micro_batch_size * rank, size, micro_batch_size * ranks)


class BatchLoader:
    """Iterates without end over one data-parallel rank's samples of each step, after the first `consumed_samples` +
    `skipped_samples` samples of the run.

    schedule: the global batch sizes, multiples of micro_batch_size · data_parallel_size, by consumed samples.
    contiguous: the micro-batches of a rank are contiguous; otherwise the ranks take turns.
    collate_fn: receives this rank's b samples of a step, int64 [b, seq_length + 1], in the order of micro-batches, and
        their sample ids, int64 [b]. `next` returns the result of `collate_fn`, by default the samples.

    A thread prepares `prefetch` steps ahead and calls `collate_fn`. If `prefetch` is 0, `next` prepares each step.
    `next` raises the thread's errors.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        order: Order,
        *,
        micro_batch_size: int,
        schedule: BatchSchedule,
        data_parallel_rank: int,
        data_parallel_size: int,
        consumed_samples: int = 0,
        skipped_samples: int = 0,
        prefetch: int = 2,
        contiguous: bool = False,
        collate_fn: Callable[[np.ndarray, np.ndarray], Any] = lambda token_ids, sample_ids: token_ids,
    ) -> None:
        assert 0 <= data_parallel_rank < data_parallel_size
        self._dataset, self._order, self._collate_fn = dataset, order, collate_fn
        self._schedule, self._next, self._skipped = schedule, consumed_samples, skipped_samples
        self._micro_batch_size, self._rank, self._ranks = micro_batch_size, data_parallel_rank, data_parallel_size
        self._contiguous = contiguous
        self._ordered: deque[np.ndarray] = deque()  # the indices of the samples of the next steps
        self._thread = ThreadPoolExecutor(1, "data loader") if prefetch else None
        self._ready: deque[Callable[[], Any]] = deque()
        for _ in range(prefetch):
            self._begin()

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> Any:
        self._begin()
        return self._ready.popleft()()

    def close(self) -> None:
        """End the thread and drop the batches that it has prepared."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _begin(self) -> None:
        """Submit one more step to the thread, if there is a thread."""
        prepare = functools.partial(self._batch, self._next)
        self._ready.append(prepare if self._thread is None else self._thread.submit(prepare).result)
        self._next += self._schedule.size(self._next)

    def _batch(self, consumed: int) -> Any:
        """Prepare the step that begins after `consumed` samples."""
        size, micro = self._schedule.size(consumed), self._micro_batch_size
        starts = micro_batch_starts(size, micro, self._rank, self._ranks, contiguous=self._contiguous)
        # the sample ids of this rank, relative to the consumed samples
        offsets = self._skipped + (starts[:, None] + np.arange(micro)).ravel()
        if not self._ordered:  # Permute the samples of many equal steps at once.
            steps = next(self._schedule.spans(consumed))[: -(-PERMUTED_AT_ONCE // len(offsets))]
            sample_ids = (np.array(steps)[:, None] + offsets).ravel()
            self._ordered.extend(self._order(sample_ids).reshape(len(steps), -1))
        return self._collate_fn(self._dataset.rows(self._ordered.popleft()), consumed + offsets)


def evaluation_batches(
    dataset: SampleDataset,
    *,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    max_samples: int | None = None,
) -> Iterator[np.ndarray]:
    """Yield samples 0 to max_samples - 1 once, in order, as int64 [micro_batch_size, seq_length + 1]. The ranks take
    turns.

    All ranks get the same number of batches. Rows after the last sample are filled with MISSING.
    """
    count = len(dataset) if max_samples is None else min(len(dataset), max_samples)
    step = micro_batch_size * data_parallel_size
    for start in range(data_parallel_rank * micro_batch_size, -(-count // step) * step, step):
        batch = np.full((micro_batch_size, dataset.seq_length + 1), MISSING, dtype=np.int64)
        indices = np.arange(start, min(start + micro_batch_size, count))
        batch[: len(indices)] = dataset.rows(indices)
        yield batch
