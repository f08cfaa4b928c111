"""The campaign of faults runs from end to end: a kill, a chunk of kills around saves, and a stop; and it goes on where
it was interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import faults


@pytest.mark.slow
def test_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(faults, "KILLS_OF_A_CHUNK", 3)
    for part in faults.PARTS:
        assert faults.main([part, "--trials", "1", "--output", str(tmp_path)]) == 0
        capsys.readouterr()
        assert faults.main([part, "--trials", "1", "--output", str(tmp_path)]) == 0
        assert capsys.readouterr().out.count("\n") == 1, "it does again what it has done"
    kill = json.loads((tmp_path / "faults_kills.json").read_text())["trials"][0]
    assert kill["restarts"] == 1 and kill["differing"] == []
    assert json.loads((tmp_path / "faults_saves.json").read_text())["trials"][0]["last_committed_loads"] == 3
