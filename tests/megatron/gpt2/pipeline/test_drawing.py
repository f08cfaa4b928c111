"""What is drawn is what the timetable says."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.axes import Axes

from megatron.gpt2.pipeline.analysis import as_text, draw, equal_costs, timetable
from megatron.gpt2.pipeline.schedule import forward_only, interleaved, one_forward_one_backward, zero_bubble

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
