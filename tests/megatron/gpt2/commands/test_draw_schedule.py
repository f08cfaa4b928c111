from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import ROOT, tool

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
        "as published  7",
        "kept at most  2, 1 micro-batches between F and B, by rank",
        "              2, 2 with those whose W is to come",
    ]
    lines = run_and_print(
        capsys,
        "--pipeline-model-parallel-size 2 --micro-batches 4 --pipeline-schedule interleaved "
        "--num-layers 8 --num-layers-per-virtual-pipeline-stage 2 --times 1,1.2,0.8",
    )
    assert lines[0] == "interleaved: 2 ranks of 2 chunks, 4 micro-batches; F, B, W take 1, 1.2, 0.8"
    assert lines[-3:] == [
        "step          13.5, of which each rank works 12 on the average: a bubble of 11.1%",
        "as published  13.5",
        "kept at most  5, 3 micro-batches of one chunk between F and B, by rank",
    ]


def test_stages_of_unlike_lengths(capsys: pytest.CaptureFixture[str]):
    """Six layers are distributed over four ranks as 1, 2, 2 and 1."""
    lines = run_and_print(capsys, "--pipeline-model-parallel-size 4 --micro-batches 1 --num-layers 6 --times 3,3,3")
    assert lines[2:6] == [
        "rank 0  F0|.............................................B0===|",
        "rank 1  ...F0===|...........................B0=========|......",
        "rank 2  .........F0===|.........B0=========|..................",
        "rank 3  ...............F0|B0===|..............................",
    ]
    assert not any(line.startswith("as published") for line in lines)


@pytest.mark.parametrize(
    "line, message",
    [
        *(
            (
                f"--pipeline-model-parallel-size 2 --times {times}",
                f"--times: give three positive numbers, for F, B and W, as in 1,1.2,0.9, not {times}",
            )
            for times in ("1,2", "1,2,0")
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
            "--num-layers-per-virtual-pipeline-stage needs --num-layers",
        ),
        (
            "--pipeline-model-parallel-size 0 --num-layers 4 --num-layers-per-virtual-pipeline-stage 2",
            "--pipeline-model-parallel-size must be positive, not 0",
        ),
        (
            "--pipeline-model-parallel-size 4 --num-layers 3",
            "--pipeline-model-parallel-size 4 needs at least 4 layers, one per stage, and --num-layers is 3",
        ),
        (
            "--pipeline-model-parallel-size 2 --micro-batches 0",
            "a pipeline needs at least one micro-batch per step, not 0: raise --global-batch-size",
        ),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag(line: str, message: str):
    with pytest.raises(ValueError) as caught:
        main(shlex.split(line))
    assert str(caught.value) == message
