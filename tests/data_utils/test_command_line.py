"""How a program is called and how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from data_utils import command_line
from data_utils.command_line import how_to_call
from megatron.gpt2.__main__ import PROGRAMS
from tests.conftest import ROOT

PROGRAM = """
import sys
from data_utils.command_line import program

def main():
    {main}

program(main)()
"""


def end(main: str, head: bool = False) -> tuple[int, str, str]:
    """Exit code, output and errors of a program with this `main`; head: beside a reader that reads one character and
    leaves before the program's own input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(main=main)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        if head:
            process.stdout.read(1)
            process.stdout.close()
            process.stdin.close()
            err = process.stderr.read()
            return process.wait(240), "", err
        out, err = process.communicate(timeout=240)
        return process.returncode, out, err


@pytest.mark.parametrize(
    "main",
    [
        "print('a line\\n' * 1_000_000); return 0",
        "print('x' * 70_000, flush=True); sys.stdin.read(); print('the rest'); return 0",
    ],
)
def test_a_reader_that_ends_first_is_no_error(main: str) -> None:
    """In the middle of what is printed, and in what is still buffered when the program ends."""
    assert end(main, head=True) == (141, "", "")


def test_codes_and_errors() -> None:
    assert end("print('done'); return 1") == (1, "done\n", "")
    assert end("raise ValueError('--a:\\n  no')") == (2, "", "error: --a: no\n")
    code, _, err = end("raise ZeroDivisionError")  # a bug of ours
    assert code == 1 and "Traceback" in err


def test_how_a_program_is_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a checkout by a file that is there, from any folder; else by a command that the package installs."""
    monkeypatch.chdir(ROOT / "docs")
    assert how_to_call("checkpoint") == "bash ../scripts/python.sh ../tools/checkpoint.py"
    assert how_to_call("pretrain_gpt2") == "bash ../scripts/pretrain_gpt2.sh"
    monkeypatch.setattr(command_line, "ROOT", tmp_path)
    for name, target in PROGRAMS.items():
        place = target.partition(":")[0].split(".")
        if place[0] == "commands":
            assert how_to_call(place[1]) == f"gpt2 {name}"
    assert how_to_call("run_text_generation_server") == "gpt2 serve"
    assert how_to_call("pretrain_gpt2_distributed") == "gpt2 pretrain --nproc-per-node 2"
