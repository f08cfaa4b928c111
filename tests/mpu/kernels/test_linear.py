"""Products of linear layers against the formula in float64, as every processor takes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mpu import kernels


@pytest.mark.parametrize(("amx", "bf16"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_without_gradient(dtype: torch.dtype, amx: bool, bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows, whether the weight is stored by row or by column, and whichever processor it is."""
    monkeypatch.setattr("mpu.kernels.HAS_AMX", amx)
    monkeypatch.setattr("mpu.kernels.HAS_BF16_PRODUCTS", bf16)
    for rows in (1, 2, 4, 5, 8, 16, 17):
        x, weight, bias = torch.randn(rows, 1, 48), torch.randn(32, 48), torch.randn(32)
        for a in (weight.to(dtype), weight.to(dtype).t().contiguous().t()):
            for b in (None, bias.to(dtype)):
                y = kernels.linear_without_gradient(x.to(dtype), a, b)
                expected = F.linear(x.to(dtype).double(), a.double(), None if b is None else b.double())
                assert y.shape == expected.shape and y.dtype == dtype and y.is_contiguous()
                torch.testing.assert_close(
                    y.double(),
                    expected,
                    rtol=1e-5 if dtype == torch.float32 else 1e-2,
                    atol=1e-4 if dtype == torch.float32 else 1e-1,
                )


@pytest.mark.parametrize("amx", [True, False])
def test_weight_gradient(amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 512 tokens, with a rest, and as many as there are at most; or the whole at once."""
    monkeypatch.setattr("mpu.kernels.HAS_AMX", amx)
    for tokens in (3, 600, 2600):
        dy, x = torch.randn(tokens, 16).bfloat16(), torch.randn(tokens, 24).bfloat16()
        expected = dy.double().t() @ x.double()
        assert (kernels.weight_gradient(dy, x).double() - expected).norm() <= 5e-3 * expected.norm()


@pytest.mark.parametrize("amx", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_and_its_gradients(dtype: torch.dtype, amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of two and three dimensions, in one part and in several; with and without bias; the weight's alone."""
    monkeypatch.setattr("mpu.kernels.HAS_AMX", amx)
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    for shape in ((7, 48), (1100, 2, 48)):
        given = [torch.randn(size).to(dtype).requires_grad_() for size in (shape, (32, 48), (32,))]
        exact = [t.detach().double().requires_grad_() for t in given]
        dy = torch.randn(*shape[:-1], 32).to(dtype)
        for arguments, of in ((3, (0, 1, 2)), (2, (0, 1)), (3, (1,))):
            bias = given[2] if arguments == 3 else None
            y, expected = kernels.linear(given[0], given[1], bias), F.linear(*exact[:arguments])
            gradients = torch.autograd.grad(y, [given[i] for i in of], dy)
            wanted = torch.autograd.grad(expected, [exact[i] for i in of], dy.double())
            for got, want in ((y, expected), *zip(gradients, wanted, strict=True)):
                assert got.dtype == dtype and (got.double() - want).norm() <= bound * want.norm()
