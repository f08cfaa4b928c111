"""The campaign of faults that a run notices itself goes from end to end, a trial of each part; and it goes on where it
was interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import state_faults


@pytest.mark.slow
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in state_faults.PARTS:
        assert state_faults.main([part, "--smoke", "--output", str(tmp_path)]) == 0
        capsys.readouterr()
        assert state_faults.main([part, "--smoke", "--output", str(tmp_path)]) == 0
        assert capsys.readouterr().out.count("\n") == 1, "it does again what it has done"
        (trial,) = json.loads((tmp_path / f"state_{part}.json").read_text())["trials"]
        assert trial["good"]
    assert state_faults.main(["cost", "--smoke", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "state_cost.json").read_text())["rows"]
    assert len(rows) == 2 and all(row["ratio"] > 0.1 and row["seconds"]["hash"] > 0 for row in rows.values())
