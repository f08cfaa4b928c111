"""Matrix products of linear layers and of the loss equal those in float64 on each kind of processor."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from mpu import kernels
from mpu.kernels import cpu_features
from mpu.kernels import cross_entropy as kernel
from mpu.layers import linear


@pytest.fixture(params=[(True, True), (False, True), (False, False)], ids=["amx", "bf16", "neither"])
def on_each_processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with AMX, with bf16 products, and with neither."""
    for name, has in zip(("HAS_AMX", "HAS_BF16_PRODUCTS"), request.param, strict=True):
        monkeypatch.setattr(cpu_features, name, has)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_without_gradient(dtype: torch.dtype, on_each_processor: None) -> None:
    """Test different numbers of rows, and weights that are stored by row, by column or in blocks."""
    for rows in (1, 2, 4, 5, 8, 16, 17):
        x, weight, bias = torch.randn(rows, 1, 48), torch.randn(32, 48), torch.randn(32)
        stored = kernels.weight_for_inference(weight.to(dtype))
        for a in (weight.to(dtype), weight.to(dtype).t().contiguous().t(), stored):
            for b in (None, bias.to(dtype)):
                y = kernels.linear_without_gradient(x.to(dtype), a, b)
                expected = F.linear(x.to(dtype).double(), weight.to(dtype).double(), None if b is None else b.double())
                assert y.shape == expected.shape and y.dtype == dtype and y.is_contiguous()
                torch.testing.assert_close(
                    y.double(),
                    expected,
                    rtol=1e-5 if dtype == torch.float32 else 1e-2,
                    atol=1e-4 if dtype == torch.float32 else 1e-1,
                )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_and_its_gradients(dtype: torch.dtype, on_each_processor: None) -> None:
    """Test inputs with two and three dimensions, with and without bias, and the gradient of only the weight. The
    product with 2,200 rows is computed in several parts."""
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    for shape in ((7, 48), (1100, 2, 48)):
        given = [torch.randn(size).to(dtype).requires_grad_() for size in (shape, (32, 48), (32,))]
        exact = [t.detach().double().requires_grad_() for t in given]
        dy = torch.randn(*shape[:-1], 32).to(dtype)
        for arguments, of in ((3, (0, 1, 2)), (2, (0, 1)), (3, (1,))):
            bias = given[2] if arguments == 3 else None
            y, expected = linear(given[0], given[1], bias), F.linear(*exact[:arguments])
            gradients = torch.autograd.grad(y, [given[i] for i in of], dy)
            wanted = torch.autograd.grad(expected, [exact[i] for i in of], dy.double())
            for got, want in ((y, expected), *zip(gradients, wanted, strict=True)):
                assert got.dtype == dtype and (got.double() - want).norm() <= bound * want.norm()


@pytest.mark.parametrize("count", [1, 4, 5, 9])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_a_sum_of_products_equals_the_formula(dtype: torch.dtype, bound: float, count: int) -> None:
    torch.manual_seed(count)
    pairs = [(torch.randn(50, 7).to(dtype), torch.randn(50, 5).to(dtype)) for _ in range(count)]
    total = kernel.MatmulAccumulator()
    for a, b in pairs:
        total.add(a, b)
    expected = torch.stack([a.double().t() @ b.double() for a, b in pairs]).sum(dim=0)
    assert (total.total().double() - expected).norm() <= bound * expected.norm()
    whole_sum = dtype if count <= (kernel.products_at_once(dtype, "cpu") or count) else torch.float32
    assert total.total().dtype == whole_sum
    assert kernel.products_at_once(dtype, "cuda") == (None if dtype == torch.float32 else 1), (
        "a GPU never rounds the sum"
    )


@pytest.mark.parametrize(
    "limit, left",
    {"": True, "ALL": True, "default": True, "AVX512_CORE_AMX": True, "AVX512_CORE": False, "avx2": False}.items(),
)
def test_amx(limit: str, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONEDNN_MAX_CPU_ISA and DNNL_MAX_CPU_ISA can each disable AMX. An empty variable has no effect."""
    for name, other in itertools.permutations(("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")):
        monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, limit)
        for there in (True, False):
            monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda there=there: there)
            assert cpu_features._has_amx() is (there and left)
