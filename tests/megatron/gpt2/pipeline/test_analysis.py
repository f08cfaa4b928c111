"""Test the messages between pipeline ranks, the length of a step, and the number of micro-batches in flight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from graphlib import TopologicalSorter
from itertools import product

import pytest

from megatron.gpt2.pipeline.analysis import max_in_flight, timetable, uniform_costs
from megatron.gpt2.pipeline.p2p_schedule import (
    ActionCosts,
    CommStep,
    P2PMessage,
    build_p2p_schedule,
    dependencies,
)
from megatron.gpt2.pipeline.schedule import PipelineSchedule, interleaved, one_forward_one_backward, zero_bubble


def check(schedule: PipelineSchedule, steps: Sequence[Sequence[CommStep]]) -> None:
    """Assert that each action runs after its inputs are complete, that each message is sent after it was computed, and
    that messages are received in the order of sending."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, own in enumerate(steps):
        assert tuple(step.action for step in own if step.action) == schedule.ranks[rank]
        here: set[tuple[str, int, int]] = set()
        for step in own:
            for message in step.sends:
                assert producer_of(message) in here, f"{message} is not made yet"
                sent[message.source, message.destination].append(message)
            for message in step.receives:
                here.add(producer_of(message))
                received[message.source, message.destination].append(message)
            if step.action:
                virtual_stage = schedule.virtual_stage(rank, step.action.model_chunk)
                for kind, other in dependencies(schedule, virtual_stage, step.action):
                    assert (kind, other, step.action.micro_batch) in here, f"{step.action} lacks {kind} of {other}"
                here.add((step.action.kind, virtual_stage, step.action.micro_batch))
    assert sent == received


def producer_of(message: P2PMessage) -> tuple[str, int, int]:
    """Return the action that computes the content of a message: its kind, virtual stage and micro-batch."""
    forward = message.kind == "activation"
    return (
        "F" if forward else "B",
        message.virtual_stage - 1 if forward else message.virtual_stage + 1,
        message.micro_batch,
    )


def step_length(schedule: PipelineSchedule, steps: Sequence[Sequence[CommStep]], costs: Sequence[ActionCosts]) -> float:
    """Return the length of a step if each rank waits for all messages of a batch, as with NCCL. Raises CycleError for a
    deadlock."""
    places = {
        (message, kind): (rank, place)
        for rank, own in enumerate(steps)
        for place, step in enumerate(own)
        for kind in ("sends", "receives")
        for message in getattr(step, kind)
    }
    before = {}
    for rank, own in enumerate(steps):
        for place, step in enumerate(own):
            others = [places[message, "receives"] for message in step.sends]
            others += [places[message, "sends"] for message in step.receives]
            # A step exchanges messages with a partner's step after the partner has finished its previous step.
            before[rank, place] = [(other, there - 1) for other, there in [(rank, place), *others]]
    ends = {(rank, -1): 0.0 for rank in range(len(steps))}
    for rank, place in TopologicalSorter(before).static_order():
        if place >= 0:
            ends[rank, place] = max(ends[other] for other in before[rank, place])
            if action := steps[rank][place].action:
                costs_of = costs[schedule.virtual_stage(rank, action.model_chunk)]
                ends[rank, place] += costs_of.duration(action.kind, schedule.splits_backward)
    return max(ends.values())


@pytest.mark.parametrize(
    "sizes, chunks, num_microbatches",
    [
        ((1, 2, 3, 8), (1, 2, 3), (1, 2, 3, 7, 8)),
        *(pytest.param((p,), range(1, 5), range(1, 21), marks=pytest.mark.wide) for p in range(1, 9)),
    ],
)
def test_schedules_run_without_a_deadlock(
    sizes: Iterable[int], chunks: Iterable[int], num_microbatches: Iterable[int]
) -> None:
    for p, m in product(sizes, num_microbatches):
        for schedule in (one_forward_one_backward(p, m), zero_bubble(p, m), *(interleaved(p, v, m) for v in chunks)):
            steps = build_p2p_schedule(schedule)
            check(schedule, steps)
            assert step_length(schedule, steps, uniform_costs(schedule, 1, 1, 1)) > 0, "no rank waits forever"


RATIOS: dict[str, list[tuple[float, float, float]]] = {
    "1f1b": [(1, 1, 1), (1, 2, 3), (3, 1, 1), (1, 2, 0)],
    "interleaved": [(1, 1, 1), (2, 3, 1), (2, 1, 3)],
    "zero-bubble": [(1, 1, 1), (1, 2, 1), (1, 1.2, 0.9), (2, 3, 1), (1, 0.5, 0.4)],
}


@pytest.mark.parametrize("m", [4, 8, 16])
@pytest.mark.parametrize("p", [2, 4])
def test_a_step_is_as_long_as_published(p: int, m: int):
    """A step takes the published time even if a rank waits for its sends, because no rank waits for a busy partner."""
    for schedule in (one_forward_one_backward(p, m), interleaved(p, 2, m), interleaved(p, 4, m), zero_bubble(p, m)):
        for forward, backward, weight in RATIOS[schedule.name]:
            costs = uniform_costs(schedule, forward, backward, weight)
            if schedule.name == "zero-bubble":
                expected = m * (forward + backward + weight) + (p - 1) * (forward + backward - weight)
            else:
                expected = (m + (p - 1) / schedule.num_model_chunks) * (forward + backward + weight)
            assert timetable(schedule, costs).length == pytest.approx(expected), schedule
            assert step_length(schedule, build_p2p_schedule(schedule), costs) == pytest.approx(expected), schedule


def test_micro_batches_in_flight() -> None:
    assert max_in_flight(one_forward_one_backward(4, 2)) == [2, 2, 2, 1]
    assert max_in_flight(one_forward_one_backward(4, 8)) == max_in_flight(zero_bubble(4, 8), queued=0) == [4, 3, 2, 1]
    assert max_in_flight(zero_bubble(4, 8), queued=0.5) == [4, 3.5, 3, 2.5]
    assert max_in_flight(zero_bubble(4, 8)) == [4, 4, 4, 4]
    # Rank r of Megatron runs 2·(p − 1 − r) + (v − 1)·p warm-up forwards; the current micro-batch is one more.
    assert max_in_flight(interleaved(4, 2, 8)) == [11, 9, 7, 5]
