"""How long a step takes under each schedule, and what its ranks keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.gpt2.pipeline.analysis import Span, equal_costs, kept, published_length, timetable
from megatron.gpt2.pipeline.program import Costs
from megatron.gpt2.pipeline.schedule import forward_only, interleaved, one_forward_one_backward, zero_bubble


def test_when_each_action_runs():
    table = timetable(one_forward_one_backward(2, 2), [Costs(1, 1, 1), Costs(2, 1, 1)], transfer=0.5)
    assert table.ranks == (
        (Span(0, 1), Span(1, 2), Span(6, 8), Span(10, 12)),
        (Span(1.5, 3.5), Span(3.5, 5.5), Span(5.5, 7.5), Span(7.5, 9.5)),
    )
    assert table.length == 12
    assert table.bubble == pytest.approx(1 - (6 + 8) / 24)


@pytest.mark.parametrize("m", [4, 8, 16])
@pytest.mark.parametrize("p", [2, 4])
def test_a_step_is_as_long_as_published(p: int, m: int):
    for ratio in ((1, 1, 1), (1, 2, 0), (2, 1, 3)):
        t = sum(ratio)
        for v, schedule in ((1, one_forward_one_backward(p, m)), (2, interleaved(p, 2, m)), (4, interleaved(p, 4, m))):
            length = timetable(schedule, equal_costs(schedule, *ratio)).length
            assert length == pytest.approx((m + (p - 1) / v) * t) == published_length(schedule, *ratio)
    for forward, backward, weight in ((1, 1, 1), (1, 2, 1), (1, 1.2, 0.9), (2, 3, 1), (2, 2.5, 2)):
        schedule = zero_bubble(p, m)
        length = timetable(schedule, equal_costs(schedule, forward, backward, weight)).length
        expected = m * (forward + backward + weight) + (p - 1) * (forward + backward - weight)
        assert length == pytest.approx(expected) == published_length(schedule, forward, backward, weight)


def test_the_bubble_is_the_share_of_waiting():
    schedule = one_forward_one_backward(4, 8)
    assert timetable(schedule, equal_costs(schedule, 1, 1, 1)).bubble == pytest.approx(3 / 11)
    schedule = zero_bubble(4, 8)
    assert timetable(schedule, equal_costs(schedule, 1, 1, 1)).bubble == pytest.approx(1 / 9)


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 3, 4, 16])
def test_what_the_ranks_keep(p: int, m: int):
    assert kept(one_forward_one_backward(p, m)) == [min(p - rank, m) for rank in range(p)]
    assert kept(zero_bubble(p, m), queued=0) == kept(one_forward_one_backward(p, m))
    assert max(kept(zero_bubble(p, m))) == max(kept(one_forward_one_backward(p, m))) == min(p, m)
    assert kept(forward_only(p, 1, m)) == [0] * p


def test_what_the_ranks_keep_of_chunks():
    """Megatron's warm-up of 2·(p − 1 − r) + (v − 1)·p forwards, and the one that is in hand."""
    assert kept(interleaved(4, 2, 8)) == [11, 9, 7, 5]
    assert kept(interleaved(2, 3, 2)) == [6, 5]
    assert kept(zero_bubble(4, 8), queued=0.5) == [4, 3.5, 3, 2.5]


def test_a_schedule_that_cannot_run_names_rank_and_action():
    schedule = one_forward_one_backward(2, 2)
    turned = schedule.ranks[1][2:] + schedule.ranks[1][:2]
    stuck = replace(schedule, ranks=(one_forward_one_backward(1, 2).ranks[0], turned))
    with pytest.raises(ValueError, match="rank 0 of the pipeline never gets what it needs for B of micro-batch 0"):
        timetable(stuck, equal_costs(stuck, 1, 1, 1))
