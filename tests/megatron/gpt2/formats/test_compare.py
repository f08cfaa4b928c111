"""Test that `compare_tensors` and `compare_logits` find the known differences of two models, and read real files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import mpu
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.formats import BaseCheckpoint
from megatron.gpt2.formats.compare import CHUNK, compare_logits, compare_tensors, format_difference, max_abs_difference
from tests.megatron.gpt2.formats.sample_checkpoints import SHAPE, InMemoryCheckpoint, random_weights

NAME = "model.transformer.layers.2.mlp.dense_4h_to_h.weight"
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def no_groups() -> Iterator[None]:
    mpu.destroy_model_parallel()
    yield
    mpu.destroy_model_parallel()


def source(tensors: dict[str, Tensor], shape: ModelConfig = SHAPE) -> BaseCheckpoint:
    return InMemoryCheckpoint(tensors, shape)


def weights() -> dict[str, Tensor]:
    return {f"model.{name}": x for name, x in random_weights().items()}


def test_one_element():
    changed = weights()
    changed[NAME] = changed[NAME].clone()
    changed[NAME][-1, -1] += 0.5
    found = compare_tensors(source(weights()), source(changed))
    assert not found.equal
    (row,) = [row for row in found.rows if row.max_difference != 0]
    assert row.name == NAME and row.max_difference == pytest.approx(0.5, abs=1e-6) and row.shape == (48, 80)
    lines = format_difference(found)
    assert len(lines) == 1 + len(changed)
    (line,) = [line for line in lines if NAME in line]
    assert line.split() == [NAME, "48", "x", "80", f"{row.max_difference:.3g}"]


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ([NAN, 1], [NAN, 3], 2.0),
        ([NAN, 1], [1, NAN], NAN),
        ([1, 5], [NAN, 1], NAN),
        ([INF, 1], [INF, 1], 0.0),
        ([INF], [-INF], INF),
        ([INF], [1], INF),
        ([NAN], [INF], NAN),
    ],
)
def test_what_is_no_number(a: list[float], b: list[float], expected: float):
    x, y = torch.tensor(a), torch.tensor(b)
    for found in (max_abs_difference(x, y), max_abs_difference(y, x)):
        assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_a_nan_in_one_is_a_difference():
    x, y = torch.zeros(2, CHUNK), torch.zeros(2, CHUNK)
    y[0, 5], y[1, 5] = NAN, 7
    assert math.isnan(max_abs_difference(x, y))
    b = weights()
    b[NAME] = b[NAME] * NAN
    found = compare_tensors(source(weights()), source(b))
    assert not found.equal and [row.note for row in found.rows if row.name == NAME] == ["NaN in only one"]
    assert compare_tensors(source(b), source(b)).equal and math.isnan(compare_logits(source(b), source(b)))


def test_missing_and_of_another_shape():
    a, b = weights(), weights()
    del b[NAME]
    a["model.word_embeddings.weight"] = a["model.word_embeddings.weight"][:90]
    found = compare_tensors(source(a), source(b))
    assert not found.equal
    assert [row[:3] + (row.note,) for row in found.rows if row.max_difference is None] == [
        ("model.word_embeddings.weight", (90, 48), None, "different shape: 101 x 48 in the second"),
        (NAME, (), None, "only in the first"),
    ]
    assert any("different shape" in line and "90 x 48" in line for line in format_difference(found))


def test_kinds_that_one_alone_has_are_said():
    a, b = weights(), weights()
    a |= {name.replace("model.", "master."): x for name, x in a.items()}
    found = compare_tensors(source(a), source(b))
    assert found.equal and found.not_compared == ["master"] and len(found.rows) == len(b)
    assert "not compared: master" in format_difference(found)[-1]


def test_check_runs_both_models():
    a, b = weights(), weights()
    lines: list[str] = []
    assert compare_logits(source(a), source(b), log=lines.append) == 0
    assert len(lines) == 1 and "48 tokens" in lines[0]  # The text has 2 sequences of the model's 24 positions.
    b["model.transformer.final_layernorm.bias"] = b["model.transformer.final_layernorm.bias"] + 0.25
    expected = 0.25 * a["model.word_embeddings.weight"].sum(1).abs().max().item()
    assert compare_logits(source(a), source(b)) == pytest.approx(expected, rel=1e-4)
    assert 0 < compare_logits(source(a), source(a, replace(SHAPE, gelu="erf"))) < 0.01
    with pytest.raises(ValueError, match="--vocab-size"):
        compare_logits(source(a), source(a, replace(SHAPE, vocab_size=90)))
