from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from data_utils import (
    MISSING,
    BatchLoader,
    BatchSchedule,
    GPT2Dataset,
    SampleOrder,
    build_tokenizer,
    evaluation_batches,
    permute,
    samplers,
)
from data_utils.gpt2_dataset import DamagedData
from data_utils.samplers import Samples


@pytest.fixture(scope="module")
def dataset() -> GPT2Dataset:
    tokens = np.random.default_rng(0).integers(0, 256, 37 * 8 + 1).astype(np.uint16)
    return GPT2Dataset(tokens, 0, len(tokens), 8, build_tokenizer("bytes"), wrap=True)


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


def test_permute_of_huge_sizes() -> None:
    assert len(set(permute(np.arange(1000), 10**15, KEYS[0]))) == 1000


def test_every_epoch_holds_all_samples_in_an_order_of_its_own() -> None:
    order = SampleOrder(100, seed=3)
    epochs = order(np.arange(400)).reshape(4, 100)
    assert (np.sort(epochs) == np.arange(100)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert not np.array_equal(epochs[0], SampleOrder(100, seed=4)(np.arange(100)))
    assert SampleOrder(3, seed=4, shuffle=False)(np.arange(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]


def load(
    dataset: Samples, steps: int, *, consumed: int = 0, size: int = 1, accumulation: int, micro: int, prefetch: int = 2
) -> np.ndarray:
    """[steps, global batch, seq_length + 1], put together from all ranks."""
    loaders = [
        BatchLoader(
            dataset,
            SampleOrder(len(dataset), 5),
            micro_batch_size=micro,
            schedule=BatchSchedule.constant(size * accumulation * micro),
            data_parallel_rank=rank,
            data_parallel_size=size,
            consumed_samples=consumed,
            prefetch=prefetch,
        )
        for rank in range(size)
    ]
    made = []
    for _ in range(steps):
        parts = [next(loader).reshape(accumulation, micro, -1) for loader in loaders]
        made.append(np.stack(parts, axis=1).reshape(accumulation * size * micro, -1))
    for loader in loaders:
        loader.close()
    return np.stack(made)


def test_every_layout_sees_the_same_samples_in_the_same_step(dataset: GPT2Dataset) -> None:
    order = SampleOrder(len(dataset), 5)
    expected = np.stack([dataset[index] for index in order(np.arange(12 * 8))]).reshape(12, 8, -1)  # 2.6 epochs
    for size, accumulation, micro in ((1, 1, 8), (1, 4, 2), (2, 1, 4), (2, 2, 2), (4, 1, 2), (4, 2, 1)):
        for prefetch in (0, 1, 3):
            found = load(dataset, 12, size=size, accumulation=accumulation, micro=micro, prefetch=prefetch)
            assert (found == expected).all()


def test_resuming_at_any_sample_goes_on_exactly(dataset: GPT2Dataset) -> None:
    whole = load(dataset, 14, accumulation=1, micro=8)
    for done in range(1, 13):
        assert (load(dataset, 1, consumed=done * 8, size=2, accumulation=2, micro=2) == whole[done]).all()
    odd = load(dataset, 2, consumed=3, accumulation=1, micro=8)
    assert (odd.reshape(16, -1) == whole.reshape(112, -1)[3:19]).all()


class Numbered:
    """A data set whose samples are their own numbers."""

    seq_length = 0

    def __len__(self) -> int:
        return 3000

    def rows(self, indices: np.ndarray) -> np.ndarray:
        return indices[:, None]


def test_the_first_ten_thousand_samples_at_every_width_and_after_a_resume() -> None:
    whole = SampleOrder(3000, 5)(np.arange(10_000))  # three epochs and a third
    for size, accumulation, micro in ((1, 2, 4), (2, 1, 4), (4, 2, 1)):
        assert (load(Numbered(), 1250, size=size, accumulation=accumulation, micro=micro).ravel() == whole).all()
    for size, accumulation, micro in ((1, 1, 13), (4, 1, 4)):
        steps = (10_000 - 7777) // (size * accumulation * micro)
        found = load(Numbered(), steps, consumed=7777, size=size, accumulation=accumulation, micro=micro).ravel()
        assert (found == whole[7777 : 7777 + len(found)]).all() and len(found) > 2200


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
            damaged = GPT2Dataset(tokens, 0, len(tokens), 8, build_tokenizer("bytes"), wrap=wrap, source="a/b.bin")
            damaged.rows(np.delete(np.arange(20), sample))
            with pytest.raises(DamagedData, match=f"a/b.bin holds the token id {bad}, but the vocabulary has 257"):
                damaged.rows(np.arange(20))


@pytest.mark.parametrize("max_samples", [None, 1, 8, 9, 30, 1000])
def test_evaluation_reads_each_sample_once(dataset: GPT2Dataset, max_samples: int | None) -> None:
    count = min(len(dataset), max_samples or len(dataset))
    expected = np.stack([dataset[index] for index in range(count)])
    for size, micro in ((1, 4), (2, 4), (4, 1), (3, 5)):
        ranks = [
            np.stack(
                list(
                    evaluation_batches(
                        dataset,
                        micro_batch_size=micro,
                        data_parallel_rank=rank,
                        data_parallel_size=size,
                        max_samples=max_samples,
                    )
                )
            )
            for rank in range(size)
        ]
        rows = np.stack(ranks, axis=1).reshape(-1, dataset.seq_length + 1)
        assert (rows[:count] == expected).all() and (rows[count:] == MISSING).all() and len(rows) < count + size * micro
