"""`tools/reproduce.py` compares losses with published ones and with the exact entropy of examples/grammar.py."""

from __future__ import annotations

import importlib.util
import json
import math
import random
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from megatron.gpt2.commands.reproduce import FINEWEB_124M, main

ROOT = Path(__file__).resolve().parents[4]


def save_losses(folder: Path, losses: dict[int, float]) -> str:
    lines = [{"iteration": iteration, "split": "valid", "lm_loss": loss} for iteration, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [{"iteration": 1}, *lines]))
    return str(folder)


def test_published_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([save_losses(tmp_path, {10: 9.9, **FINEWEB_124M, 5000: 3.5535, 30000: 3.1})]) == 0
    assert capsys.readouterr().out.count("inside") == len(FINEWEB_124M) + 1
    assert main([save_losses(tmp_path, {**FINEWEB_124M, 12000: 3.40})]) == 1
    assert "12,000  3.4000  3.321 to 3.381  OUTSIDE" in capsys.readouterr().out
    for losses, flags, said in (
        ({}, [], "has no validation loss"),
        ({1: 9.0}, [], "no validation loss between iterations 250 and 19560"),
        ({1: 9.0}, ["--entropy", "0"], "--entropy must be positive"),
    ):
        with pytest.raises(ValueError, match=said):
            main([save_losses(tmp_path, losses), *flags])


def test_loss_near_the_entropy(tmp_path: Path) -> None:
    assert main([save_losses(tmp_path, {100: 0.9, 400: 0.28}), "--entropy", "0.2764"]) == 0
    for wrong in (0.26, 0.31):  # below the entropy, the model has seen its targets
        assert main([save_losses(tmp_path, {400: wrong}), "--entropy", "0.2764"]) == 1


@pytest.fixture(scope="module")
def grammar() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grammar", ROOT / "examples" / "grammar.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_entropy_is_that_of_the_text(grammar: ModuleType) -> None:
    choose = random.Random(0)
    sentences = [grammar.draw("SENTENCE", choose).rstrip() + grammar.END for _ in range(50_000)]
    counts, size = Counter(sentences), sum(map(len, sentences))
    observed = -sum(count * math.log(count / len(sentences)) for count in counts.values()) / size
    bias = (len(counts) - 1) / 2 / size  # of this estimate, by Miller and Madow
    assert observed + bias == pytest.approx(grammar.entropy_per_byte(), rel=3e-3)
