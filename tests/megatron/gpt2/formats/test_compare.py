"""Test that `compare_tensors` and `compare_logits` find the known differences of two models."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.gpt2.config import ModelConfig
from megatron.gpt2.formats import BaseCheckpoint
from megatron.gpt2.formats.compare import CHUNK, compare_logits, compare_tensors, format_difference, max_abs_difference
from tests.megatron.gpt2.formats.sample_checkpoints import SHAPE, InMemoryCheckpoint, random_weights

NAME, EMBEDDINGS = "model.transformer.layers.2.mlp.dense_4h_to_h.weight", "model.word_embeddings.weight"
NAN, INF = math.nan, math.inf


WEIGHTS = {f"model.{name}": x for name, x in random_weights().items()}
NORM, BIAS = (f"model.transformer.final_layernorm.{word}" for word in ("weight", "bias"))


def source(changed: dict[str, Tensor] | None = None, shape: ModelConfig = SHAPE) -> BaseCheckpoint:
    """Return a checkpoint in memory with `WEIGHTS`, some of which are `changed`."""
    return InMemoryCheckpoint(WEIGHTS | (changed or {}), shape)


def test_differences_of_tensors():
    """One element differs. A second tensor has a NaN, a third a different shape, and a fourth is missing. Only one
    checkpoint has masters."""
    moved = WEIGHTS[NAME].clone()
    moved[-1, -1] += 0.5
    a = source({"master.word_embeddings.weight": torch.ones(1)})
    b = source({NAME: moved, EMBEDDINGS: WEIGHTS[EMBEDDINGS][:90], NORM: WEIGHTS[NORM] * NAN})
    assert compare_tensors(b, b).equal
    del b.tensors[BIAS]
    found = compare_tensors(a, b)
    assert not found.equal
    rows = {row.name: row for row in found.rows if row.max_difference != 0}
    assert rows[NAME].max_difference == pytest.approx(0.5, abs=1e-6)
    assert {name: row.note for name, row in rows.items()} == {
        NAME: "",
        EMBEDDINGS: "different shape: 90 x 48 in the second",
        NORM: "NaN in only one",
        BIAS: "only in the first",
    }
    lines = format_difference(found)
    assert len(lines) == 2 + len(WEIGHTS) and "not compared: master" in lines[-1]
    assert [NAME, "48", "x", "80", "0.5"] in map(str.split, lines)


@pytest.mark.parametrize(
    "a, b, expected",
    [([NAN, 1], [NAN, 3], 2.0), ([NAN, 1], [1, NAN], NAN), ([INF], [-INF], INF)],
)
def test_what_is_no_number(a: list[float], b: list[float], expected: float):
    x, y = torch.tensor(a), torch.tensor(b)
    x, y = torch.cat([x, torch.zeros(CHUNK)]), torch.cat([y, torch.zeros(CHUNK)])  # two blocks
    assert max_abs_difference(x, y) == pytest.approx(expected, nan_ok=True)


def test_check_runs_both_models():
    a, lines = source(), list[str]()
    assert compare_logits(a, source(), log=lines.append) == 0
    assert "48 tokens" in lines[0]  # 2 sequences of the model's 24 positions
    expected = 0.25 * WEIGHTS[EMBEDDINGS].sum(1).abs().max().item()
    assert compare_logits(a, source({BIAS: WEIGHTS[BIAS] + 0.25})) == pytest.approx(expected, rel=1e-4)
    assert 0 < compare_logits(a, source(shape=replace(SHAPE, gelu="erf"))) < 0.01
    assert math.isnan(compare_logits(a, source({BIAS: WEIGHTS[BIAS] * NAN})))
    with pytest.raises(ValueError, match="--vocab-size"):
        compare_logits(a, source(shape=replace(SHAPE, vocab_size=90)))
