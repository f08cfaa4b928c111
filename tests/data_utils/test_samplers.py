from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from data_utils import MISSING, BatchLoader, GPT2Dataset, SampleOrder, build_tokenizer, evaluation_batches, permute


@pytest.fixture(scope="module")
def dataset() -> GPT2Dataset:
    tokens = np.random.default_rng(0).integers(0, 256, 37 * 8 + 1).astype(np.uint16)
    return GPT2Dataset(tokens, 0, len(tokens), 8, build_tokenizer("bytes"), wrap=True)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 1023, 1024, 1025, 20_000])
def test_permute_is_a_permutation(size: int) -> None:
    for key in (0, 1, 2**64 + 5):
        assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


def test_permute_mixes() -> None:
    size = 3000
    order = [permute(index, size, 7) for index in range(size)]
    assert order != [permute(index, size, 8) for index in range(size)]
    steps = np.diff(order)
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.1 and len(np.unique(steps)) > size * 0.6
    # Over many keys every place, and every distance of two neighbours, is about equally frequent: chi squared with 9
    # and 8 degrees of freedom.
    places = np.bincount([permute(3, 10, key) for key in range(5000)], minlength=10)
    distances = np.bincount([(permute(1, 10, key) - permute(0, 10, key)) % 10 for key in range(5000)], minlength=10)[1:]
    for counts in (places, distances):
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 30


def test_permute_of_huge_sizes() -> None:
    assert len({permute(index, 10**15, 3) for index in range(1000)}) == 1000


def test_every_epoch_holds_all_samples_in_an_order_of_its_own() -> None:
    order = SampleOrder(100, seed=3)
    epochs = [[order(epoch * 100 + index) for index in range(100)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs[0] != [SampleOrder(100, seed=4)(index) for index in range(100)]
    assert [SampleOrder(3, seed=4, shuffle=False)(index) for index in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def load(dataset: GPT2Dataset, steps: int, *, consumed: int = 0, size: int = 1, accumulation: int, micro: int,
         prefetch: int = 2) -> np.ndarray:
    """[steps, global batch, seq_length + 1], put together from all ranks."""
    loaders = [BatchLoader(dataset, SampleOrder(len(dataset), 5), micro_batch_size=micro, accumulation=accumulation,
                           data_parallel_rank=rank, data_parallel_size=size, consumed_samples=consumed,
                           prefetch=prefetch) for rank in range(size)]
    made = []
    for _ in range(steps):
        parts = [next(loader).reshape(accumulation, micro, -1) for loader in loaders]
        made.append(np.stack(parts, axis=1).reshape(accumulation * size * micro, -1))
    for loader in loaders:
        loader.close()
    return np.stack(made)


def test_every_layout_sees_the_same_samples_in_the_same_step(dataset: GPT2Dataset) -> None:
    order = SampleOrder(len(dataset), 5)
    expected = np.stack([dataset[order(number)] for number in range(12 * 8)]).reshape(12, 8, -1)  # 2.6 epochs
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


def test_errors_of_the_thread_reach_the_caller(dataset: GPT2Dataset) -> None:
    def order(number: int) -> int:
        if number >= 4:
            raise OSError("the disk is gone")
        return number

    loader = BatchLoader(dataset, order, micro_batch_size=2, accumulation=1, data_parallel_rank=0, data_parallel_size=1)
    next(loader), next(loader)
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            next(loader)
    loader.close()


def test_the_thread_works_ahead_and_ends(dataset: GPT2Dataset) -> None:
    def order(number: int) -> int:
        time.sleep(0.02)
        return number % 3

    def threads() -> int:
        return sum("data loader" in thread.name for thread in threading.enumerate())

    waits = {}
    for prefetch in (0, 2):
        loader = BatchLoader(dataset, order, micro_batch_size=1, accumulation=1, data_parallel_rank=0,
                             data_parallel_size=1, prefetch=prefetch)
        assert threads() == (prefetch > 0)
        for _ in range(5):
            time.sleep(0.04)
            next(loader)
        waits[prefetch] = loader.wait_seconds
        loader.close()
        assert threads() == 0
    assert waits[0] >= 0.1 > waits[2]


@pytest.mark.parametrize("max_samples", [None, 1, 8, 9, 30, 1000])
def test_evaluation_reads_each_sample_once(dataset: GPT2Dataset, max_samples: int | None) -> None:
    count = min(len(dataset), max_samples or len(dataset))
    expected = np.stack([dataset[index] for index in range(count)])
    for size, micro in ((1, 4), (2, 4), (4, 1), (3, 5)):
        ranks = [np.stack(list(evaluation_batches(dataset, micro_batch_size=micro, data_parallel_rank=rank,
                                                  data_parallel_size=size, max_samples=max_samples)))
                 for rank in range(size)]
        rows = np.stack(ranks, axis=1).reshape(-1, dataset.seq_length + 1)
        assert (rows[:count] == expected).all() and (rows[count:] == MISSING).all() and len(rows) < count + size * micro
