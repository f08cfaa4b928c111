"""What the ranks exchange: every schedule runs under the strictest waiting, where the formulas of its length hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import pytest

from megatron.gpt2.pipeline.analysis import check, equal_costs, published_length, synchronous
from megatron.gpt2.pipeline.program import TICKS_OF_RECOMPUTE, Step, needed_by, program
from megatron.gpt2.pipeline.schedule import (
    Action,
    Schedule,
    forward_only,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)


def schedules(sizes: Iterable[int], chunks: Iterable[int], micro_batches: Iterable[int]) -> list[Schedule]:
    found = []
    for p, m in product(sizes, micro_batches):
        found += [one_forward_one_backward(p, m), zero_bubble(p, m)]
        found += [build(p, v, m) for build in (interleaved, forward_only) for v in chunks]
    return found


def test_a_covering_set_runs_without_a_deadlock():
    for schedule in schedules((1, 2, 3, 8), (1, 2, 3), (1, 2, 3, 7, 8)):
        check(schedule)


@pytest.mark.wide
@pytest.mark.parametrize("p", range(1, 9))
def test_all_run_without_a_deadlock(p: int):
    for schedule in schedules((p,), range(1, 5), range(1, 21)):
        check(schedule)


def test_one_rank_exchanges_nothing():
    for schedule in (one_forward_one_backward(1, 3), interleaved(1, 2, 3), zero_bubble(1, 3), forward_only(1, 2, 3)):
        assert program(schedule) == [[Step((), (), action) for action in schedule.ranks[0]]]


def test_what_two_ranks_exchange():
    """Each message once, and what a rank needs before the action that needs it."""
    schedule = interleaved(2, 2, 3)
    steps = program(schedule)
    sent = Counter(message for own in steps for step in own for message in step.sends)
    assert sent == Counter(message for own in steps for step in own for message in step.receives)
    assert len(sent) == 2 * 3 * 3 and set(sent.values()) == {1}  # forwards and backwards, 3 borders, 3 micro-batches
    assert {message.kind for message in sent if (message.source, message.destination) == (1, 0)} == {
        "activation",
        "gradient",
    }
    for rank, own in enumerate(steps):
        received = set()
        for step in own:
            received |= set(step.receives)
            need = needed_by(schedule, rank, step.action) if step.action else None
            assert need is None or need in received
    assert steps[0][-1].action is not None  # stage 0 sends no gradient, so rank 0 has nothing left to send


@pytest.mark.parametrize("m", [4, 8, 16])
@pytest.mark.parametrize("p", [2, 4])
def test_no_rank_waits_for_a_partner_that_is_busy(p: int, m: int):
    """Although it awaits its sends too, a step takes no longer than the published formula says."""
    for schedule in (one_forward_one_backward(p, m), interleaved(p, 2, m), interleaved(p, 4, m), zero_bubble(p, m)):
        ratios: dict[str, list[tuple[float, float, float]]] = {
            "1f1b": [(1, 1, 1), (1, 2, 3), (3, 1, 1)],
            "interleaved": [(1, 1, 1), (2, 3, 1)],
            "zero-bubble": [(1, 1, 1), (1, 1.2, 0.9), (2, 3, 1), (1, 0.5, 0.4)],
        }
        for f, b, w in ratios[schedule.name]:
            length = synchronous(schedule, program(schedule), equal_costs(schedule, f, b, w)).length
            assert length == pytest.approx(published_length(schedule, f, b, w)), schedule
        if schedule.name == "interleaved":
            recomputed = synchronous(schedule, program(schedule, TICKS_OF_RECOMPUTE), equal_costs(schedule, 1, 2, 1))
            assert recomputed.length == pytest.approx(published_length(schedule, 1, 2, 1)), schedule


def altered(steps: list[list[Step]], rank: int, place: int, **changes: object) -> list[list[Step]]:
    steps = [list(own) for own in steps]
    steps[rank][place] = replace(steps[rank][place], **changes)  # type: ignore[arg-type]
    return steps


def test_planted_faults_are_found():
    schedule = one_forward_one_backward(2, 3)
    good = program(schedule)
    check(schedule, good)
    without_receive = next(place for place, step in enumerate(good[1]) if step.receives and place)
    with pytest.raises(ValueError, match="rank 1 begins F of micro-batch 1 in chunk 0 without F of stage 0"):
        check(schedule, altered(good, 1, without_receive, receives=()))
    with pytest.raises(ValueError, match="rank 0 sends the activation .* before it has made it"):
        check(schedule, altered(good, 0, 0, sends=good[0][1].sends))
    crossed = replace(good[1][0].receives[0], micro_batch=1)
    with pytest.raises(ValueError, match="posts the activation of micro-batch . .* and the other side posts"):
        check(schedule, altered(good, 1, 0, receives=(crossed,)))
    with pytest.raises(ValueError, match="the steps of rank 0 are not its actions"):
        check(schedule, altered(good, 0, 0, action=Action("F", 0, 1)))

    def reordered(*actions: Action) -> Schedule:
        return replace(schedule, ranks=(schedule.ranks[0], actions))

    first, *others = schedule.ranks[1]
    with pytest.raises(ValueError, match=r"rank 1 does F in chunk 0 for the micro-batches \[1, 2\], and not"):
        check(reordered(*others))
    with pytest.raises(ValueError, match=r"rank 1 does F in chunk 0 for the micro-batches \[0, 0, 1, 2\]"):
        check(reordered(first, first, *others))
    with pytest.raises(ValueError, match="rank 1 begins B of micro-batch 0 in chunk 0 without F of stage 1"):
        check(reordered(others[0], first, *others[1:]))
    # Rank 0 awaits gradient 0 before it sends activation 1, which rank 1 awaits before it makes gradient 0.
    late = replace(schedule, ranks=(schedule.ranks[0], tuple(sorted(schedule.ranks[1], key=lambda a: a.kind != "F"))))
    early = replace(late, ranks=(tuple(one_forward_one_backward(1, 3).ranks[0]), late.ranks[1]))
    with pytest.raises(ValueError, match="rank 0 of the pipeline never gets what it needs for B of micro-batch 0"):
        check(early)
    two = next(place for place, step in enumerate(good[0]) if step.receives)
    sooner = altered(altered(good, 0, two, receives=()), 0, 0, receives=good[0][two].receives)
    with pytest.raises(ValueError, match="rank 0 waits forever before F of micro-batch 0 .* nobody posts"):
        check(schedule, sooner)
