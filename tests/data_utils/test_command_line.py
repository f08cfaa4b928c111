"""Test the commands that messages recommend, and the exit codes and error lines of programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from data_utils import command_line
from data_utils.command_line import how_to_call, missing_package
from megatron.gpt2.__main__ import PROGRAMS
from tests.conftest import ROOT

PROGRAM = """
import sys
from data_utils.command_line import as_command

def main():
    {main}

as_command(main)()
"""


def end(main: str, head: bool = False) -> tuple[int, str, str]:
    """Run a program with the function `main`. Return exit code, output and errors.

    head: close the pipe after the first character of the output.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(main=main)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    if head:
        process.stdout.read(1)
        process.stdout.close()
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


@pytest.mark.parametrize(
    "main",
    [
        "print('a line\\n' * 1_000_000); return 0",
        "print('x' * 70_000, flush=True); sys.stdin.read(); print('the rest'); return 0",
    ],
)
def test_a_broken_pipe_is_not_an_error(main: str) -> None:
    """The reader closes the pipe while the program prints, or before the program flushes its buffer at the end."""
    assert end(main, head=True) == (141, "", "")


def test_exit_codes_and_errors() -> None:
    assert end("print('done'); return 1") == (1, "done\n", "")
    assert end("raise ValueError('--a:\\n  no')") == (2, "", "error: --a: no\n")
    unwritable = "error: the locale's encoding, utf-8, cannot write '\\ud800': set LC_ALL=C.UTF-8\n"
    assert end("open('\\ud800')") == (2, "", unwritable)
    code, _, err = end("raise ZeroDivisionError")  # A bug of the program gives a traceback.
    assert code == 1 and "Traceback" in err


def test_how_to_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A checkout has files for bash, and its folder can be installed. An installed package only has the command
    gpt2."""
    monkeypatch.chdir(ROOT / "docs")
    assert how_to_call("checkpoint") == "bash ../scripts/python.sh ../tools/checkpoint.py"
    assert how_to_call("pretrain_gpt2") == "bash ../scripts/pretrain_gpt2.sh"
    monkeypatch.setattr(command_line, "ROOT", tmp_path)
    for name, target in PROGRAMS.items():
        folder, _, module = target.partition(":")[0].partition(".")
        if folder == "commands":
            assert how_to_call(module) == f"gpt2 {name}"
    assert how_to_call("pretrain_gpt2_distributed") == "gpt2 pretrain --nproc-per-node 2"
    assert (
        str(missing_package("it", "b", "c")) == "it needs the package b: python -m pip install 'gpt2-model-parallel[c]'"
    )
