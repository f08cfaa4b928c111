"""Attention against the formula in float64, in every precision and by every kernel that a CPU takes; and dropout whose masks
follow from keys: the same in every part of a batch, and independent of all that is near."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import mpu
from mpu.attention import keyed_attention as by_document
from mpu.dropout import AFTER_ATTENTION, AFTER_MLP
from mpu.kernels import causal_attention, keyed_attention, keyed_dropout


def formula(qkv: Tensor, keep: Tensor | float = 1.0) -> Tensor:
    """[s, b, n, 3, d] -> [s, b, n·d]; keep: what the probabilities [b, n, s, s] are multiplied with."""
    q, k, v = qkv.permute(3, 1, 2, 0, 4)
    scores = q @ k.transpose(-1, -2) / qkv.size(-1) ** 0.5
    later = torch.ones(qkv.size(0), qkv.size(0), dtype=torch.bool).triu(1)
    y = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1).mul(keep) @ v
    return y.permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("amx", [True, False])
@pytest.mark.parametrize("s", [1, 100, 256, 300, 700])
@pytest.mark.parametrize("d", [32, 48, 64])
def test_equals_the_formula(s: int, d: int, amx: bool, monkeypatch: pytest.MonkeyPatch):
    """In bf16 a result is rounded at 2^-9 relatively, and so is every intermediate of a path that materialises some:
    1 % of the norm bounds both (measured: up to 0.4 % forward, 0.7 % backward)."""
    monkeypatch.setattr("mpu.kernels.HAS_AMX", amx)
    torch.manual_seed(s + d)
    qkv, dy = torch.randn(s, 2, 3, 3, d), torch.randn(s, 2, 3 * d)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        x, dy_rounded = qkv.to(dtype).requires_grad_(), dy.to(dtype)
        exact = x.detach().double().requires_grad_()
        expected, got = formula(exact), causal_attention(x, 0.0)
        (d_expected,) = torch.autograd.grad(expected, exact, dy_rounded.double())
        (d_got,) = torch.autograd.grad(got, x, dy_rounded)
        for a, e in ((got, expected), *zip(d_got.unbind(3), d_expected.unbind(3), strict=True)):
            if e.norm() > 0:  # a first token's softmax is constant: its queries and keys get no gradient
                assert (a.double() - e).norm() <= bound * e.norm(), (dtype, s)
        with torch.no_grad():
            assert (causal_attention(x, 0.0).double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize(("dtype", "amx"), [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("s", [64, 600])
def test_dropout_keeps_the_mean_and_repeats_its_masks_in_backward(
    s: int, dtype: torch.dtype, amx: bool, monkeypatch: pytest.MonkeyPatch
):
    """With values of one, an output is the share of the probabilities that was kept, over 1 - p; its gradient with
    respect to the values adds up to the same."""
    monkeypatch.setattr("mpu.kernels.HAS_AMX", amx)
    torch.manual_seed(0)
    qkv = torch.zeros(s, 2, 2, 3, 64)
    qkv[:, :, :, 2] = 1.0
    x = qkv.to(dtype).requires_grad_()
    y = causal_attention(x, 0.3)
    late = y.detach()[s // 2 :].float()  # early queries see few keys
    assert late.mean() == pytest.approx(1.0, abs=0.03) and late.std() > 0.01
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert dx[:, :, :, 2].float().sum() == pytest.approx(y.detach().float().sum().item(), rel=1e-2)


def test_every_processor_drops_the_same_probabilities(monkeypatch: pytest.MonkeyPatch):
    """The outputs are those of the formula with one mask."""
    qkv = torch.randn(100, 2, 3, 3, 32).bfloat16()
    outputs = []
    for amx in (True, False):
        monkeypatch.setattr("mpu.kernels.HAS_AMX", amx)
        torch.manual_seed(1)
        outputs.append(causal_attention(qkv, 0.5).double())
    assert 0 < (outputs[1] - outputs[0]).norm() <= 1e-2 * outputs[0].norm()


def keys_of(samples: list[int], *, seed: int = 1, layer: int = 0) -> Tensor:
    """[b, 3]"""
    return mpu.dropout_keys(seed, torch.tensor(samples), layer + 1)[layer]


def mask(
    samples: list[int],
    s: int = 64,
    h: int = 96,
    site: int = AFTER_MLP,
    p: float = 0.5,
    *,
    seed: int = 1,
    layer: int = 0,
) -> Tensor:
    """bool [s, b, h]: what is dropped."""
    ones = torch.ones(s, len(samples), h)
    return keyed_dropout(ones, p, keys_of(samples, seed=seed, layer=layer), site) == 0


@pytest.mark.parametrize("h", [96, 100])
def test_any_part_of_a_batch_has_the_same_mask(h: int):
    whole = mask([5, 9, 2], h=h)
    assert torch.equal(mask([9], h=h), whole[:, 1:2]) and torch.equal(mask([2, 5], h=h), whole[:, [2, 0]])
    part = keyed_dropout(torch.ones(20, 3, h), 0.5, keys_of([5, 9, 2]), AFTER_MLP, first_position=30) == 0
    assert torch.equal(part, whole[30:50])


def test_the_gradient_has_the_same_mask():
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(33, 2, 40, dtype=dtype).requires_grad_()
        y = keyed_dropout(x, 0.25, keys_of([3, 4]), AFTER_MLP)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(dx == 0, y == 0) and 0.2 < (dx == 0).float().mean() < 0.3
        assert torch.equal(y, x.detach() * (4 / 3) * (dx != 0))


def test_masks_are_as_often_as_they_should_and_independent():
    """Of neighbours, samples, layers, sites and seeds: the correlation of 614,400 elements is below 5 of its standard
    deviations."""
    shape = {"s": 400, "h": 768}
    first = mask([0, 1], **shape)
    for p in (0.1, 0.5):
        dropped = mask([0, 1], **shape, p=p).float().mean().item()
        assert abs(dropped - p) < 5 * (p * (1 - p) / first.numel()) ** 0.5
    others = {
        "sample": mask([2, 3], **shape),
        "layer": mask([0, 1], **shape, layer=1),
        "site": mask([0, 1], **shape, site=AFTER_ATTENTION),
        "seed": mask([0, 1], **shape, seed=2),
        "neighbouring channel": first.roll(1, 2),
        "neighbouring position": first.roll(1, 0),
        "the other sample": first.flip(1),
        "the word's neighbour": first.roll(4, 2),
    }
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack([first.flatten(), other.flatten()]).float())[0, 1].item()
        assert abs(correlation) < 5 * first.numel() ** -0.5, (name, correlation)


def attention_mask(s: int, b: int, n: int, p: float, keys: Tensor, first_head: int = 0) -> Tensor:
    """[b, n, s, s], 0 or 1/(1 - p): with scores of 0 and one-hot values an output is a probability."""
    columns = []
    for start in range(0, s, 64):
        qkv = torch.zeros(s, b, n, 3, 64)
        count = min(64, s - start)
        qkv[start : start + count, :, :, 2, :count] = torch.eye(count).view(count, 1, 1, count)
        columns.append(keyed_attention(qkv, p, keys, 1, first_head).view(s, b, n, 64)[..., :count])
    weights = torch.cat(columns, dim=-1).permute(1, 2, 0, 3)  # [s, b, n, s] -> [b, n, s, s]
    return (weights * torch.arange(1, s + 1).view(1, 1, s, 1)).round(decimals=3)


@pytest.mark.parametrize("amx", [True, False])
@pytest.mark.parametrize("s", [1, 40, 128, 300])
def test_attention_equals_the_formula(s: int, amx: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mpu.kernels.attention_keyed.HAS_AMX", amx)
    p, keys = 0.25, keys_of([7, 3])
    keep = attention_mask(s, 2, 3, p, keys).double()
    kept = keep.tril().unique()
    assert all(any(abs(value - exact) < 1e-3 for exact in (0.0, 4 / 3)) for value in kept.tolist())
    keep = (keep > 0) * 4 / 3
    torch.manual_seed(s)
    qkv, dy = torch.randn(s, 2, 3, 3, 64), torch.randn(s, 2, 3 * 64)
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
        x, dy_rounded = qkv.to(dtype).requires_grad_(), dy.to(dtype)
        exact = x.detach().double().requires_grad_()
        expected, got = formula(exact, keep), keyed_attention(x, p, keys, 1)
        (d_expected,) = torch.autograd.grad(expected, exact, dy_rounded.double())
        (d_got,) = torch.autograd.grad(got, x, dy_rounded)
        for a, e in ((got, expected), *zip(d_got.unbind(3), d_expected.unbind(3), strict=True)):
            if e.norm() > 0:
                assert (a.double() - e).norm() <= bound * e.norm(), (dtype, s)


def test_attention_of_a_part_of_the_heads_and_samples_has_the_same_masks():
    qkv, keys = torch.randn(150, 3, 4, 3, 16), keys_of([4, 8, 6])
    whole = keyed_attention(qkv, 0.5, keys, 1).view(150, 3, 4, 16)
    part = keyed_attention(qkv[:, 1:, 2:], 0.5, keys[1:], 1, first_head=2).view(150, 2, 2, 16)
    assert torch.allclose(part, whole[:, 1:, 2:], atol=1e-6)
    distinct = {tuple(row) for row in attention_mask(64, 3, 4, 0.5, keys)[:, :, 63].flatten(0, 1).tolist()}
    assert len(distinct) == 12, "each head of each sample has masks of its own"


def test_attention_within_documents_does_not_depend_on_the_micro_batch():
    tokens = torch.ones(3, 60, dtype=torch.int64)
    tokens[0, 20], tokens[1, [0, 5, 58]] = 0, 0
    qkv, keys = torch.randn(60, 3, 2, 3, 16), keys_of([4, 8, 6])
    whole = by_document(qkv, 0.3, mpu.Documents(tokens, 0, "cpu"), keys, 0)
    for first, last in itertools.pairwise((0, 1, 3)):
        part = by_document(qkv[:, first:last], 0.3, mpu.Documents(tokens[first:last], 0, "cpu"), keys[first:last], 0)
        assert torch.equal(part, whole[:, first:last])
    assert torch.equal(by_document(qkv, 0.3, None, keys, 0)[:, 2], whole[:, 2]), "a sample that is one document"
