"""The evaluation benchmark runs from end to end on the beginnings of the files, and says so where scores differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.evaluation import agrees, main


@pytest.mark.slow
def test_smoke(test_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval, the extra [eval], is not installed")
    assert main(["--smoke", "--data", str(test_data), "--output", str(tmp_path / "out.json")]) == 0
    assert "accuracies equal: yes" in capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["met"] and list(result["scores"]) == ["transformers", "ours, mp 1 dp 1"]


@pytest.mark.parametrize(
    ("perplexity", "lambada", "equal"), [(30.001, 0.25, True), (30.01, 0.25, False), (30.0, 0.2502, False)]
)
def test_what_counts_as_equal(perplexity: float, lambada: float, equal: bool) -> None:
    assert agrees({"perplexity": perplexity, "lambada": lambada}, {"perplexity": 30.0, "lambada": 0.25}) is equal
