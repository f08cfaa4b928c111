from __future__ import annotations

import weakref
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mpu
from tests.distributed import run_ranks

VOCAB, PADDED, HIDDEN, TOKENS = 21, 32, 8, 50  # With 4 ranks, the last rank has only padding.


def check(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(world_size)
    torch.manual_seed(0)
    weight = torch.zeros(PADDED, HIDDEN)
    weight[:VOCAB] = torch.randn(VOCAB, HIDDEN)
    hidden, target = 3 * torch.randn(TOKENS, HIDDEN), torch.randint(0, VOCAB, (TOKENS,))
    token_weight = torch.rand(TOKENS)
    own = slice(rank * PADDED // world_size, (rank + 1) * PADDED // world_size)

    # The expected loss is the plain formula, in float64.
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = h @ w[:VOCAB].t()
    logits.retain_grad()
    losses = F.cross_entropy(logits, target, reduction="none")
    (losses * token_weight).sum().backward()

    mine = (hidden @ weight[own].t()).requires_grad_()
    got = mpu.vocab_parallel_cross_entropy(mine, target, vocab_size=VOCAB)
    torch.testing.assert_close(got.double(), losses, rtol=1e-5, atol=1e-5)
    (got * token_weight).sum().backward()
    d_logits = F.pad(logits.grad, (0, PADDED - VOCAB))[:, own].float()
    torch.testing.assert_close(mine.grad, d_logits, rtol=1e-5, atol=1e-6)

    # Without vocab_size no column is masked, as in Megatron's first release.
    unmasked = F.cross_entropy(hidden @ weight.t(), target, reduction="none")
    torch.testing.assert_close(mpu.vocab_parallel_cross_entropy(mine.detach(), target), unmasked, rtol=1e-5, atol=1e-5)

    # rows: the number of rows of logits that are in float32 at a time.
    for chunk, rows in ((TOKENS, TOKENS), (16, TOKENS), (16, 3)):
        h2, w2 = hidden.clone().requires_grad_(), weight[own].clone().requires_grad_()
        with mock.patch("mpu.kernels.cross_entropy.rows_in_cache", return_value=rows):
            loss = mpu.vocab_parallel_linear_cross_entropy(
                h2, w2, target, token_weight, vocab_size=VOCAB, chunk_size=chunk
            )
        (3 * loss).backward()
        torch.testing.assert_close(loss.double(), (losses * token_weight).sum(), rtol=1e-6, atol=0)
        for grad, expected in ((h2.grad, 3 * h.grad), (w2.grad, 3 * w.grad[own])):
            error = (grad.double() - expected).norm()
            assert error <= 1e-6 * 3 * w.grad.norm() + 1e-6 * expected.norm(), (chunk, error)
    padding = slice(max(VOCAB - own.start, 0), None)
    assert not w2.grad[padding].any(), "padding rows got a gradient"

    # Under torch.autocast the products are in bf16, and the gradients of float32 weights in float32.
    h3, w3 = hidden.clone().requires_grad_(), weight[own].clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = mpu.vocab_parallel_linear_cross_entropy(h3, w3, target, token_weight, vocab_size=VOCAB, chunk_size=16)
        assert torch.equal(mpu.vocab_parallel_cross_entropy(mine, target, vocab_size=VOCAB), got)
    loss.backward()
    torch.testing.assert_close(loss.double(), (losses * token_weight).sum(), rtol=1e-2, atol=0)
    for grad, expected in ((h3.grad, h.grad), (w3.grad, w.grad[own])):
        assert grad.dtype == torch.float32 and (grad.double() - expected).norm() <= 2e-2 * w.grad.norm()

    # Padding columns are not valid targets.
    wrong = target.index_fill(0, torch.tensor([7]), VOCAB)
    with pytest.raises(IndexError, match=f"^the target {VOCAB} is not in the vocabulary, 0 to {VOCAB - 1}"):
        mpu.vocab_parallel_cross_entropy(mine, wrong, vocab_size=VOCAB)
    with pytest.raises(IndexError, match=f"^the target {VOCAB} is not in the vocabulary"):
        mpu.vocab_parallel_linear_cross_entropy(h3, w3, wrong, token_weight, vocab_size=VOCAB)

    # Very large logits do not overflow.
    big = mpu.vocab_parallel_cross_entropy(1e4 * mine.detach(), target, vocab_size=VOCAB)
    assert torch.isfinite(big).all()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_the_plain_formula(world_size: int):
    run_ranks(check, world_size)


def test_fp16_keeps_small_gradients_when_scaled_first():
    """token_weight applies the loss scale before the gradient is rounded, so no gradient that fp32 can hold becomes
    0."""
    mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 16).half(), torch.randn(512, 16).half()
    target, tokens = torch.randint(0, 512, (64,)), torch.full((64,), 1e-6)
    scale = 2.0**20

    def grads(dtype: torch.dtype, token_weight: torch.Tensor) -> torch.Tensor:
        h, w = (x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight))
        mpu.vocab_parallel_linear_cross_entropy(h, w, target, token_weight, vocab_size=512).backward()
        return w.grad.float()

    visible = grads(torch.float32, tokens).abs() > 2.0**-24 / scale  # fp16's smallest number, divided by the scale
    assert grads(torch.float16, tokens * scale)[visible].all()
    assert not grads(torch.float16, tokens)[visible].all(), "without scaling some gradients must become 0"


class MemoryCounter(TorchDispatchMode):
    """Inside this context, counts the calls of each operator, and the current and peak bytes of the storages that
    operators allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.calls: Counter[str] = Counter()
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and id_of(x) not in before | self._seen:
                self._seen.add(id_of(x))
                size = x.untyped_storage().nbytes()
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(x.untyped_storage(), self._forget, id_of(x), size)
        return out

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def id_of(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_are_never_all_in_memory(dtype: torch.dtype) -> None:
    """With 8,192 tokens, memory holds the gradients of hidden states and weight, and a tenth of the float32 logits."""
    mpu.initialize_model_parallel(1)
    tokens, vocab, size = 8192, 4096, 64
    hidden = torch.randn(tokens, size, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, size, dtype=dtype, requires_grad=True)
    target, token_weight = torch.randint(0, vocab, (tokens,)), torch.full((tokens,), 1 / tokens)
    with MemoryCounter() as counter:
        mpu.vocab_parallel_linear_cross_entropy(hidden, weight, target, token_weight, vocab_size=vocab).backward()
    gradients = hidden.nbytes + 4 * weight.numel()  # The weight's gradient is summed in float32.
    extra = (counter.peak - gradients) / (4 * tokens * vocab)
    assert 1 / 40 < extra <= 1 / 10, f"{extra:.1%} of the logits"

    with torch.no_grad(), MemoryCounter() as evaluation:
        mpu.vocab_parallel_linear_cross_entropy(hidden, weight, target, token_weight, vocab_size=vocab)
    assert evaluation.peak <= counter.peak - gradients, "an evaluation allocates no gradient"
    assert 3 * evaluation.calls["mm"] <= counter.calls["mm"] + counter.calls["addmm_"]
