"""The benchmark of --exact-layouts runs from end to end, on one process: layouts are equal, and both ways take time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.exact_layouts import PRECISIONS, main


@pytest.mark.slow
def test_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("layouts", "cost"):
        monkeypatch.setattr(sys, "argv", ["exact_layouts.py", part, "--smoke", "--output", str(tmp_path)])
        assert main() == 0
    assert "6 of 6 equal to the bit over 3 steps" in capsys.readouterr().out
    rows = json.loads((tmp_path / "exact_layouts.json").read_text())["rows"]
    assert {row["precision"] for row in rows} == set(PRECISIONS) and not any(row["differing"] for row in rows)
    cost = json.loads((tmp_path / "exact_cost.json").read_text())["rows"]["1 rank"]
    assert all(cost[kind]["ratio"]["median"] > 0.1 and cost[kind]["of_best"] > 0.1 for kind in ("clock", "processor"))
