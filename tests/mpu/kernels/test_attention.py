"""Attention against the formula in float64, in every precision and by every kernel that a CPU takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpu.kernels import causal_attention


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
