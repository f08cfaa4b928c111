"""The benchmark of tools/verify.py runs from end to end, on two comparisons."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.verify import main


@pytest.mark.slow
def test_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["verify.py", "--smoke", "--output", str(tmp_path)])
    assert main() == 0
    assert "2 of 2 comparisons find nothing" in capsys.readouterr().out
    rows = json.loads((tmp_path / "verify.json").read_text())["rows"]
    assert [row["ranks"] for row in rows] == [1, 2] and all(0 < row["share_of_bound"] < 0.5 for row in rows)
