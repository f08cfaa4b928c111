"""Test generate_text: every prompt gets an answer or an error line, and typed prompts can be edited."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tool
from tests.megatron.gpt2.generate.test_generation import save_tiny

ROOT = Path(__file__).resolve().parents[4]
main = tool("generate_text").main
ON_CPU = ("--device", "cpu", "--precision", "fp32")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(saved: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*flags: str, code: int = 0) -> tuple[str, str]:
        assert main(["--load", str(saved), *ON_CPU, "--max-new-tokens", "5", *flags]) == code
        return capsys.readouterr()

    return run


def test_one_prompt(run: Any) -> None:
    out, err = run("--prompt", "Once", "--seed", "1")
    assert out.startswith("Once") and out.endswith("\n") and len(out) > 5
    assert err.count("\n") == 1 and "full sampling" in err
    assert run("--prompt", "Once", "--seed", "1", "--recompute")[0] == out
    assert run("--prompt", "Once", "--seed", "2")[0] != out
    greedy, err = run("--prompt", "Once", "--greedy")
    assert err == "" and greedy == run("--prompt", "Once", "--top_k", "1")[0]


BAD_FILE = b"one\n\nplease stop here\nstop\n" + b"long " * 20_000 + b"\nN\0UL\nin\xffvalid\n\xc3\xa9\r\nno newline"


def test_every_line_of_a_file_is_answered(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(BAD_FILE)
    out, err = run("--sample-input-file", str(file), "--batch-size", "3", "--top-p", "0.9")
    entries = [json.loads(line) for line in out.splitlines()]
    assert [entry.get("prompt", "")[:11] or entry["error"] for entry in entries] == [
        "one",
        "the line is empty",
        "please stop",
        "stop",
        "long long l",
        "N\0UL",
        "'utf-8' codec can't decode byte 0xff in position 2: invalid start byte",
        "é",
        "no newline",
    ]
    assert [entry["line"] for entry in entries if "error" in entry] == [2, 7]
    assert {(entry["finish"], entry["length"]) for entry in entries if "text" in entry} >= {("length", 5)}
    assert "of a prompt of 100,000 tokens the last 32 are read" in err
    # The text does not depend on the batch size, on other prompts, or on the output file.
    again, flags = tmp_path / "answers.jsonl", "--batch-size 1 --top-p 0.9 --sample-output-file"
    assert run("--sample-input-file", str(file), *flags.split(), str(again))[0] == ""
    assert again.read_text() == out


def test_no_character_is_lost_in_other_encodings(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("é ☃")
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    run("--sample-input-file", str(tmp_path / "prompts.txt"))
    assert json.loads(out.buffer.getvalue())["prompt"] == "é ☃"


@pytest.mark.parametrize(
    "flags, named",
    {
        "--top_p 2": "--top-p",
        "--num-samples -1": "--num-samples",
        "--genfile x": "--num-samples",
        "--sample-input-file missing.txt": "missing.txt",
        "--prompt a --num-samples 1": "not allowed",
        "--prompt \udcff": "surrogate",
        "--model-parallel-size 2": "--tensor-model-parallel-size 2",
        "--gready": "--gready",
        "--load /nowhere": "/nowhere",
        f"--sample-input-file {__file__} --sample-output-file {__file__}": "is also the file of the prompts",
    }.items(),
    ids=ascii,
)
def test_bad_input_is_one_line(run: Any, flags: str, named: str) -> None:
    out, err = run("--top-k", "3", *flags.split(), code=2)
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and named in err


def run_with_input(run: Any, monkeypatch: pytest.MonkeyPatch, data: bytes) -> tuple[str, str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    return run("--greedy")


def test_typed_prompts(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = run_with_input(run, monkeypatch, b"do not stop\n\nin\xffvalid\n stop\nstop\nnever read\n")
    expected = [run("--greedy", "--prompt", prompt)[0] for prompt in ("do not stop", " stop")]
    assert out == "".join(expected)
    assert "is empty" in err and "surrogate" in err
    assert run_with_input(run, monkeypatch, b"do not stop")[0] == expected[0], "the end of the input"


def test_a_terminal(saved: Path) -> None:
    """Edit a line, recall the history, interrupt a text, and end with Ctrl-C at the prompt."""

    def first() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # A shell's background process ignores SIGINT.

    main_end, end = pty.openpty()
    line = f"tools/generate_text.py --load {saved} --top-k 1 --max-new-tokens 100000000 --nproc-per-node 2"
    process = subprocess.Popen(
        [sys.executable, *line.split(), *ON_CPU],
        cwd=ROOT,
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
        env={**os.environ, "TERM": "dumb"},
        preexec_fn=first,
    )
    os.close(end)
    seen = bytearray()

    def wait_for(pattern: bytes) -> None:
        while not (found := re.search(pattern, seen, re.DOTALL)):
            assert select.select([main_end], [], [], 60)[0], seen[-2000:]
            seen.extend(os.read(main_end, 65536))
        del seen[: found.end()]

    try:
        for pattern, keys in (
            (rb"prompt> ", b"Obce\x1b[D\x1b[D\x7fn\r"),  # The keys left, left and backspace remove the b.
            (rb"\nOnce.", b"\x03"),
            (rb"prompt> ", b"\x1b[A\r"),
            (rb"\nOnce.", b"\x03"),
            (rb"prompt> ", b""),
        ):
            wait_for(pattern)
            os.write(main_end, keys)
        code = None
        for _ in range(3):  # Python's readline may miss a Ctrl-C while it draws the prompt.
            time.sleep(0.3)
            os.write(main_end, b"\x03")
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(10)
                break
        assert code == 0
    finally:
        process.kill()
        os.close(main_end)
