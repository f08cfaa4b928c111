"""Attention equals the formula in float64, for each precision and each kernel of a CPU. The masks of seeded dropout are
equal in every part of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mpu
from mpu.attention import core_attention
from mpu.kernels import causal_attention, seeded_attention
from tests.mpu.kernels.test_dropout import seeds_of


@pytest.fixture(params=[True, False], ids=["amx", "no amx"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test as on a processor with AMX, and as on one without."""
    monkeypatch.setattr("mpu.kernels.cpu_features.HAS_AMX", request.param)


def formula(qkv: Tensor, keep: Tensor | float) -> Tensor:
    """Compute attention by the formula: [s, b, n, 3, d] -> [s, b, n·d].

    keep: factor of the probabilities [b, n, s, s].
    """
    q, k, v = qkv.permute(3, 1, 2, 0, 4)
    scores = q @ k.transpose(-1, -2) / qkv.size(-1) ** 0.5
    later = torch.ones(qkv.size(0), qkv.size(0), dtype=torch.bool, device=qkv.device).triu(1)
    y = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1).mul(keep) @ v
    return y.permute(2, 0, 1, 3).flatten(2)


def check_formula(attention: Callable[[Tensor], Tensor], s: int, d: int, keep: Tensor | float = 1.0) -> None:
    """Compare outputs, and gradients of queries, keys and values. In bf16, results and intermediate results are rounded
    to 2^-9. The bound is 1 % of the norm (measured: up to 0.4 % in forward, 0.7 % in backward)."""
    torch.manual_seed(s + d)
    qkv, dy = torch.randn(s, 2, 3, 3, d), torch.randn(s, 2, 3 * d)
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
        x, dy_rounded = qkv.to(dtype).requires_grad_(), dy.to(dtype)
        exact = x.detach().double().requires_grad_()
        expected, got = formula(exact, keep), attention(x)
        (d_expected,) = torch.autograd.grad(expected, exact, dy_rounded.double())
        (d_got,) = torch.autograd.grad(got, x, dy_rounded)
        with torch.no_grad():
            without = attention(x)
        for a, e in ((got, expected), (without, expected), *zip(d_got.unbind(3), d_expected.unbind(3), strict=True)):
            if e.norm() > 0:  # The first token's softmax is 1, so its query and key have no gradient.
                assert (a.double() - e).norm() <= bound * e.norm(), (dtype, s)


@pytest.mark.parametrize("s", [1, 100, 256, 300, 700])
@pytest.mark.parametrize("d", [32, 48, 64])
def test_equals_the_formula(s: int, d: int, processor: None):
    check_formula(lambda qkv: causal_attention(qkv, 0.0), s, d)


def attention_mask(s: int, b: int, n: int, p: float, seeds: Tensor) -> Tensor:
    """Return the mask [b, n, s, s], 0 or 1/(1 - p). With scores of 0 and one-hot values, each output is a
    probability."""
    columns = []
    for start in range(0, s, 64):
        qkv = torch.zeros(s, b, n, 3, 64)
        count = min(64, s - start)
        qkv[start : start + count, :, :, 2, :count] = torch.eye(count).view(count, 1, 1, count)
        columns.append(seeded_attention(qkv, p, seeds, 1).view(s, b, n, 64)[..., :count])
    weights = torch.cat(columns, dim=-1).permute(1, 2, 0, 3)  # [s, b, n, s] -> [b, n, s, s]
    return (weights * torch.arange(1, s + 1).view(1, 1, s, 1)).round(decimals=3)


@pytest.mark.parametrize("s", [1, 40, 128, 300, 600])
def test_seeded_attention_equals_the_formula(s: int, processor: None):
    seeds = seeds_of([7, 3])
    keep = attention_mask(s, 2, 3, 0.25, seeds).double()
    kept = keep.tril().unique()
    assert all(any(abs(value - exact) < 1e-3 for exact in (0.0, 4 / 3)) for value in kept.tolist())
    check_formula(lambda qkv: seeded_attention(qkv, 0.25, seeds, 1), s, 64, (keep > 0) * 4 / 3)


def test_a_part_of_the_heads_and_samples_has_the_same_masks():
    qkv, seeds = torch.randn(150, 3, 4, 3, 16), seeds_of([4, 8, 6])
    whole = seeded_attention(qkv, 0.5, seeds, 1).view(150, 3, 4, 16)
    part = seeded_attention(qkv[:, 1:, 2:], 0.5, seeds[1:], 1, first_head=2).view(150, 2, 2, 16)
    assert torch.allclose(part, whole[:, 1:, 2:], atol=1e-6)
    distinct = {tuple(row) for row in attention_mask(64, 3, 4, 0.5, seeds)[:, :, 63].flatten(0, 1).tolist()}
    assert len(distinct) == 12, "each head of each sample has a different mask"


def test_attention_within_documents_does_not_depend_on_the_micro_batch():
    tokens = torch.ones(3, 60, dtype=torch.int64)
    tokens[0, 20], tokens[1, [0, 5, 58]] = 0, 0
    qkv, seeds = torch.randn(60, 3, 2, 3, 16), seeds_of([4, 8, 6])
    whole = core_attention(qkv, 0.3, mpu.PackedSeqParams.from_tokens(tokens, 0, "cpu"), seeds)
    for first, last in itertools.pairwise((0, 1, 3)):
        documents = mpu.PackedSeqParams.from_tokens(tokens[first:last], 0, "cpu")
        part = core_attention(qkv[:, first:last], 0.3, documents, seeds[first:last])
        assert torch.equal(part, whole[:, first:last])
    assert torch.equal(core_attention(qkv, 0.3, None, seeds)[:, 2], whole[:, 2]), "a sample that is one document"
