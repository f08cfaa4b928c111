"""The campaign of faults runs from end to end: a kill, a lost machine, and a stop; and it goes on where
it was interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import faults


@pytest.mark.slow
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in faults.PARTS:
        assert faults.main([part, "--trials", "1", "--output", str(tmp_path)]) == 0
        capsys.readouterr()
        assert faults.main([part, "--trials", "1", "--output", str(tmp_path)]) == 0
        assert capsys.readouterr().out.count("\n") == 1, "it does again what it has done"
    kill = json.loads((tmp_path / "faults_kills.json").read_text())["trials"][0]
    assert kill["restarts"] == 1 and kill["differing"] == []
