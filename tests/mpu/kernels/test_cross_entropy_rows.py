"""The loss of a chunk, row by row in a CPU's cache, against the plain lines of the dispatch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.gpt2.extensions.exact.cross_entropy import ExactVocabSums
from megatron.gpt2.extensions.exact.sums import Parts
from mpu.cross_entropy import VocabSums
from mpu.kernels import cross_entropy_rows as kernel

TOKENS, COLUMNS, VOCAB = 37, 24, 21


class BesideAnotherRank(VocabSums):
    """As if another rank held columns whose peak is 1, whose exponentials sum to 3, and no target."""

    is_local = False  # type: ignore[assignment]

    def gathered(self, local: Tensor) -> Tensor:
        theirs = torch.stack([torch.full_like(local[0], number) for number in (1, 3, 0)])
        return torch.stack([local, theirs])


@pytest.mark.parametrize("sums", [VocabSums(COLUMNS, None, VOCAB), BesideAnotherRank(COLUMNS, None, VOCAB)])
@pytest.mark.parametrize("rows", [1, 10, 37, 1000])
def test_equals_the_plain_lines(rows: int, sums: VocabSums, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "rows_in_cache", lambda columns: rows)
    torch.manual_seed(0)
    logits, weight = 3 * torch.randn(TOKENS, COLUMNS), torch.rand(TOKENS)
    shard = sums.shard(torch.randint(0, VOCAB, (TOKENS,)))
    double = logits.double().unsqueeze(1)
    local = shard.exponentials(double)
    expected = sums.whole(local if sums.is_local else sums.gathered(local))
    d_expected = shard.d_logits(double, local, expected, weight.double()).squeeze(1)
    assert d_expected[:, VOCAB:].abs().max() == 0 < d_expected.abs().max()
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        x = logits.to(dtype, copy=True)
        without = kernel.softmax_in_rows([x], shard, None, sums)
        assert torch.equal(x, logits.to(dtype)), "without weights the logits are not touched"
        whole = kernel.softmax_in_rows([x], shard, weight, sums)
        assert torch.equal(whole, without) and whole.dtype == torch.float32
        assert (whole - expected).norm() <= bound * expected.norm()
        assert (x - d_expected).norm() <= bound * d_expected.norm()


def test_parts_of_a_vocabulary_are_its_whole() -> None:
    """Two parts on one rank, the second with the padding, give what one part gives."""
    torch.manual_seed(0)
    logits, weight = 3 * torch.randn(TOKENS, COLUMNS), torch.rand(TOKENS)
    target = torch.randint(0, VOCAB, (TOKENS,))
    sums = VocabSums(COLUMNS, None, VOCAB)
    whole = kernel.softmax_in_rows([once := logits.clone()], sums.shard(target), weight, sums)
    halves = ExactVocabSums(COLUMNS, Parts(2, None), VOCAB, sequence_parallel=False)
    parts = [part.contiguous() for part in logits.chunk(2, dim=1)]
    found = kernel.softmax_in_rows(parts, halves.shard(target), weight, halves)
    assert torch.equal(found[0], whole[0]) and torch.allclose(found, whole, rtol=1e-6)
    assert torch.allclose(torch.cat(parts, dim=1), once, atol=1e-7)


def test_the_rows_fit_the_cache() -> None:
    """0.75 MB of float32 for each core, and one row at least."""
    cores = torch.get_num_threads()
    assert kernel.rows_in_cache(50304) == max(cores * 786432 // 4 // 50304, 1)
    assert kernel.rows_in_cache(100) * 100 * 4 <= cores * 786432 and kernel.rows_in_cache(10**9) == 1
