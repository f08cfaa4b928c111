"""Every layer is on one stage, in order, as evenly as it can be."""

from __future__ import annotations

from itertools import product

import pytest

from megatron.gpt2.pipeline.stages import layers_of_stages, virtual_stages


def sizes(*arguments: int | None) -> list[int]:
    return [len(layers) for layers in layers_of_stages(*arguments)]  # type: ignore[arg-type]


def test_layers_are_dealt_out_evenly():
    assert layers_of_stages(4, 2) == [range(2), range(2, 4)]
    assert sizes(24, 4, 2) == [3] * 8
    assert sizes(6, 4) == [1, 2, 2, 1]
    assert sizes(7, 4) == [2, 2, 2, 1]
    assert sizes(5, 4) == [1, 1, 2, 1]
    assert sizes(3, 2) == [2, 1]
    assert sizes(6, 2, 2) == [1, 2, 2, 1]
    assert sizes(5, 1) == [5]
    for layers, p, v in product(range(1, 30), range(1, 9), range(1, 4)):
        if layers >= p * v:
            stages = layers_of_stages(layers, p, v)
            assert [layer for stage in stages for layer in stage] == list(range(layers))
            counts = [len(stage) for stage in stages]
            assert max(counts) - min(counts) <= 1 and counts[-1] == min(counts)


def test_the_first_and_the_last_rank_are_given():
    assert sizes(10, 4, 1, 1) == [1, 3, 3, 3]
    assert sizes(10, 4, 1, None, 1) == [3, 3, 3, 1]
    assert sizes(10, 4, 1, 2, 1) == [2, 4, 3, 1]
    assert sizes(10, 3, 2, 2, 2) == [1, 3, 1, 1, 3, 1]
    assert sizes(6, 2, 1, 4, 2) == [4, 2]
    assert sizes(6, 2, 1, 5) == [5, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 4), "--pipeline-model-parallel-size 4 needs at least 4 layers, one per stage, and --num-layers is 3"),
        (
            (7, 4, 2),
            "--pipeline-model-parallel-size 4 with 2 virtual stages each (--num-layers-per-virtual-pipeline-stage) "
            "needs at least 8 layers, one per stage, and --num-layers is 7",
        ),
        ((4, 1, 1, 2), "--decoder-first-pipeline-num-layers needs --pipeline-model-parallel-size of at least 2"),
        (
            (8, 2, 2, 1),
            "--decoder-first-pipeline-num-layers must be at least 2, one layer per stage of this rank, not 1",
        ),
        (
            (8, 2, 1, None, 0),
            "--decoder-last-pipeline-num-layers must be at least 1, one layer per stage of this rank, not 0",
        ),
        (
            (8, 4, 1, 7),
            "--decoder-first-pipeline-num-layers leave 1 of 8 layers for the other 3 stages: each of them needs one",
        ),
        (
            (8, 4, 1, 4, 3),
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers leave 1 of 8 layers "
            "for the other 2 stages: each of them needs one",
        ),
        (
            (8, 2, 1, 4, 3),
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers leave 1 of 8 layers "
            "for the other 0 stages: they must add up to --num-layers",
        ),
    ],
)
def test_what_cannot_be_is_one_line_that_names_the_flag(arguments: tuple[int, ...], message: str):
    with pytest.raises(ValueError) as caught:
        layers_of_stages(*arguments)
    assert str(caught.value) == message


def test_virtual_stages_hold_at_most_so_many_layers():
    assert [virtual_stages(24, 4, size) for size in (1, 2, 3, 4, 6, 7)] == [6, 3, 2, 2, 1, 1]
    assert virtual_stages(6, 2, 2) == 2
    with pytest.raises(ValueError, match="--num-layers-per-virtual-pipeline-stage must be positive, not 0"):
        virtual_stages(6, 2, 0)
