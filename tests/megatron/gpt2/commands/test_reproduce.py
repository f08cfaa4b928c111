"""Test that `tools/reproduce.py` compares losses with published ones and with the exact entropy of
examples/grammar.py."""

from __future__ import annotations

import importlib
import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest

from megatron.gpt2.commands.reproduce import FINEWEB_124M, main

ROOT = Path(__file__).resolve().parents[4]


def save_losses(folder: Path, losses: dict[int, float]) -> str:
    lines = [
        {"iteration": iteration, "split": "valid", "lm_loss": loss, "bits_per_byte": loss}
        for iteration, loss in losses.items()
    ]
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
    assert main([save_losses(tmp_path, {100: 0.9, 400: 0.42}), "--entropy", "0.3988"]) == 0
    for wrong in (0.39, 0.45):  # A loss below the entropy shows that the model saw its targets.
        assert main([save_losses(tmp_path, {400: wrong}), "--entropy", "0.3988"]) == 1


def test_the_entropy_is_that_of_all_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    grammar = importlib.import_module("grammar")

    def texts(symbol: str) -> Counter[str]:
        """Return {text: probability} for all texts that the grammar makes from `symbol`."""
        found, rules = Counter[str](), grammar.GRAMMAR[symbol]
        for weight, rule in rules:
            made = {"": weight / sum(other for other, _ in rules)}
            for word in rule.split():
                nexts = texts(word) if word in grammar.GRAMMAR else {f"{word} ": 1.0}
                made = {text + more: p * q for text, p in made.items() for more, q in nexts.items()}
            found.update(made)  # A Counter adds the probabilities of a text with several derivations.
        return found

    sentences = texts("SENTENCE")
    assert sum(sentences.values()) == pytest.approx(1)
    bits = -sum(p * math.log2(p) for p in sentences.values())
    size = sum(p * len(text.rstrip() + grammar.END) for text, p in sentences.items())
    assert bits / size == pytest.approx(grammar.entropy_per_byte(), rel=1e-9)
    assert {grammar.draw("SENTENCE", random.Random(seed)) for seed in range(200)} <= sentences.keys()
