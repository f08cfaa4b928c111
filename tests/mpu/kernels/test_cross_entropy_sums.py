"""A sum of products that is rounded seldom, against float64."""

from __future__ import annotations

import pytest
import torch

from mpu.kernels.cross_entropy_sums import SumOfProducts, products_at_once


@pytest.mark.parametrize("count", [1, 4, 5, 9])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_equals_the_formula(dtype: torch.dtype, bound: float, count: int) -> None:
    torch.manual_seed(count)
    pairs = [(torch.randn(50, 7).to(dtype), torch.randn(50, 5).to(dtype)) for _ in range(count)]
    total = SumOfProducts()
    for a, b in pairs:
        total.add(a, b)
    expected = torch.stack([a.double().t() @ b.double() for a, b in pairs]).sum(dim=0)
    assert (total.total().double() - expected).norm() <= bound * expected.norm()
    whole_sum = dtype if count <= (products_at_once(dtype, "cpu") or count) else torch.float32
    assert total.total().dtype == whole_sum


def test_a_gpu_rounds_no_sum() -> None:
    assert products_at_once(torch.bfloat16, "cuda") == 1 and products_at_once(torch.float32, "cuda") is None
