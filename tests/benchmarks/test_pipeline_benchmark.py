"""The benchmark of pipelines runs from end to end, on two ranks: no step is shorter than its schedule can be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.pipeline import main
from megatron.gpt2.pipeline.schedule import SCHEDULES


@pytest.mark.slow
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--smoke", "--output", str(tmp_path)]) == 0
    assert "of 3 within 5 % of the published length" in capsys.readouterr().out
    runs = json.loads((tmp_path / "pipeline.json").read_text())["runs"]
    assert [run["schedule"] for run in runs] == list(SCHEDULES)
    for run in runs:
        assert run["kept"] == run["expected_kept"] and run["ratio"] > 0.99 and run["slept_over_asked"] > 0.999, run
