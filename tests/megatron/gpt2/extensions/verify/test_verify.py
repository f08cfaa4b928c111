"""tools/verify.py: layouts, traces and transformers beside each other, the table, the page, and errors in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.gpt2.extensions.verify.command import main
from tests.megatron.gpt2.train.training_runs import SMALL, write_text

SPLIT = "--model-parallel-size 2 --sequence-parallel"


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("verify")
    where = ["--train-data", str(write_text(folder)), "--data-cache-path", str(folder / "cache")]
    return ["--", *SMALL, *"--hidden-size 32 --seq-length 16 --micro-batch-size 2".split(), *where]


def test_a_trace_is_kept_and_compared_with(command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """The masks of torch's own generator depend on the layout."""
    trace, page, command = tmp_path / "trace", tmp_path / "page.html", [*command, "--hidden-dropout", "0.1"]
    assert main(["--layout", "", "--save-trace", str(trace), "--steps", "1", *command]) == 0
    other = f"{SPLIT} --dropout-rng torch"
    against = ["--against", str(trace), "--layout", "", "--layout", other, "--html", str(page)]
    assert main([*against, *command]) == 1
    said = capfd.readouterr().out
    (table,) = re.findall(r"^ranks .*\n(?:.+\n)+", said, re.MULTILINE)
    head, same, split = table.splitlines()
    assert re.match(r" +1  equal to the bit +100.0% +0 +0 +0 +0  \(no flags\)$", same)
    assert re.match(rf" +2  DIFFERS .*  {other}$", split)
    assert head.index("layout") == same.index("(no") == split.index(SPLIT), "the columns line up"
    assert re.search(
        rf"\n{other}: the first difference is in step 1, embeddings \(activation\), on ranks 0-1\n"
        r"    by [\d.e+]+ units of roundoff, where rounding explains \d+: at sample \d, position \d+, "
        r"channel \d+ it is \S+ and was \S+\n    made by the reduce-scatter of the word embeddings, .* or dropout, "
        r"forward\n    \d+ of \d+ tensors differ by more than rounding; those before this one do not\n",
        said,
    )
    html = page.read_text()
    assert html.count("<svg") == 2 and html.count("equal to the bit") == 2 and html.count('"alarm">DIFFERS<') == 1
    assert "http" not in html.replace("http-equiv", "")


def test_transformers_computes_the_same(command: list[str], capfd: pytest.CaptureFixture[str]):
    assert main(["--against", "huggingface", "--layout", "--model-parallel-size 2", *command]) == 0
    said = capfd.readouterr().out
    assert re.search(r"^ +2  within rounding .*  --model-parallel-size 2$", said, re.MULTILINE)


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
