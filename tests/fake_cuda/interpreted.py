"""Triton kernels compute the values of their references. Triton's interpreter runs the kernels with NumPy on CPU
tensors. The interpreter must be enabled before Triton is imported, so `test_kernels.py` runs this file in a separate
process:

    FAKE_CUDA=1 TRITON_INTERPRET=1 python -m pytest tests/fake_cuda/interpreted.py
"""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mpu
from mpu import kernels
from mpu.cross_entropy import loss_from_stats, vocab_parallel_targets
from mpu.kernels.optimizer import adamw_, add_grads_, sum_of_squares
from mpu.kernels.triton_kernel import TritonKernel, example_tensor
from tests.mpu.kernels import test_layer
from tests.mpu.kernels.test_triton_kernel import KERNELS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ULP = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}


@pytest.fixture(autouse=True)
def fixed_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix two faults of Triton's interpreter: it multiplies the bits of bf16 numbers like integers, and Triton 3.6
    converts an array to an index in a way that numpy 2.4 refuses."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    dot, patch_tensor = interpreter.InterpreterBuilder.create_dot, interpreter._patch_lang_tensor

    def create_dot(builder: Any, *operands: Any) -> Any:
        factors = (builder.create_fp_ext(x, interpreter.tl.float32) for x in operands[:2])
        return dot(builder, *factors, *operands[2:])

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda x: x.handle.data.item())

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)


@pytest.fixture
def triton_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the code of CUDA tensors with CPU tensors, in Triton's interpreter."""
    monkeypatch.setattr(TritonKernel, "__call__", TritonKernel.run)
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda x: False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_its_own_check_finds_nothing(kernel: TritonKernel[Any, Any], dtype: torch.dtype):
    assert kernel.compare(torch.device("cpu"), dtype) == ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns, width", {1: 2, 257: 384, 4096: 4096, 5000: 8200}.items())
@pytest.mark.parametrize("shards", [1, 2])
def test_the_loss_and_its_gradient_equal_float64(
    triton_on_cpu: None, shards: int, columns: int, width: int, dtype: torch.dtype
):
    """Test one rank, and two ranks whose statistics are combined. With 257 columns
    of 384, the second rank has only padding."""
    logits = (4 * torch.randn(5, width)).to(dtype)
    target, weight = torch.randint(0, columns, (5,)), torch.rand(5)
    exact = logits[:, :columns].double().requires_grad_()
    losses = F.cross_entropy(exact, target, reduction="none")
    (losses * weight).sum().backward()

    parts = [part.contiguous() for part in logits.chunk(shards, dim=1)]
    targets = [vocab_parallel_targets(target, number, width // shards, columns) for number in range(shards)]
    own = [kernels.vocab_parallel_softmax(part, of, None, None) for part, of in zip(parts, targets, strict=True)]
    assert torch.equal(torch.cat(parts, dim=1), logits), "without a gradient the logits stay"
    combine = None if shards == 1 else lambda _: combined(torch.stack(own))
    for part, of in zip(parts, targets, strict=True):
        stats = kernels.vocab_parallel_softmax(part, of, weight, combine)
        torch.testing.assert_close(loss_from_stats(stats).double(), losses.detach(), rtol=1e-5, atol=1e-5)
    error = (torch.cat(parts, dim=1).double() - F.pad(exact.grad, (0, width - columns))).abs()
    assert (error <= F.pad(exact.grad.abs(), (0, width - columns)) * ULP[dtype] + 1e-6).all()


def combined(stats: Tensor) -> Tensor:
    """[ranks, 3, c] -> [3, c], the statistics of the whole vocabulary."""
    largest, total, target_logit = stats.unbind(1)
    whole = largest.amax(dim=0)
    return torch.stack((whole, (total * (largest - whole).exp()).sum(dim=0), target_logit.sum(dim=0)))


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
    config = mpu.TransformerConfig(h, heads, 2 * h + 8, hidden_dropout=dropout, gelu="erf" if dropout else "tanh")
    plain, fused = (layer.to(dtype) for layer in test_layer.build_layers(config))
    x = example_tensor(dtype, 7, 3, h)
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
