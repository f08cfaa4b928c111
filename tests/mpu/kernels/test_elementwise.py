"""GELU for the compiler, and an output that is dropped and computed again, against the plain calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpu import kernels
from mpu.kernels.elementwise import gelu_by_sigmoid


def test_gelu_by_sigmoid_is_gelu() -> None:
    x = torch.linspace(-9, 9, 1001, dtype=torch.float64)
    expected = F.gelu(x, approximate="tanh")
    torch.testing.assert_close(gelu_by_sigmoid(x), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(kernels.gelu_tanh(x), expected)


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
