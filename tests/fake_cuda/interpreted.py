"""Triton kernels compute the values of their references. Triton's interpreter runs the kernels with NumPy on CPU
tensors. The interpreter must be enabled before Triton is imported, so `test_kernels.py` runs this file in a separate
process:

    FAKE_CUDA=1 TRITON_INTERPRET=1 python -m pytest tests/fake_cuda/interpreted.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import mpu
from mpu import kernels
from mpu.kernels.optimizer import adamw_, add_grads_, sum_of_squares
from mpu.kernels.triton_kernel import TritonKernel, example_tensor
from tests.mpu.kernels import test_layer
from tests.mpu.kernels.test_triton_kernel import KERNELS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ULP = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_its_own_check_finds_nothing(kernel: TritonKernel[Any, Any], dtype: torch.dtype):
    assert kernel.compare(torch.device("cpu"), dtype) == ""


def add_one(stats: Tensor) -> Tensor:
    return stats + 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns, combine", [(257, None), (5000, None), (0, add_one), (5000, add_one)])
def test_the_loss_and_its_gradient_equal_those_of_a_cpu(
    columns: int, combine: Callable[[Tensor], Tensor] | None, dtype: torch.dtype
):
    """With 0 columns the rank has only padding. `add_one` replaces the function that combines the statistics of all
    ranks."""
    logits, weight = (4 * torch.randn(5, columns + 127)).to(dtype), torch.rand(5)
    targets = kernels.VocabParallelTargets(columns, torch.randint(0, columns + 1, (5,)), torch.arange(5) < columns)
    for token_weight in (None, weight):
        found = []
        for is_cpu in (True, False):
            x = logits.clone()
            with (
                mock.patch.object(Tensor, "is_cpu", mock.PropertyMock(return_value=is_cpu)),
                mock.patch.object(TritonKernel, "__call__", TritonKernel.run),
            ):
                found.append((kernels.vocab_parallel_softmax(x, targets, token_weight, combine), x))
        torch.testing.assert_close(*found, rtol=2 * ULP[dtype], atol=1e-6)
    assert torch.equal(x, logits) == (token_weight is None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", ["kernel", "reference"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_torch_accepts_the_operator(
    kernel: TritonKernel[Any, Any], implementation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """An operator's results do not alias each other, its fake results have the right shapes, and its schema names the
    arguments that it writes, except the gradients that AdamW may overwrite."""
    tests = ("test_faketensor",) if kernel is adamw_ else ("test_faketensor", "test_schema")
    monkeypatch.setitem(kernel.operator._backend_fns, None, getattr(kernel, implementation))
    for example in kernel.examples(dtype):
        torch.library.opcheck(kernel.operator, example, test_utils=tests)


# --- a layer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("h, heads, dtype", list(zip((40, 150, 600), (4, 3, 5), DTYPES, strict=True)))
def test_a_layer_is_as_exact_as_the_plain_layer(h: int, heads: int, dtype: torch.dtype, dropout: float):
    """Compare the output and the gradients of two layers with the results of two plain layers in float64."""
    mpu.initialize_model_parallel(1)
    config = mpu.TransformerConfig(h, heads, 2 * h + 1, hidden_dropout=dropout, gelu="erf" if dropout else "tanh")
    plain, fused = (layer.to(dtype) for layer in test_layer.build_layers(config))
    x = torch.randn(7, 3, h).to(dtype)
    seeds = mpu.make_dropout_seeds(5, torch.arange(3), 2) if dropout else None
    with test_layer.fused_on_a_cpu(), mock.patch.object(TritonKernel, "__call__", TritonKernel.run):
        of_kernels = test_layer.results(fused, x, seeds)
    of_torch = test_layer.results(plain, x, seeds)
    plain.zero_grad()
    exact = test_layer.results(plain.double(), x.double(), seeds)
    errors = [test_layer.greatest_difference(exact, found) for found in (of_kernels, of_torch)]
    assert errors[0] < 1.5 * errors[1] < 20 * torch.finfo(dtype).eps


# --- the optimizer ----------------------------------------------------------------------------------------------------


def test_adamw_writes_only_into_its_tensors():
    """Run three steps with tensors of odd sizes, which are parts of one buffer. The second step has a gradient that is
    not finite."""
    found, updates = [], list[Any]((adamw_.run, adamw_.reference))
    for update in updates:
        buffers = [example_tensor(torch.float32, 20_129).abs() for _ in range(5)]
        parts = [[buffer[:7], buffer[64:128], buffer[128:]] for buffer in buffers]
        steps = [torch.tensor(2.0) for _ in range(3)]
        for found_inf in (0.0, 1.0, 0.0):
            scalars = [torch.tensor(value) for value in (1e-2, 0.5, found_inf)]
            master, grad, *moments, param = parts
            update(master, [x.clone() for x in grad], *moments, steps, param, *scalars, 0.9, 0.95, 1e-8, 0.1)
        found.append([*buffers, torch.stack(steps)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_lists_at_other_distances_are_for_the_reference():
    """The distance between the tensors of a list is not a multiple of 16 elements."""
    tensors = torch.randn(70_000).split([5, 69_995])
    assert sum_of_squares.kernel(tensors) is NotImplemented
    assert add_grads_.kernel(tensors, tensors, True) is NotImplemented
