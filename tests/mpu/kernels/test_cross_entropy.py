"""The softmax of a shard, a few rows at a time, and a sum of products that is rounded seldom, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.gpt2.extensions.exact.cross_entropy import shard_of_part, softmax_in_parts
from megatron.gpt2.extensions.exact.sums import Parts
from mpu.kernels import cross_entropy as kernel

TOKENS, COLUMNS, VOCAB = 37, 24, 21


def with_a_second_rank(local: Tensor) -> Tensor:
    """As if a second rank held columns whose peak is 1, whose exponentials sum to 3, and no target."""
    peak = local[0].clamp_min(1)
    total = local[1] * (local[0] - peak).exp() + 3 * (1 - peak).exp()
    return torch.stack((peak, total, local[2]))


@pytest.mark.parametrize("combine", [None, with_a_second_rank])
@pytest.mark.parametrize("rows", [1, 10, 37, 1000])
def test_equals_the_plain_lines(
    rows: int, combine: Callable[[Tensor], Tensor] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "rows_in_cache", lambda columns: rows)
    torch.manual_seed(0)
    logits, weight = 3 * torch.randn(TOKENS, COLUMNS), torch.rand(TOKENS)
    shard = shard_of_part(torch.randint(0, VOCAB, (TOKENS,)), 0, COLUMNS, VOCAB)
    double = logits.double()
    local = shard.exponentials(double)
    expected = local if combine is None else combine(local)
    d_expected = shard.d_logits(double, local, expected, weight.double())
    assert d_expected[:, VOCAB:].abs().max() == 0 < d_expected.abs().max()
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        x = logits.to(dtype, copy=True)
        without = kernel.vocab_parallel_softmax(x, shard, None, combine)
        assert torch.equal(x, logits.to(dtype)), "without weights the logits are not touched"
        whole = kernel.vocab_parallel_softmax(x, shard, weight, combine)
        assert torch.equal(whole, without) and whole.dtype == torch.float32
        assert (whole - expected).norm() <= bound * expected.norm()
        assert (x - d_expected).norm() <= bound * d_expected.norm()


def test_parts_of_a_vocabulary_are_its_whole() -> None:
    """Two parts on one rank, the second with the padding, give what one part gives."""
    torch.manual_seed(0)
    logits, weight = 3 * torch.randn(TOKENS, COLUMNS), torch.rand(TOKENS)
    target = torch.randint(0, VOCAB, (TOKENS,))
    shard = shard_of_part(target, 0, COLUMNS, VOCAB)
    whole = kernel.vocab_parallel_softmax(once := logits.clone(), shard, weight, None)
    halves = [shard_of_part(target, number, COLUMNS // 2, VOCAB) for number in range(2)]
    parts = [part.contiguous() for part in logits.chunk(2, dim=1)]
    found = softmax_in_parts(parts, halves, weight, Parts(2, None))
    assert torch.equal(found[0], whole[0]) and torch.allclose(found, whole, rtol=1e-6)
    assert torch.allclose(torch.cat(parts, dim=1), once, atol=1e-7)


def test_the_rows_fit_the_cache() -> None:
    """0.75 MB of float32 for each core, and one row at least."""
    cores = torch.get_num_threads()
    assert kernel.rows_in_cache(50304) == max(cores * 786432 // 4 // 50304, 1)
    assert kernel.rows_in_cache(100) * 100 * 4 <= cores * 786432 and kernel.rows_in_cache(10**9) == 1


@pytest.mark.parametrize("count", [1, 4, 5, 9])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_a_sum_of_products_equals_the_formula(dtype: torch.dtype, bound: float, count: int) -> None:
    torch.manual_seed(count)
    pairs = [(torch.randn(50, 7).to(dtype), torch.randn(50, 5).to(dtype)) for _ in range(count)]
    total = kernel.SumOfProducts()
    for a, b in pairs:
        total.add(a, b)
    expected = torch.stack([a.double().t() @ b.double() for a, b in pairs]).sum(dim=0)
    assert (total.total().double() - expected).norm() <= bound * expected.norm()
    whole_sum = dtype if count <= (kernel.products_at_once(dtype, "cpu") or count) else torch.float32
    assert total.total().dtype == whole_sum


def test_a_gpu_rounds_no_sum() -> None:
    assert kernel.products_at_once(torch.bfloat16, "cuda") == 1
    assert kernel.products_at_once(torch.float32, "cuda") is None
