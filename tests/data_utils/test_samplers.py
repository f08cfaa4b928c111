"""The order of samples, the size of each step, and the loaders that follow both."""

from __future__ import annotations

import importlib.util
import itertools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data_utils import (
    MISSING,
    BatchLoader,
    BatchSchedule,
    DamagedData,
    GPT2Dataset,
    SampleOrder,
    evaluation_batches,
    permute,
    samplers,
)
from tests.data_utils.made import BYTES, global_batches

KEYS = [np.array([key], np.uint64) for key in (0, 1, 5, 2**64 - 1)]


def order_of_one(number: int, size: int, seed: int) -> int:
    """The order spelled out for one sample in Python's integers: what runs under way and checkpoints rely on."""
    mask = (1 << 64) - 1

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    def scramble(half: int, key: int) -> int:
        half = ((half ^ key) * 0x9E3779B97F4A7C15) & mask
        return (((half ^ (half >> 32)) * 0xBF58476D1CE4E5B9) & mask) >> 32

    epoch, index = divmod(number, size)
    keys = [mix(mix(mix(seed) ^ epoch) + number) for number in range(6)]
    bits = max(4, (size - 1).bit_length())
    low_bits = bits // 2
    while True:
        high, low = index >> low_bits, index & ((1 << low_bits) - 1)
        for number in range(0, 6, 2):
            high ^= scramble(low, keys[number]) & ((1 << (bits - low_bits)) - 1)
            low ^= scramble(high, keys[number + 1]) & ((1 << low_bits) - 1)
        index = high << low_bits | low
        if index < size:
            return index


@pytest.mark.parametrize("size", [1, 3, 16, 17, 1000, 10**15])
def test_the_order_is_that_of_the_formula(size: int) -> None:
    numbers = np.concatenate([np.arange(500), np.arange(size - 10, size + 10), [2 * size, 7 * size + 1]])
    for seed in (0, 1234, 2**31 - 1):
        expected = [order_of_one(int(number), size, seed) for number in numbers if number >= 0]
        assert SampleOrder(size, seed)(numbers[numbers >= 0]).tolist() == expected


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 1023, 1024, 1025, 20_000])
def test_permute_is_a_permutation(size: int) -> None:
    for key in KEYS:
        assert sorted(permute(np.arange(size), size, key)) == list(range(size))


def test_permute_mixes() -> None:
    size = 3000
    order = permute(np.arange(size), size, KEYS[1])
    assert not np.array_equal(order, permute(np.arange(size), size, KEYS[2]))
    steps = np.diff(order)
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.1 and len(np.unique(steps)) > size * 0.6
    # Over many keys every place, and every distance of two neighbours, is about equally frequent: chi squared with 9
    # and 8 degrees of freedom.
    keys = np.arange(5000, dtype=np.uint64)
    first, second, third = (permute(np.full(5000, index), 10, keys) for index in (0, 1, 3))
    places, distances = np.bincount(third, minlength=10), np.bincount((second - first) % 10, minlength=10)[1:]
    for counts in (places, distances):
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 30


def test_every_epoch_holds_all_samples_in_an_order_of_its_own() -> None:
    order = SampleOrder(100, seed=3)
    epochs = order(np.arange(400)).reshape(4, 100)
    assert (np.sort(epochs) == np.arange(100)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert not np.array_equal(epochs[0], SampleOrder(100, seed=4)(np.arange(100)))
    assert SampleOrder(3, seed=4, shuffle=False)(np.arange(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]


class Numbered:
    """A data set whose samples are their own numbers."""

    seq_length = 0

    def __len__(self) -> int:
        return 3000

    def rows(self, indices: np.ndarray) -> np.ndarray:
        return indices[:, None]


def test_the_first_ten_thousand_samples_at_every_width_and_after_a_resume() -> None:
    order = SampleOrder(3000, 5)
    whole = order(np.arange(10_000))  # three epochs and a third
    for size, accumulation, micro, prefetch in ((1, 2, 4, 2), (2, 1, 4, 0), (4, 2, 1, 1), (1, 1, 8, 3)):
        layout: dict[str, Any] = {"size": size, "accumulation": accumulation, "micro": micro, "prefetch": prefetch}
        assert (global_batches(Numbered(), order, 1250, **layout).ravel() == whole).all()
    for size, micro, consumed in ((1, 13, 7777), (4, 4, 7777), (1, 8, 3)):
        steps = min(200, (10_000 - consumed) // (size * micro))
        found = global_batches(Numbered(), order, steps, size=size, micro=micro, consumed_samples=consumed).ravel()
        assert (found == whole[consumed : consumed + len(found)]).all() and len(found) >= 1600


def test_errors_of_the_thread_reach_the_caller() -> None:
    class Failing(Numbered):
        def rows(self, indices: np.ndarray) -> np.ndarray:
            if indices.max() >= 4:
                raise OSError("the disk is gone")
            return super().rows(indices)

    loader = BatchLoader(
        Failing(),
        SampleOrder(3000, 0, shuffle=False),
        micro_batch_size=2,
        schedule=BatchSchedule.constant(2),
        data_parallel_rank=0,
        data_parallel_size=1,
    )
    assert [next(loader).ravel().tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            next(loader)
    loader.close()


class Gated(Numbered):
    """Reads as often as it may; each read takes a second of a clock that stands still otherwise."""

    def __init__(self) -> None:
        self.may_read, self.has_read = threading.Semaphore(0), threading.Semaphore(0)
        self.readers: list[threading.Thread] = []
        self.seconds = 0.0

    def let_read(self, times: int) -> None:
        """Returns when that many reads more are done."""
        for _ in range(times):
            self.may_read.release()
        for _ in range(times):
            assert self.has_read.acquire(timeout=240)

    def rows(self, indices: np.ndarray) -> np.ndarray:
        assert self.may_read.acquire(timeout=240)
        self.readers.append(threading.current_thread())
        self.seconds += 1.0
        self.has_read.release()
        return super().rows(indices)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_thread_works_ahead_and_ends(prefetch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads `prefetch` steps before they are asked for, and one more for each that is taken."""
    data = Gated()
    monkeypatch.setattr(samplers, "time", SimpleNamespace(perf_counter=lambda: data.seconds))
    loader = BatchLoader(
        data,
        SampleOrder(3000, 0),
        micro_batch_size=1,
        schedule=BatchSchedule.constant(1),
        data_parallel_rank=0,
        data_parallel_size=1,
        prefetch=prefetch,
    )
    data.let_read(prefetch)
    for step in range(1, 6):
        if prefetch == 0:
            data.may_read.release()
        next(loader)
        if prefetch > 0:
            data.let_read(1)
        assert len(data.readers) == prefetch + step
    readers = set(data.readers)
    if prefetch == 0:
        assert readers == {threading.current_thread()} and loader.wait_seconds == 5.0
        loader.close()
    else:
        (reader,) = readers
        assert reader is not threading.current_thread() and reader.is_alive() and loader.wait_seconds == 0.0
        loader.close()
        assert not reader.is_alive()


def test_an_id_beyond_the_vocabulary_is_found_when_it_is_read() -> None:
    for dtype, bad in ((np.uint16, 257), (np.int32, 257), (np.int32, -1)):
        tokens = np.arange(8 * 20 + 1).astype(dtype)
        tokens[83] = bad
        for wrap, sample in ((True, 10), (False, 10)):
            damaged = GPT2Dataset(tokens, 0, len(tokens), 8, BYTES, wrap=wrap, source="a/b.bin")
            damaged.rows(np.delete(np.arange(20), sample))
            with pytest.raises(DamagedData, match=f"a/b.bin holds the token id {bad}, but the vocabulary has 257"):
                damaged.rows(np.arange(20))


@pytest.mark.parametrize("max_samples", [None, 1, 8, 9, 30, 1000])
def test_evaluation_reads_each_sample_once(max_samples: int | None) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 37 * 8 + 1).astype(np.uint16)
    dataset = GPT2Dataset(tokens, 0, len(tokens), 8, BYTES, wrap=True)
    count = min(len(dataset), max_samples or len(dataset))
    expected = np.stack([dataset[index] for index in range(count)])
    for size, micro in ((1, 4), (2, 4), (4, 1), (3, 5)):
        given: dict[str, Any] = {"micro_batch_size": micro, "data_parallel_size": size, "max_samples": max_samples}
        ranks = [np.stack([*evaluation_batches(dataset, data_parallel_rank=rank, **given)]) for rank in range(size)]
        rows = np.stack(ranks, axis=1).reshape(-1, dataset.seq_length + 1)
        assert (rows[:count] == expected).all() and (rows[count:] == MISSING).all() and len(rows) < count + size * micro


# --- a batch that grows: Megatron's schedules, and what follows from them

# (start, increment, samples, final); of the third, Megatron's floats miss a border: 4017 of 4223 samples.
RAMPS = [(4, 2, 50, 12), (1, 1, 0, 3), (1, 1, 4223, 124), (8, 8, 5, 64), (16, 8, 300_000, 256), (4, 3, 7, 4)]


def calculator() -> Any:
    """megatron-core's file without its package, which takes long to load."""
    found = importlib.util.find_spec("megatron.core") or pytest.skip("megatron-core is not installed")
    assert found.origin is not None
    path = Path(found.origin).parent / "num_microbatches_calculator.py"
    spec = importlib.util.spec_from_file_location("theirs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_a_ramp_has_the_sizes_of_megatron_core(ramp: tuple[int, int, int, int]) -> None:
    start, increment, samples, final = ramp
    ours = BatchSchedule.rampup(*ramp)
    assert ours.final == final and ours.size(samples + 1) == final and ours.size(0) == (start if samples else final)
    assert [size for _, size in ours.stages] == sorted(size for _, size in ours.stages)
    if samples == 0 or start == final:
        return  # Megatron divides by zero
    theirs = calculator().RampupBatchsizeNumMicroBatchesCalculator(final, 1, 1, False, 1, start, increment, samples)
    near = {max(0, first + more) for first, _ in ours.stages for more in (-1, 0, 1)} | {samples, samples + 1}
    for consumed in near:
        theirs.update(consumed, False)
        assert ours.size(consumed) == theirs.get_current_global_batch_size(), consumed


@pytest.mark.parametrize(
    "schedule",
    [
        BatchSchedule.constant(5),
        BatchSchedule.rampup(4, 2, 50, 12),
        BatchSchedule.rampup(1, 1, 4, 9),
        BatchSchedule(((0, 7), (2, 9), (5, 11), (100, 64))),
    ],
    ids=str,
)
def test_what_follows_is_what_one_step_after_another_gives(schedule: BatchSchedule) -> None:
    assert schedule.before_steps(0).tolist() == [0]
    for begin in (0, 3, 60, 1000):
        consumed = begin
        for steps in range(40):
            assert schedule.after_steps(steps, begin) == consumed
            assert schedule.steps_until(consumed, begin) == steps and schedule.steps_until(consumed + 1, begin) > steps
            if begin == 0:
                assert schedule.before_steps(steps)[-1] == consumed
            consumed += schedule.size(consumed)
    starts = itertools.islice(itertools.chain.from_iterable(schedule.spans()), 41)
    assert schedule.before_steps(40).tolist() == list(starts)


def test_a_loader_follows_it_at_every_width_and_after_a_resume() -> None:
    schedule = BatchSchedule(((0, 4), (20, 8), (90, 16), (3000, 64)))
    first, order = schedule.before_steps(120), SampleOrder(3000, 5)
    whole = order(np.arange(first[-1]))
    for ranks, micro, prefetch, begin in ((1, 4, 3, 0), (2, 2, 2, 0), (4, 1, 0, 0), (2, 4, 2, 5), (4, 2, 1, 6)):
        given: dict[str, Any] = {"schedule": schedule, "prefetch": prefetch, "consumed_samples": int(first[begin])}
        found = global_batches(Numbered(), order, 120 - begin, size=ranks, micro=micro, **given)
        assert (found.ravel() == whole[first[begin] :]).all()
