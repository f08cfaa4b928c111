"""The order of samples, which depends only on the seed and the global sample number; how many samples each step takes;
and the loaders that follow both.

A step takes equally many micro-batches from each of `data_parallel_size` ranks. Micro-batch k of rank r holds the
global samples consumed + (k · data_parallel_size + r) · micro_batch_size + [0, micro_batch_size), or, if each rank's
follow each other, consumed + (r · n + k) · micro_batch_size + …, of n a rank: a global batch holds the same samples
however it is laid out.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

MISSING = -1  # fills a window after the split's last token; as a label it counts for nothing
ROUNDS = 6
# Samples whose order is made at once: numpy's cost is by the call, not by the sample.
ORDERED_AT_ONCE = 1024
NEVER = 1 << 62  # samples that no run consumes

Order = Callable[[np.ndarray], np.ndarray]  # global sample numbers, int64 [k] -> indices in a dataset, int64 [k]


class Samples(Protocol):
    """A dataset that a loader reads from."""

    seq_length: int

    def __len__(self) -> int: ...

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """int64 [k] -> int64 [k, seq_length + 1]."""
        ...


def mix(values: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each integer, uint64 (the finaliser of splitmix64)."""
    values = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> 27)) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> 31)


def seed_key(seed: int) -> np.ndarray:
    """uint64 [1]: the key of `permute` that a seed stands for."""
    return mix(np.array([seed]))


def _round(half: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Two multiplications: after only one, halves that differ in a bit would differ alike under nearly every key."""
    half = (half ^ key) * np.uint64(0x9E3779B97F4A7C15)
    return ((half ^ (half >> 32)) * np.uint64(0xBF58476D1CE4E5B9)) >> 32


def permute(indices: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """The place of each index in a permutation of range(size) that its key chooses: O(1) time and memory an index.

    indices: int64 [k], in range(size). key: uint64 [k], or [1] for all. Returns int64 [k].
    A Feistel network permutes a power of two that is at least `size`; what lands outside is permuted again until it
    lands inside (cycle walking). That power is below 2 · size except for the smallest sizes, so one or two passes do.
    """
    bits = max(4, (size - 1).bit_length())
    low_bits = bits // 2
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << (bits - low_bits)) - 1)
    keys = mix(mix(key) + np.arange(ROUNDS, dtype=np.uint64)[:, None])  # [rounds, k] or [rounds, 1]
    places = indices.astype(np.uint64)
    walking = np.arange(len(places))
    while len(walking):
        high, low = places[walking] >> low_bits, places[walking] & low_mask
        for number in range(0, ROUNDS, 2):
            high ^= _round(low, keys[number]) & high_mask
            low ^= _round(high, keys[number + 1]) & low_mask
        places[walking] = high << low_bits | low
        outside = places[walking] >= size
        walking = walking[outside]
        keys = keys[:, outside] if keys.shape[1] > 1 else keys
    return places.astype(np.int64)


class SampleOrder:
    """Global sample number -> index in a dataset of `size` samples: a new permutation in every epoch, without an end."""

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        assert size > 0
        self.size, self.shuffle = size, shuffle
        self._key = seed_key(seed)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        epochs, indices = np.divmod(numbers, self.size)
        if not self.shuffle:
            return indices
        if len(epochs) and epochs[0] == epochs[-1]:  # numbers ascend
            epochs = epochs[:1]
        return permute(indices, self.size, self._key ^ epochs.astype(np.uint64))


@dataclass(frozen=True)
class BatchSchedule:
    """`stages`: (samples, size), ascending from 0 samples on. From `samples` consumed samples on, a step
    takes `size` samples. A constant batch is one stage."""

    stages: tuple[tuple[int, int], ...]

    @staticmethod
    def constant(size: int) -> BatchSchedule:
        """The same size in every step."""
        return BatchSchedule(((0, size),))

    @staticmethod
    def rampup(start: int, increment: int, samples: int, final: int) -> BatchSchedule:
        """Megatron's --rampup-batch-size: `increments` of equally many samples, from `start` to `final`, which a step
        takes when more than `samples` are consumed."""
        increments = (final - start) // increment
        stages = {0: start}
        for number in range(1, increments + 1):
            first = -(-number * samples // increments)
            # Megatron divides floats: where this is below `number`, its step there is still smaller.
            late = samples > 0 and int(first / (samples / increments)) < number
            stages[first + late] = start + number * increment
        return BatchSchedule(tuple(stages.items()))

    @property
    def final(self) -> int:
        """The size of the last steps."""
        return self.stages[-1][1]

    def size(self, consumed: int) -> int:
        """The samples of the step before which `consumed` samples were consumed."""
        return self.stages[bisect.bisect_right(self.stages, (consumed, NEVER)) - 1][1]

    def spans(self, consumed: int = 0) -> Iterator[range]:
        """The samples consumed before each step from there on: a range for each size, the last without an end."""
        ends = [first for first, _ in self.stages[1:]] + [NEVER]
        for (_, size), end in zip(self.stages, ends, strict=True):
            if consumed < end:
                yield (span := range(consumed, end, size))
                consumed = span[-1] + size

    def after_steps(self, steps: int, consumed: int = 0) -> int:
        """The samples consumed after `steps` more steps."""
        for span in self.spans(consumed):
            if steps < len(span):
                break
            steps -= len(span)
        return span[steps]

    def before_steps(self, steps: int) -> np.ndarray:
        """int64 [steps + 1]: what is consumed before each of the first steps, and after the last of them."""
        return np.fromiter(itertools.chain.from_iterable(self.spans()), np.int64, steps + 1)

    def steps_until(self, samples: int, consumed: int = 0) -> int:
        """The fewest steps after which at least `samples` are consumed."""
        steps = 0
        for span in self.spans(consumed):
            needed = max(0, -(-(samples - span.start) // span.step))
            if needed <= len(span):
                break
            steps += len(span)
        return steps + needed


def first_samples(size: int, micro_batch_size: int, rank: int, ranks: int, *, contiguous: bool = False) -> np.ndarray:
    """int64 [n]: where each micro-batch of a data-parallel rank begins in a step of `size` samples. contiguous: those
    of a rank follow each other; otherwise the ranks take turns."""
    if contiguous:
        return np.arange(size // ranks * rank, size // ranks * (rank + 1), micro_batch_size)
    return np.arange(micro_batch_size * rank, size, micro_batch_size * ranks)


class BatchLoader:
    """One data-parallel rank's part of every step from `consumed_samples` on, without an end.

    schedule: how many samples a step takes over all ranks, each size a multiple of micro_batch_size ·
    data_parallel_size. contiguous: a rank's micro-batches follow each other; otherwise the ranks take turns.

    `next` returns int64 [n, seq_length + 1], this rank's n samples of the step, the micro-batches one after the other,
    or what `finish` makes of that and of the samples' global numbers, int64 [n]. One thread prepares `prefetch` steps
    ahead, `finish` included; with 0 each step is prepared when it is asked for. `next` raises an error of the thread.
    `wait_seconds` is the time in seconds for which `next` has kept its caller.
    """

    def __init__(
        self,
        dataset: Samples,
        order: Order,
        *,
        micro_batch_size: int,
        schedule: BatchSchedule,
        data_parallel_rank: int,
        data_parallel_size: int,
        consumed_samples: int = 0,
        prefetch: int = 2,
        contiguous: bool = False,
        finish: Callable[[np.ndarray, np.ndarray], Any] = lambda batch, numbers: batch,
    ) -> None:
        assert 0 <= data_parallel_rank < data_parallel_size
        self._dataset, self._order, self._finish = dataset, order, finish
        self._schedule, self._next = schedule, consumed_samples
        self._micro_batch_size, self._rank, self._ranks = micro_batch_size, data_parallel_rank, data_parallel_size
        self._contiguous = contiguous
        self._ordered: deque[np.ndarray] = deque()  # the indices of the steps to come
        self._thread = ThreadPoolExecutor(1, "data loader") if prefetch else None
        self._ready: deque[Callable[[], Any]] = deque()
        self.wait_seconds = 0.0
        for _ in range(prefetch):
            self._begin()

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> Any:
        started = time.perf_counter()
        self._begin()
        batch = self._ready.popleft()()
        self.wait_seconds += time.perf_counter() - started
        return batch

    def close(self) -> None:
        """End the thread; batches that it has prepared are dropped."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _begin(self) -> None:
        """Let the thread prepare one step more; without a thread the step is prepared when it is asked for."""
        prepare = functools.partial(self._batch, self._next)
        self._ready.append(prepare if self._thread is None else self._thread.submit(prepare).result)
        self._next += self._schedule.size(self._next)

    def _batch(self, first: int) -> Any:
        size, micro = self._schedule.size(first), self._micro_batch_size
        begins = first_samples(size, micro, self._rank, self._ranks, contiguous=self._contiguous)
        offsets = (begins[:, None] + np.arange(micro)).ravel()  # of this rank's samples in the step
        if not self._ordered:  # of steps of this size
            steps = next(self._schedule.spans(first))[: -(-ORDERED_AT_ONCE // len(offsets))]
            numbers = (np.array(steps)[:, None] + offsets).ravel()
            self._ordered.extend(self._order(numbers).reshape(len(steps), -1))
        return self._finish(self._dataset.rows(self._ordered.popleft()), first + offsets)


def evaluation_batches(
    dataset: Samples,
    *,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    max_samples: int | None = None,
) -> Iterator[np.ndarray]:
    """Samples 0 to max_samples - 1 in order, once: int64 [micro_batch_size, seq_length + 1] each, the ranks in turn.

    All ranks get equally many batches; rows past the last sample are MISSING throughout.
    """
    count = len(dataset) if max_samples is None else min(len(dataset), max_samples)
    step = micro_batch_size * data_parallel_size
    for first in range(data_parallel_rank * micro_batch_size, -(-count // step) * step, step):
        batch = np.full((micro_batch_size, dataset.seq_length + 1), MISSING, dtype=np.int64)
        there = np.arange(first, min(first + micro_batch_size, count))
        batch[: len(there)] = dataset.rows(there)
        yield batch
