"""What the ranks exchange, how long a step takes, what its ranks keep, and that what is drawn says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.axes import Axes

from megatron.gpt2.pipeline.analysis import (
    Span,
    as_text,
    check,
    draw,
    equal_costs,
    kept,
    published_length,
    synchronous,
    timetable,
)
from megatron.gpt2.pipeline.program import TICKS_OF_RECOMPUTE, Costs, Step, needed_by, program
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


SVG = "{http://www.w3.org/2000/svg}"


def test_text_lines_up_in_time():
    schedule = one_forward_one_backward(2, 3)
    assert as_text(schedule, timetable(schedule, equal_costs(schedule, 1, 1, 1))) == [
        "rank 0  F0|F1|......B0===|F2|B1===|...B2===|",
        "rank 1  ...F0|B0===|F1|B1===|F2|B2===|......",
    ]
    schedule = zero_bubble(2, 2)
    assert as_text(schedule, timetable(schedule, equal_costs(schedule, 2, 2, 1))) == [
        "rank 0  F0===|F1===|......B0===|W0|...B1===|W1|",
        "rank 1  ......F0===|B0===|F1===|B1===|W0|W1|...",
    ]
    schedule = forward_only(2, 2, 2)
    assert as_text(schedule, timetable(schedule, equal_costs(schedule, 1, 1, 1))) == [
        "rank 0  F0a|F1a|F0b|F1b|....",
        "rank 1  ....F0a|F1a|F0b|F1b|",
    ]


def test_the_drawing_has_each_action_where_its_time_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bars: list[tuple[int, float, float, object]] = []
    barh = Axes.barh

    def watched(axes, y, width, left, color, **more):
        bars.append((y, left, width, color))
        return barh(axes, y, width, left=left, color=color, **more)

    monkeypatch.setattr(Axes, "barh", watched)
    for schedule in (one_forward_one_backward(4, 8), interleaved(2, 3, 4), zero_bubble(3, 12), forward_only(2, 2, 3)):
        bars.clear()
        table = timetable(schedule, equal_costs(schedule, 1, 1.5, 0.7))
        draw(schedule, table, "a < b & c", path := tmp_path / "drawn.svg")
        spans = [(rank, span.start, span.end - span.start) for rank, own in enumerate(table.ranks) for span in own]
        assert [bar[:3] for bar in bars] == spans
        kinds = [(action.kind, action.chunk) for actions in schedule.ranks for action in actions]
        assert len({bar[3] for bar in bars}) == len(set(kinds)), "each kind and chunk has its own colour"
        assert any(node.text == "a < b & c" for node in ElementTree.parse(path).iter(f"{SVG}text"))
