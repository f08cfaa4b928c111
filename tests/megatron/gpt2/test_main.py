"""Test that `gpt2 NAME`, `python -m megatron.gpt2 NAME`, gpt2-NAME and the files of tools/ run the same programs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.gpt2.__main__ import PROGRAMS, about, main

ROOT = Path(__file__).resolve().parents[3]


def end(monkeypatch: pytest.MonkeyPatch, *argv: str) -> object:
    """Run the installed command `argv` and return its exit code."""
    monkeypatch.setattr(sys, "argv", [*argv])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


def test_each_program_is_listed_with_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`about` reads the docstring of each program without importing it."""
    assert end(monkeypatch, "gpt2") == 0
    said = capsys.readouterr().out
    for name, target in PROGRAMS.items():
        assert re.search(rf"^  {name} +\S.{{20,}}$", said, re.MULTILINE), name
        module, _, function = target.partition(":")
        path = ROOT / "megatron/gpt2" / f"{module.replace('.', '/')}.py"
        assert re.search(rf"^def {function}\(argv\b", path.read_text(encoding="utf-8"), re.MULTILINE), target
        assert about(target) in said


def test_all_ways_to_call_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each way to call a program prints the same error line. A file of tools/ can be run from any folder."""
    for argv in (["gpt2", "report"], ["/bin/gpt2-report"]):
        assert end(monkeypatch, *argv, "nowhere") == 2
        assert capsys.readouterr().err.startswith("error: nowhere holds no metrics.jsonl"), argv
    line = [sys.executable, str(ROOT / "tools/report.py"), "nowhere"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, timeout=100)
    assert done.returncode == 2 and done.stderr.startswith(b"error: nowhere holds no"), done.stderr
    assert end(monkeypatch, "gpt2", "flag_table", "--help") == 0
    assert capsys.readouterr().out.startswith("usage: gpt2 flag_table")
    assert end(monkeypatch, "gpt2", "trian") == 2
    assert capsys.readouterr().err == "error: gpt2 trian: unknown program; gpt2 --help lists all programs\n"
