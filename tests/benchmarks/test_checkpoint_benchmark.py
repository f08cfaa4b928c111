"""The checkpoint benchmark runs end to end on a tiny state."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.wide
def test_checkpoint(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "benchmarks/checkpoint.py", "--smoke", "--output", str(tmp_path), "--folder", str(tmp_path)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "checkpoint.json").read_text())
    assert len(result["goals"]) == 5 and all(goal["found"] > 0 for goal in result["goals"])
    assert {f"{side}: {what}" for side in ("ours", "DCP") for what in ("save", "load, warm", "load, cold")} <= result[
        "summary"
    ].keys()
    assert result["peak_extra_bytes"]["ours: save --async-save"] > 1e9 * result["gigabytes"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.json"]
