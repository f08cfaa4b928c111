"""The layers of pipeline stages, the tables of small schedules, their drawings, and errors for impossible flags."""

from __future__ import annotations

import re
import shlex
from itertools import product
from pathlib import Path

import pytest

from megatron.gpt2.pipeline.schedule import (
    PipelineSchedule,
    interleaved,
    layers_of_virtual_stages,
    num_model_chunks,
    one_forward_one_backward,
    zero_bubble,
)
from tests.conftest import ROOT, error_line, tool


def sizes(*arguments: int | None) -> list[int]:
    return [len(layers) for layers in layers_of_virtual_stages(*arguments)]  # type: ignore[arg-type]


def test_layers_are_distributed_evenly():
    assert layers_of_virtual_stages(4, 2) == [range(2), range(2, 4)]
    assert sizes(24, 4, 2) == [3] * 8
    assert sizes(7, 4) == [2, 2, 2, 1]
    assert sizes(5, 4) == [1, 1, 2, 1]
    assert sizes(6, 2, 2) == [1, 2, 2, 1]
    for layers, p, v in product(range(1, 30), range(1, 9), range(1, 4)):
        if layers >= p * v:
            stages = layers_of_virtual_stages(layers, p, v)
            assert [layer for stage in stages for layer in stage] == list(range(layers))
            counts = [len(stage) for stage in stages]
            assert max(counts) - min(counts) <= 1 and counts[-1] == min(counts)


def test_layers_of_the_first_and_last_rank_can_be_given():
    assert sizes(10, 4, 1, None, 1) == [3, 3, 3, 1]
    assert sizes(10, 4, 1, 2, 1) == [2, 4, 3, 1]
    assert sizes(10, 3, 2, 2, 2) == [1, 3, 1, 1, 3, 1]
    assert sizes(6, 2, 1, 5) == [5, 1]


def test_model_chunks_have_at_most_the_given_layers():
    assert [num_model_chunks(24, 4, size) for size in (1, 2, 3, 4, 6, 7)] == [6, 3, 2, 2, 1, 1]
    assert num_model_chunks(6, 2, 2) == 2


def as_letters(schedule: PipelineSchedule) -> list[str]:
    """Return a line for each rank: the kind and micro-batch of each action, and with several chunks the chunk's
    letter."""
    return [
        " ".join(
            f"{action.kind}{action.micro_batch}{'abcd'[action.model_chunk] if schedule.num_model_chunks > 1 else ''}"
            for action in actions
        )
        for actions in schedule.ranks
    ]


def test_the_tables_of_small_pipelines():
    assert as_letters(one_forward_one_backward(1, 3)) == ["F0 B0 F1 B1 F2 B2"]
    assert as_letters(one_forward_one_backward(3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert as_letters(one_forward_one_backward(3, 1)) == ["F0 B0"] * 3
    assert as_letters(zero_bubble(3, 4)) == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]
    assert as_letters(interleaved(2, 2, 3)) == [
        "F0a F1a F0b F1b F2a B0b B1b F2b B0a B1a B2b B2a",
        "F0a F1a F0b B0b F1b B1b F2a B0a B1a F2b B2b B2a",
    ]
    schedule = zero_bubble(3, 4)
    assert (schedule.num_ranks, schedule.num_virtual_stages, schedule.splits_backward) == (3, 3, True)
    assert not interleaved(2, 2, 3).splits_backward


main = tool("draw_schedule").main
BARS = re.compile(r"<g id=\"patch_\d+\">\n    <path d=\"([^\"]+)|<text [^>]*>([^<]+)</text>")
PAGE = (ROOT / "docs" / "explanation" / "parallelism.md").read_text(encoding="utf-8")
DRAWN = re.findall(r"^python tools/draw_schedule\.py (.*--svg (\S+))$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("flags, name", DRAWN, ids=[name for _, name in DRAWN])
def test_the_figures_are_what_the_printed_commands_draw(
    flags: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    main(shlex.split(flags))
    drawn, figure = ((folder / name).read_text(encoding="utf-8") for folder in (tmp_path, ROOT / "docs" / "figures"))
    # The test compares each bar and its words.
    assert BARS.findall(drawn) == BARS.findall(figure) and len(BARS.findall(drawn)) > 60
    assert f"../figures/{name})" in PAGE


def run_and_print(capsys: pytest.CaptureFixture[str], line: str) -> list[str]:
    main(shlex.split(line))
    return capsys.readouterr().out.splitlines()


def test_what_is_printed(capsys: pytest.CaptureFixture[str]):
    assert run_and_print(
        capsys, "--pipeline-model-parallel-size 2 --micro-batches 2 --pipeline-schedule zero-bubble"
    ) == [
        "zero-bubble: 2 ranks, 2 micro-batches; F, B, W take 1, 1, 1",
        "",
        "rank 0  F0|F1|...B0|W0|B1|W1|",
        "rank 1  ...F0|B0|F1|B1|W0|W1|",
        "",
        "step          7, of which each rank works 6 on the average: a bubble of 14.3%",
        "kept at most  2, 1 micro-batches between F and B, by rank",
        "              2, 2 with those whose W is to come",
    ]
    lines = run_and_print(
        capsys,
        "--pipeline-model-parallel-size 2 --micro-batches 4 --pipeline-schedule interleaved "
        "--num-layers 8 --num-layers-per-virtual-pipeline-stage 2 --times 1,1.2,0.8",
    )
    assert lines[-1] == "kept at most  5, 3 micro-batches of one chunk between F and B, by rank"

    # Six layers are distributed over four ranks as 1, 2, 2 and 1.
    lines = run_and_print(capsys, "--pipeline-model-parallel-size 4 --micro-batches 1 --num-layers 6 --times 3,3,3")
    assert lines[3] == "rank 1  ...F0===|...........................B0=========|......"


PP = "--pipeline-model-parallel-size"
CHUNK = "--num-layers-per-virtual-pipeline-stage"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
CHUNKS_OF_ONE = f"--pipeline-schedule interleaved {CHUNK} 1"


@pytest.mark.parametrize(
    "line, message",
    [
        (f"{PP} 0", f"{PP} must be positive, not 0"),
        (f"{PP} 2 --micro-batches 0", "at least one micro-batch per step, not 0: raise --global-batch-size"),
        (
            f"{PP} 2 --pipeline-schedule zero-bubble --num-layers 4 {CHUNK} 1",
            f"{CHUNK} gives each rank 2 virtual stages, and --pipeline-schedule zero-bubble runs one: use "
            "--pipeline-schedule interleaved",
        ),
        (
            f"{PP} 2 --pipeline-schedule interleaved",
            "--pipeline-schedule interleaved needs two or more virtual stages per rank: lower "
            f"{CHUNK}, or use --pipeline-schedule 1f1b",
        ),
        (f"{PP} 4 --num-layers 3", f"{PP} 4 needs at least 4 layers, one per stage, and --num-layers is 3"),
        (
            f"{PP} 4 --num-layers 7 {CHUNKS_OF_ONE}",
            f"4 with 2 virtual stages each ({CHUNK}) needs at least 8 layers, one per stage, and --num-layers is 7",
        ),
        (f"{PP} 1 --num-layers 4 {FIRST} 2", f"{FIRST} needs {PP} of at least 2"),
        (
            f"{PP} 2 --num-layers 4 {CHUNKS_OF_ONE} {FIRST} 1",
            f"{FIRST} must be at least 2, one layer per stage of this rank, not 1",
        ),
        (
            f"{PP} 4 --num-layers 8 {FIRST} 7",
            f"{FIRST} leave 1 of 8 layers for the other 3 stages: each of them needs one",
        ),
        (
            f"{PP} 4 --num-layers 8 {FIRST} 4 {LAST} 3",
            f"{FIRST} and {LAST} leave 1 of 8 layers for the other 2 stages: each of them needs one",
        ),
        (
            f"{PP} 2 --num-layers 8 {FIRST} 4 {LAST} 3",
            f"{FIRST} and {LAST} leave 1 of 8 layers for the other 0 stages: they must add up to --num-layers",
        ),
        (f"{PP} 2 --num-layers 6 {CHUNK} 0", f"{CHUNK} must be positive, not 0"),
        (f"{PP} 2 {CHUNK} 2", f"{CHUNK} needs --num-layers"),
        (f"{PP} 2 --times 1,2,0", "give three positive numbers, for F, B and W, as in 1,1.2,0.9, not 1,2,0"),
    ],
)
def test_impossible_schedules_are_one_line_that_names_the_flag(line: str, message: str):
    assert error_line(lambda: main(shlex.split(line))).endswith(message)
