"""The benchmark of the memory of stages runs from end to end, on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.stage_memory import main


@pytest.mark.slow
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--smoke", "--output", str(tmp_path)]) == 0
    assert "of 2 stages within 10 %" in capsys.readouterr().out
    (run,) = json.loads((tmp_path / "stage_memory.json").read_text())["runs"]
    # The model is small beside the program, whose part the planner knows less exactly.
    assert [stage["stage"] for stage in run["stages"]] == [0, 1]
    assert all(0.8 < stage["ratio"] < 1.25 for stage in run["stages"]), run
