"""The order of samples, a function of the seed and the global sample number alone, and the loaders that follow it.

A step takes `accumulation` micro-batches from each of `data_parallel_size` ranks. Micro-batch k of rank r holds the
global samples consumed + (k · data_parallel_size + r) · micro_batch_size + [0, micro_batch_size): however a global
batch is laid out, it holds the same samples.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from data_utils.gpt2_dataset import MISSING, GPT2Dataset

ROUNDS = 6
MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """A 64-bit hash of an integer (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def _round(half: int, key: int) -> int:
    """Two multiplications: after one alone, halves that differ in a bit would differ alike under nearly every key."""
    half = ((half ^ key) * 0x9E3779B97F4A7C15) & MASK
    return (((half ^ (half >> 32)) * 0xBF58476D1CE4E5B9) & MASK) >> 32


@functools.lru_cache(maxsize=64)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(_mix(_mix(key & MASK) + number) for number in range(ROUNDS))


def permute(index: int, size: int, key: int) -> int:
    """The place of `index` in a permutation of range(size) that `key` chooses, in O(1) time and memory.

    A Feistel network permutes a power of two that is at least `size`; what lands outside is permuted again until it
    lands inside (cycle walking). That power is below 2 · size except for the smallest sizes, so one or two passes do.
    """
    assert 0 <= index < size
    bits = max(4, (size - 1).bit_length())
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    keys = _round_keys(key)
    while True:
        high, low = index >> low_bits, index & low_mask
        for number in range(0, ROUNDS, 2):
            high ^= _round(low, keys[number]) & high_mask
            low ^= _round(high, keys[number + 1]) & low_mask
        index = high << low_bits | low
        if index < size:
            return index


class SampleOrder:
    """Global sample number to index in the dataset: a new permutation every epoch, for ever."""

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        assert size > 0
        self.size, self.seed, self.shuffle = size, seed, shuffle

    def __call__(self, number: int) -> int:
        epoch, index = divmod(number, self.size)
        return permute(index, self.size, _mix(self.seed) ^ epoch) if self.shuffle else index


class BatchLoader:
    """The share of one data-parallel rank of every step from `consumed_samples` on, for ever.

    `next` gives int64 [accumulation · micro_batch_size, seq_length + 1], micro-batches one after the other, as
    `finish` made of it (nothing by default). One thread prepares `prefetch` steps ahead, `finish` included; 0 prepares
    each when it is asked for. An error of the thread is raised by `next`. `wait_seconds` is the time for which `next`
    kept its caller in all.
    """

    def __init__(self, dataset: GPT2Dataset, order: Callable[[int], int], *, micro_batch_size: int, accumulation: int,
                 data_parallel_rank: int, data_parallel_size: int, consumed_samples: int = 0, prefetch: int = 2,
                 finish: Callable[[np.ndarray], Any] = lambda batch: batch) -> None:
        assert 0 <= data_parallel_rank < data_parallel_size
        self._dataset, self._order, self._finish = dataset, order, finish
        self._offsets = [(k * data_parallel_size + data_parallel_rank) * micro_batch_size + row
                         for k in range(accumulation) for row in range(micro_batch_size)]
        self._step = micro_batch_size * accumulation * data_parallel_size
        self._next = consumed_samples
        self._thread = ThreadPoolExecutor(1, "data loader") if prefetch else None
        self._ready: deque[Future[Any]] = deque()
        self.wait_seconds = 0.0
        for _ in range(prefetch):
            self._prepare()

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> Any:
        started = time.perf_counter()
        if self._thread is None:
            batch = self._batch(self._next)
            self._next += self._step
        else:
            self._prepare()
            batch = self._ready.popleft().result()
        self.wait_seconds += time.perf_counter() - started
        return batch

    def close(self) -> None:
        """End the thread; batches that it has prepared are dropped."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _prepare(self) -> None:
        assert self._thread is not None
        self._ready.append(self._thread.submit(self._batch, self._next))
        self._next += self._step

    def _batch(self, first: int) -> Any:
        return self._finish(_rows(self._dataset, [self._order(first + offset) for offset in self._offsets]))


def evaluation_batches(dataset: GPT2Dataset, *, micro_batch_size: int, data_parallel_rank: int,
                       data_parallel_size: int, max_samples: int | None = None) -> Iterator[np.ndarray]:
    """Samples 0 to max_samples - 1 in order, once, in int64 [micro_batch_size, seq_length + 1], ranks in turn.

    All ranks get equally many batches; rows past the last sample are MISSING throughout.
    """
    count = len(dataset) if max_samples is None else min(len(dataset), max_samples)
    step = micro_batch_size * data_parallel_size
    for first in range(data_parallel_rank * micro_batch_size, -(-count // step) * step, step):
        yield _rows(dataset, [index if index < count else None for index in range(first, first + micro_batch_size)])


def _rows(dataset: GPT2Dataset, indices: Sequence[int | None]) -> np.ndarray:
    batch = np.full((len(indices), dataset.seq_length + 1), MISSING, dtype=np.int64)
    for row, index in enumerate(indices):
        if index is not None:
            batch[row] = dataset[index]
    return batch
