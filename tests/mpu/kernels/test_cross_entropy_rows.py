"""The loss of a chunk, row by row in a CPU's cache, against the plain lines of the dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mpu.cross_entropy import _VocabShard
from mpu.kernels import cross_entropy_rows as kernel

TOKENS, COLUMNS, VOCAB = 37, 24, 21


def plain(logits: Tensor, shard: _VocabShard, weight: Tensor, over_ranks: Any) -> tuple[Tensor, Tensor]:
    x = logits.double()
    local = shard.exponentials(x)
    whole = over_ranks(local) if over_ranks else local
    return whole, shard.d_logits(x, local, whole, weight.double())


def another_rank(local: Tensor) -> Tensor:
    """As if another rank held columns whose peak is 1, whose exponentials sum to 3, and no target."""
    peak = local[0].clamp_min(1)
    total = local[1] * (local[0] - peak).exp() + 3 * (1 - peak).exp()
    return torch.stack((peak, total, local[2]))


@pytest.mark.parametrize("over_ranks", [None, another_rank])
@pytest.mark.parametrize("rows", [1, 10, 37, 1000])
def test_equals_the_plain_lines(rows: int, over_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "rows_in_cache", lambda columns: rows)
    torch.manual_seed(0)
    logits, weight = 3 * torch.randn(TOKENS, COLUMNS), torch.rand(TOKENS)
    shard = _VocabShard.of(torch.randint(0, VOCAB, (TOKENS,)), COLUMNS, 0, VOCAB)
    expected, d_expected = plain(logits, shard, weight, over_ranks)
    assert d_expected[:, VOCAB:].abs().max() == 0 < d_expected.abs().max()
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        x = logits.to(dtype, copy=True)
        without = kernel.softmax_in_rows(x, shard, None, over_ranks)
        assert torch.equal(x, logits.to(dtype)), "without weights the logits are not touched"
        whole = kernel.softmax_in_rows(x, shard, weight, over_ranks)
        assert torch.equal(whole, without) and whole.dtype == torch.float32
        assert (whole - expected).norm() <= bound * expected.norm()
        assert (x - d_expected).norm() <= bound * d_expected.norm()


def test_the_rows_fit_the_cache() -> None:
    """0.75 MB of float32 for each core, and one row at least."""
    cores = torch.get_num_threads()
    assert kernel.rows_in_cache(50304) == max(cores * 786432 // 4 // 50304, 1)
    assert kernel.rows_in_cache(100) * 100 * 4 <= cores * 786432 and kernel.rows_in_cache(10**9) == 1
