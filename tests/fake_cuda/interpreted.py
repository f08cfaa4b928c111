"""Triton kernels compute the values of their references. Triton's interpreter runs them with NumPy on CPU tensors. It
must be enabled before Triton is imported, so `test_kernels.py` runs this file in a process of its own:

    FAKE_CUDA=1 TRITON_INTERPRET=1 python -m pytest tests/fake_cuda/interpreted.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mpu
from mpu.kernels.dropout import DROPOUT
from mpu.kernels.triton_kernel import TritonKernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNELS: list[TritonKernel[Any, Any]] = [DROPOUT]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_its_own_check_finds_nothing(kernel: TritonKernel[Any, Any], dtype: torch.dtype):
    assert kernel.compare(torch.device("cpu"), dtype) == ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("h", [96, 100, 1500])
def test_dropout_drops_what_the_cpu_drops(h: int, dtype: torch.dtype):
    x = torch.randn(5, 3, h).to(dtype)
    seeds = mpu.make_dropout_seeds(2**31 - 5, 2**40 + torch.arange(3), 4)[3]
    here, there = (of(x, 0.3, seeds, 2, 7) for of in (DROPOUT.reference, DROPOUT.kernel))
    assert torch.equal(here == 0, there == 0) and 0.2 < (here == 0).float().mean() < 0.4
    assert torch.allclose(here.float(), there.float(), rtol=2**-7 if dtype == torch.bfloat16 else 2**-10)
