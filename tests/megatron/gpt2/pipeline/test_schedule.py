"""What each rank does: the tables themselves, and the limits that a user meets."""

from __future__ import annotations

import pytest

from megatron.gpt2.pipeline.schedule import (
    Action,
    Schedule,
    build_schedule,
    forward_only,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)


def in_letters(schedule: Schedule) -> list[str]:
    """A line for each rank: kind and micro-batch, and the chunk as a letter where there are several."""
    return [
        " ".join(
            f"{action.kind}{action.micro_batch}{'abcd'[action.chunk] if schedule.chunks > 1 else ''}"
            for action in actions
        )
        for actions in schedule.ranks
    ]


def test_the_tables_of_small_pipelines():
    assert in_letters(one_forward_one_backward(1, 3)) == ["F0 B0 F1 B1 F2 B2"]
    assert in_letters(one_forward_one_backward(3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert in_letters(one_forward_one_backward(3, 1)) == ["F0 B0"] * 3
    assert in_letters(zero_bubble(3, 4)) == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]
    assert in_letters(interleaved(2, 2, 3)) == [
        "F0a F1a F0b F1b F2a B0b B1b F2b B0a B1a B2b B2a",
        "F0a F1a F0b B0b F1b B1b F2a B0a B1a F2b B2b B2a",
    ]
    assert in_letters(forward_only(2, 2, 3)) == ["F0a F1a F0b F1b F2a F2b"] * 2
    schedule = zero_bubble(3, 4)
    assert (schedule.p, schedule.stages, schedule.trains, schedule.splits_backward) == (3, 3, True, True)
    assert not forward_only(2, 1, 3).trains and not interleaved(2, 2, 3).splits_backward
    assert interleaved(2, 3, 4).stage(1, 2) == 5
    assert str(Action("B", 1, 7)) == "B of micro-batch 7 in chunk 1"


@pytest.mark.parametrize(
    ("name", "p", "v", "m", "message"),
    [
        ("gpipe", 2, 1, 4, "--pipeline-schedule must be one of 1f1b, interleaved, zero-bubble, not gpipe"),
        ("1f1b", 0, 1, 4, "--pipeline-model-parallel-size must be positive, not 0"),
        ("1f1b", 2, 1, 0, "at least one micro-batch per step, not 0: raise --global-batch-size"),
        (
            "zero-bubble",
            2,
            2,
            4,
            "--num-layers-per-virtual-pipeline-stage gives each rank 2 virtual stages, and "
            "--pipeline-schedule zero-bubble runs one: use --pipeline-schedule interleaved",
        ),
        (
            "interleaved",
            2,
            1,
            4,
            "--pipeline-schedule interleaved needs two or more virtual stages per rank: lower "
            "--num-layers-per-virtual-pipeline-stage, or use --pipeline-schedule 1f1b",
        ),
    ],
)
def test_limits_are_one_line_that_names_the_flag(name: str, p: int, v: int, m: int, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        build_schedule(name, p, v, m)
    assert "\n" not in str(caught.value)


def test_a_schedule_is_built_by_name():
    assert build_schedule("1f1b", 2, 1, 3) == one_forward_one_backward(2, 3)
    assert build_schedule("interleaved", 2, 2, 3) == interleaved(2, 2, 3)
    assert build_schedule("zero-bubble", 2, 1, 3) == zero_bubble(2, 3)
