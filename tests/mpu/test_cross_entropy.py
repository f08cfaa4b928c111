from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpu
from tests.distributed import run_ranks

VOCAB, PADDED, HIDDEN, TOKENS = 21, 32, 8, 50  # at 4 ranks the last one holds padding alone


def check(rank: int, world_size: int) -> bool:
    mpu.initialize_model_parallel(world_size)
    torch.manual_seed(0)
    weight = torch.zeros(PADDED, HIDDEN)
    weight[:VOCAB] = torch.randn(VOCAB, HIDDEN)
    hidden, target = 3 * torch.randn(TOKENS, HIDDEN), torch.randint(0, VOCAB, (TOKENS,))
    token_weight = torch.rand(TOKENS)
    own = slice(rank * PADDED // world_size, (rank + 1) * PADDED // world_size)

    # The plain formula, in float64.
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

    # Without a true size every column counts, as in 2019.
    everything = F.cross_entropy(hidden @ weight.t(), target, reduction="none")
    torch.testing.assert_close(mpu.vocab_parallel_cross_entropy(mine.detach(), target), everything,
                               rtol=1e-5, atol=1e-5)

    for chunk in (TOKENS, 16):
        h2, w2 = hidden.clone().requires_grad_(), weight[own].clone().requires_grad_()
        loss = mpu.vocab_parallel_linear_cross_entropy(h2, w2, target, token_weight, vocab_size=VOCAB,
                                                       chunk_size=chunk)
        (3 * loss).backward()
        torch.testing.assert_close(loss.double(), (losses * token_weight).sum(), rtol=1e-6, atol=0)
        for grad, expected in ((h2.grad, 3 * h.grad), (w2.grad, 3 * w.grad[own])):
            error = (grad.double() - expected).norm()
            assert error <= 1e-6 * 3 * w.grad.norm() + 1e-6 * expected.norm(), (chunk, error)
    padding = slice(max(VOCAB - own.start, 0), None)
    assert not w2.grad[padding].any(), "padding rows got a gradient"

    # Very large logits neither overflow nor lose the loss.
    big = mpu.vocab_parallel_cross_entropy(1e4 * mine.detach(), target, vocab_size=VOCAB)
    assert torch.isfinite(big).all()
    return True


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_the_plain_formula(world_size: int):
    assert run_ranks(check, world_size) == [True] * world_size


def test_fp16_keeps_small_gradients_when_scaled_first():
    """Weights carry the loss scale into the gradient before it is rounded: nothing that fp32 has is lost."""
    mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 16).half(), torch.randn(512, 16).half()
    target, tokens = torch.randint(0, 512, (64,)), torch.full((64,), 1e-6)
    scale = 2.0**20

    def grads(dtype: torch.dtype, token_weight: torch.Tensor) -> torch.Tensor:
        h, w = (x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight))
        mpu.vocab_parallel_linear_cross_entropy(h, w, target, token_weight, vocab_size=512).backward()
        return w.grad.float()

    exact = grads(torch.float32, tokens)
    scaled = grads(torch.float16, tokens * scale) / scale
    unscaled = grads(torch.float16, tokens)
    visible = exact.abs() > 2.0**-24 / scale  # fp16's smallest number, scaled
    assert (scaled[visible] == 0).sum() == 0
    assert (unscaled[visible] == 0).float().mean() > 0.5, "the test should see the loss that scaling prevents"
