"""tools/verify.py: layouts, traces and transformers beside each other, the table, the page, and errors in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.gpt2.extensions.verify.command import main, parse, verify
from mpu.transformer import ParallelMLP
from tests.megatron.gpt2.train.training_runs import SMALL, write_text

SPLIT = "--model-parallel-size 2 --sequence-parallel"


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("verify")
    return [
        "--",
        *SMALL,
        "--hidden-size",
        "32",
        "--seq-length",
        "16",
        "--micro-batch-size",
        "2",
        "--train-data",
        str(write_text(folder)),
        "--data-cache-path",
        str(folder / "cache"),
    ]


def plant(flags: str) -> None:
    """Where a layout splits the model, its MLPs lose a thousandth."""
    if flags:
        original = ParallelMLP.forward
        ParallelMLP.forward = lambda self, x: 0.999 * original(self, x)  # type: ignore[method-assign]


def test_a_trace_is_kept_and_compared_with(command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    trace, page = tmp_path / "trace", tmp_path / "page.html"
    assert main(["--layout", "", "--save-trace", str(trace), "--steps", "1", *command]) == 0
    against = ["--against", str(trace), "--layout", "", "--layout", SPLIT, "--html", str(page)]
    assert verify(parse([*against, *command]), before=plant) == 1
    said = capfd.readouterr().out
    (table,) = re.findall(r"^layout .*\n(?:.+\n)+", said, re.MULTILINE)
    head, same, split = table.splitlines()
    assert re.match(r"\(no flags\) +1  equal to the bit +100.0% +0 +0 +0 +0$", same)
    assert re.match(rf"{SPLIT} +2  DIFFERS ", split)
    assert len({len(line) for line in (head, same, split)}) == 1, "the columns line up"
    assert f"{SPLIT}: the first difference is in step 1, transformer.layers.0.mlp.dense_4h_to_h" not in said, (
        "its output is right"
    )
    assert f"{SPLIT}: the first difference is in step 1, transformer.layers.0 (activation), on ranks 0-1\n" in said
    assert re.search(
        r"\n    by [\d.e+]+ units of roundoff, where rounding explains \d+: at sample \d, position \d+, "
        r"channel \d+ it is \S+ and was \S+\n    made by the residual sum at the end of layer 0",
        said,
    )
    html = page.read_text()
    assert (
        html.count("<svg") == 2
        and "DIFFERS" in html
        and "equal to the bit" in html
        and "http" not in html.replace("http-equiv", "")
    )


def test_transformers_computes_the_same(command: list[str], capfd: pytest.CaptureFixture[str]):
    assert main(["--against", "huggingface", "--layout", "--model-parallel-size 2", *command]) == 0
    assert re.search(r"^--model-parallel-size 2 +2  within rounding ", capfd.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layout", ""], "give at least two layouts to compare"),
        (["--layout", "", "--layout", "--num-attention-heads 3 --model-parallel-size 2"], "--num-attention-heads 3"),
        (
            ["--layout", "", "--layout", "--global-batch-size 8"],
            "--layout '--global-batch-size 8': its --global-batch-size is 8, and that of the first layout 2: a step must",
        ),
        (
            ["--layout", "", "--layout", "--data-parallel-size 2"],
            "--layout '--data-parallel-size 2': --global-batch-size 2 is not divisible by --micro-batch-size 2 × 2",
        ),
        (
            ["--layout", "", "--layout", "--nproc-per-node 3 --model-parallel-size 2"],
            "--nproc-per-node 3 is not divisible by the model-parallel size 2",
        ),
        (["--layout", "", "--layout", "--no-such-flag"], "unknown flag --no-such-flag"),
        (["--layout", "", "--against", "nowhere"], "nowhere holds no trace: --save-trace writes one"),
        (["--layout", "", "--against", "nowhere", "--save-trace", "there"], "give one of the two"),
        (["--layout", "", "--against", "huggingface", "--steps", "2"], "leave --steps out"),
        (["--layout", "", "--layout", "", "--steps", "0"], "--steps must be at least 1, not 0"),
    ],
)
def test_bad_input_is_one_line(command: list[str], flags: list[str], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        main([*flags, *command])


def test_a_trace_of_another_run_is_refused(command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    trace = str(tmp_path / "trace")
    assert main(["--layout", "", "--save-trace", trace, "--steps", "1", *command]) == 0
    capfd.readouterr()
    assert main(["--against", trace, "--layout", "", *command, "--hidden-size", "64"]) == 2
    assert capfd.readouterr().err.strip() == (
        "error: the trace is of another run: --hidden-size is 32 there and 64 here"
    )
