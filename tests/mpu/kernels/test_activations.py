"""GELU for the compiler, dropout of 16 bits for each element, and an output that is dropped and computed again, against the plain calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpu import kernels


def test_gelu_for_the_compiler_is_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(-9, 9, 1001, dtype=torch.float64)
    expected = F.gelu(x, approximate="tanh")
    assert torch.equal(kernels.gelu_tanh(x), expected)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(kernels.gelu_tanh(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", [F.gelu, nn.LayerNorm(16)])
def test_an_output_that_is_computed_again(function: Callable[[Tensor], Tensor]) -> None:
    """The results are those of the plain call to the bit, and the output does not live until backward."""
    linear, outputs = nn.Linear(16, 8), list[weakref.ref[torch.UntypedStorage]]()

    def watched(x: Tensor) -> Tensor:
        y = function(x)
        outputs.append(weakref.ref(y.untyped_storage()))
        return y

    def results(call: Callable[[Tensor], Tensor], *, kept: bool) -> tuple[Tensor, ...]:
        outputs.clear()
        x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = call(x)
        assert [output() is not None for output in outputs] == [kept]
        gradients = torch.autograd.grad(y, (x, *linear.parameters()), torch.ones_like(y))
        assert len(outputs) == 1 + (not kept)
        return y, *gradients

    plain = results(lambda x: linear(watched(x)), kept=True)
    again = results(lambda x: kernels.checkpoint_without_output(watched, linear, x), kept=False)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_dropout_drops_what_it_should_and_keeps_the_mean():
    torch.manual_seed(0)
    for p in (0.1, 0.5):
        x = torch.ones(1001, 1003, requires_grad=True)
        y = kernels.dropout(x, p)
        assert (y == 0).float().mean().item() == pytest.approx(p, abs=0.002)
        assert y[y != 0].unique().tolist() == pytest.approx([1 / (1 - p)], rel=1e-4)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())
        # No pattern along the elements that share a random number.
        lanes = (y.detach().view(-1)[:1_000_000].view(-1, 4) == 0).float()
        assert lanes.mean(0).tolist() == pytest.approx([p] * 4, abs=0.004)
        assert torch.corrcoef(lanes.t()).fill_diagonal_(0).abs().max().item() < 0.01
    assert torch.equal(kernels.dropout(x, 0.0), x)
