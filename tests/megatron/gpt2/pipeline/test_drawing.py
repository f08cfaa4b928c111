"""What is drawn is what the timetable says."""

from __future__ import annotations

from xml.etree import ElementTree

from megatron.gpt2.pipeline.drawing import as_svg, as_text
from megatron.gpt2.pipeline.schedule import forward_only, interleaved, one_forward_one_backward, zero_bubble
from megatron.gpt2.pipeline.timetable import equal_costs, timetable

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


def test_the_drawing_has_each_action_where_its_time_is():
    for schedule in (one_forward_one_backward(4, 8), interleaved(2, 3, 4), zero_bubble(3, 12), forward_only(2, 2, 3)):
        table = timetable(schedule, equal_costs(schedule, 1, 1.5, 0.7))
        root = ElementTree.fromstring(as_svg(schedule, table, "a < b & c"))
        assert root.find(f"{SVG}text").text == "a < b & c"  # type: ignore[union-attr]
        lanes = [node for node in root.iter(f"{SVG}rect") if node.get("class") == "lane"]
        drawn = {title.text: node for node in root.iter(f"{SVG}rect") for title in node.iter(f"{SVG}title")}
        assert len(lanes) == schedule.p and len(drawn) == sum(map(len, schedule.ranks))
        scale, left = float(lanes[0].get("width", 0)) / table.length, float(lanes[0].get("x", 0))
        for rank, (actions, spans) in enumerate(zip(schedule.ranks, table.ranks, strict=True)):
            for action, span in zip(actions, spans, strict=True):
                node = drawn[f"rank {rank}: {action}"]
                assert node.get("y") == lanes[rank].get("y")
                assert abs(float(node.get("x", 0)) - left - span.start * scale) < 0.02
                assert abs(float(node.get("width", 0)) - (span.end - span.start) * scale) < 0.02
        colours = {(action.kind, action.chunk): drawn[f"rank 0: {action}"].get("fill") for action in schedule.ranks[0]}
        assert len(set(colours.values())) == len(colours), "each kind and chunk has its own"
        assert "prefers-color-scheme: dark" in root.find(f"{SVG}style").text  # type: ignore[union-attr,operator]
        assert float(root.get("width", 0)) <= 1200
