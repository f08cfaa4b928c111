"""A batch that grows: the sizes of Megatron's schedules, and what follows from them, against one step after another."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_utils import BatchLoader, BatchSchedule, SampleOrder
from tests.data_utils.test_samplers import Numbered

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
    first = schedule.before_steps(120)
    whole = SampleOrder(3000, 5)(np.arange(first[-1]))
    for ranks, micro, prefetch, begin in ((1, 4, 3, 0), (2, 2, 2, 0), (4, 1, 0, 0), (2, 4, 2, 5), (4, 2, 1, 6)):
        steps = range(begin, 120)
        loaders = [
            BatchLoader(
                Numbered(),
                SampleOrder(3000, 5),
                micro_batch_size=micro,
                schedule=schedule,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
                prefetch=prefetch,
                consumed_samples=int(first[begin]),
            )
            for rank in range(ranks)
        ]
        for step in steps:
            parts = [next(loader).reshape(-1, micro) for loader in loaders]
            assert np.stack(parts, axis=1).ravel().tolist() == whole[first[step] : first[step + 1]].tolist()
        for loader in loaders:
            loader.close()
