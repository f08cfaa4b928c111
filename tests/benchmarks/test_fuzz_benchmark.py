"""benchmarks/fuzz.py, cut to some inputs: it goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fuzz


@pytest.mark.slow
def test_a_few_inputs_and_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--targets", ".idx", "HTTP body", "--workers", "1", "--output", str(tmp_path)]
    assert fuzz.main([*flags, "--inputs", "120"]) == 0
    first = json.loads((tmp_path / "fuzz.json").read_text())
    assert first["inputs"] == 120 and first["crashes"] == first["findings"] == 0
    assert fuzz.main([*flags, "--inputs", "160"]) == 0
    rows = json.loads((tmp_path / "fuzz.json").read_text())["targets"]
    assert {name: row["inputs"] for name, row in rows.items()} == {".idx": 80, "HTTP body": 80}
    assert all(row["taken"] + row["refused"] == 80 for row in rows.values())
    assert "160 inputs" in capfd.readouterr().out
