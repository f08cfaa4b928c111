"""Triton kernels compute the values of their references. Triton's interpreter runs the kernels with NumPy on CPU
tensors. The interpreter must be enabled before Triton is imported, so `test_kernels.py` runs this file in a separate
process:

    FAKE_CUDA=1 TRITON_INTERPRET=1 python -m pytest tests/fake_cuda/interpreted.py
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import mpu
from mpu import kernels
from mpu.cross_entropy import loss_from_stats, vocab_parallel_targets
from mpu.kernels.optimizer import adamw_, add_grads_, sum_of_squares
from mpu.kernels.triton_kernel import TritonKernel
from tests.mpu.kernels import test_layer
from tests.mpu.kernels.test_triton_kernel import KERNELS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ULP = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}


@pytest.fixture
def triton_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the code of CUDA tensors with CPU tensors, in Triton's interpreter."""
    monkeypatch.setattr(TritonKernel, "__call__", TritonKernel.run)
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda x: False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_its_own_check_finds_nothing(kernel: TritonKernel[Any, Any], dtype: torch.dtype):
    assert kernel.compare(torch.device("cpu"), dtype) == ""


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_its_own_check_finds_a_wrong_value_in_each_result(
    kernel: TritonKernel[Any, Any], monkeypatch: pytest.MonkeyPatch
):
    right, device = kernel.kernel, torch.device("cpu")
    for index in range(len(kernel._results(right, next(iter(kernel.examples(torch.bfloat16))), device))):

        def wrong(*args: Any, index: int = index) -> Any:
            made = right(*args)
            written = [args[number] for number in kernel.written]
            result = [x for x in tree_leaves((made, written)) if isinstance(x, Tensor) and x.numel()][index:]
            if result:
                result[0].view(-1)[-1] += 0.1 * result[0].abs().max()
            return made

        monkeypatch.setattr(kernel, "kernel", wrong)
        assert "differs from its reference" in kernel.compare(device, torch.bfloat16)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", ["kernel", "reference"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_torch_accepts_the_operator(
    kernel: TritonKernel[Any, Any], implementation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """An operator's results do not alias each other, its fake results have the right shapes, and its schema names the
    arguments that it writes, except the gradients that AdamW may overwrite."""
    tests = ("test_faketensor",) if kernel is adamw_ else ("test_faketensor", "test_schema")
    monkeypatch.setattr(kernel, "_chosen", {dtype: getattr(kernel, implementation)})
    for example in kernel.examples(dtype):
        torch.library.opcheck(kernel.operator, example, test_utils=tests)


def combined(stats: Tensor) -> Tensor:
    """[ranks, 3, c] -> [3, c], the statistics of the whole vocabulary."""
    largest, total, target_logit = stats.unbind(1)
    whole = largest.amax(dim=0)
    return torch.stack((whole, (total * (largest - whole).exp()).sum(dim=0), target_logit.sum(dim=0)))


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


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_adamw_equals_float64(triton_on_cpu: None, dtype: torch.dtype | None):
    """Run three steps with a loss scale, and skip the second step. The tensors have odd sizes and are parts of one
    buffer."""
    sizes, places = (7, 64, 20_001), (0, 64, 128)
    length = places[-1] + sizes[-1]
    beta1, beta2, eps, decay, rate = 0.9, 0.95, 1e-8, 0.1, 1e-2

    def parts(whole: Tensor) -> list[Tensor]:
        return [whole[place : place + size] for place, size in zip(places, sizes, strict=True)]

    master, grad, m, v = torch.randn(length), torch.zeros(length), torch.zeros(length), torch.zeros(length)
    params = torch.full((length,), 5.0, dtype=dtype) if dtype else None
    steps = list(torch.zeros(len(sizes)).unbind())
    w, exact_m, exact_v, updates = master.double(), m.double(), v.double(), 0
    for skipped in (0.0, 1.0, 0.0):
        grad.copy_(1e-4 * torch.randn(length))
        of_params = parts(params) if params is not None else []
        scalars: list[Any] = [torch.tensor(number) for number in (rate, 0.5, skipped)]
        given: list[Any] = [*(parts(x) for x in (master, grad, m, v)), steps, of_params, *scalars]
        adamw_(*[*given, beta1, beta2, eps, decay])
        if not skipped:
            updates += 1
            g = grad.double() / 0.5
            exact_m, exact_v = beta1 * exact_m + (1 - beta1) * g, beta2 * exact_v + (1 - beta2) * g * g
            denominator = (exact_v / (1 - beta2**updates)).sqrt() + eps
            w = w * (1 - rate * decay) - rate / (1 - beta1**updates) * exact_m / denominator
    assert [step.item() for step in steps] == [2.0] * len(sizes)
    for found, exact in zip(parts(master), parts(w), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    if params is not None:
        for param, exact in zip(
            parts(params), parts(master), strict=True
        ):  # Triton's interpreter does not round to bf16 as torch does.
            torch.testing.assert_close(param.float(), exact, rtol=ULP[dtype], atol=1e-6)
        assert (params[7:64] == 5).all(), "nothing is written between the tensors"


def test_sums_of_many_tensors_equal_float64(triton_on_cpu: None):
    """The kernel does not support the addresses of the second list of tensors, which the reference computes."""
    whole = torch.randn(70_000)
    for starts in ((0, 64, 33_008), (0, 5, 33_001)):
        tensors = [whole[start:stop] for start, stop in zip(starts, (*starts[1:], 70_000), strict=True)]
        exact = whole.double().square().sum()
        torch.testing.assert_close(sum_of_squares(tensors).double(), exact, rtol=1e-6, atol=0)
        totals, grads = [x.clone() for x in tensors], [x.bfloat16() for x in tensors]
        add_grads_(totals, grads, True)
        assert all(torch.equal(t, x + g.float()) for t, x, g in zip(totals, tensors, grads, strict=True))
