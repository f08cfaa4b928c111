"""The benchmark of serving runs on a tiny model: both arms write the same texts."""

from __future__ import annotations

import json
from pathlib import Path

import mpu
from benchmarks import serving


def test_smoke(tmp_path: Path) -> None:
    output = tmp_path / "serving.json"
    try:
        serving.main(["--smoke", "--rounds", "2", "--precision", "fp32", "--output", str(output)])
    finally:
        mpu.destroy_model_parallel()
    result = json.loads(output.read_text())
    assert [run["arm"] for run in result["runs"]] == ["static", "continuous", "continuous", "static"]
    assert result["equal_texts"] == "12 of 12" and result["ratio"] > 0
    static, continuous = result["runs"][:2]
    assert continuous["token_steps"] < static["token_steps"] and continuous["tokens"] == static["tokens"]
    assert continuous["cache_bytes"] == static["cache_bytes"] == 2 * 4 * 2 * 64 * 32 * 4  # l · rows · 2 · S · h
