"""The benchmark of generation runs on a tiny model, and both sides write the same text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mpu
from benchmarks import generation


def test_smoke(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    output = tmp_path / "generation.json"
    try:
        generation.main(["--smoke", "--rounds", "1", "--output", str(output)])
    finally:
        mpu.destroy_model_parallel()
    result = json.loads(output.read_text())
    assert [(row["precision"], row["batch"]) for row in result["speed"]] == [
        ("bf16", 1),
        ("bf16", 8),
        ("fp32", 1),
        ("fp32", 8),
    ]
    assert [row["equal_texts"] for row in result["speed"][2:]] == ["1 of 1", "8 of 8"]
    assert all(row["ratio"] > 0 for row in result["speed"] + result["by_position"])
