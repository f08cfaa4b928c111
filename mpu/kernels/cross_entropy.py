"""Softmax and cross-entropy over a rank's columns of the vocabulary: a few rows at a time on a CPU, in one pass on a
GPU. `MatmulAccumulator` adds the matrix products whose sum is the gradient of the head's weight.

    loss = log Σ exp(logits - max) + max - logits[target]        d logits = softmax(logits) - one-hot(target)

Legend: c tokens of a chunk, v padded vocabulary, tp tensor-parallel size, m rows and n columns of a sum of products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpu.kernels.triton_kernel import Examples, TritonKernel, example_tensor

_ELEMENTS = 3 << 16  # float32 logits that a core keeps at once: 0.75 MB


@dataclass(frozen=True)
class VocabParallelTargets:
    """The targets [...] of the loss, as column numbers of one shard of the vocabulary.

    columns: the shard's number of columns without padding; columns after them are masked.
    target: int64, the column of each target in this shard, 0 if a different shard has it.
    is_local: bool, True if this shard has the target.
    """

    columns: int
    target: Tensor
    is_local: Tensor

    def __getitem__(self, rows: slice) -> VocabParallelTargets:
        return VocabParallelTargets(self.columns, self.target[rows], self.is_local[rows])

    def exp_and_stats(self, logits: Tensor) -> Tensor:
        """Replace the logits [..., v/tp], float32, by exp(logits - max). Return [3, ...]: max, sum of exponentials,
        target's logit."""
        logits[..., self.columns :] = -torch.inf
        target_logit = logits.gather(-1, self.target.unsqueeze(-1)).squeeze(-1)  # [...] -> [..., 1] -> [...]
        target_logit = target_logit.masked_fill(~self.is_local, 0.0)
        # If a shard has only padding, all its logits are -inf. With the clamp, the sum of exponentials is 0 instead of
        # NaN.
        max_logit = logits.amax(dim=-1).clamp_min(torch.finfo(torch.float32).min)
        return torch.stack((max_logit, logits.sub_(max_logit.unsqueeze(-1)).exp_().sum(dim=-1), target_logit))

    def d_logits(self, exp: Tensor, local: Tensor, stats: Tensor, token_weight: Tensor) -> Tensor:
        """token_weight · (softmax - one-hot(target)) [..., v/tp], written over `exp`, the result of `exp_and_stats`.

        local, stats: [3, ...], the statistics of this shard and of the whole vocabulary.
        token_weight: [...].
        """
        factor = (local[0] - stats[0]).exp() / stats[1] * token_weight
        exp.mul_(factor.unsqueeze(-1))
        return exp.scatter_add_(-1, self.target.unsqueeze(-1), (self.is_local * -token_weight).unsqueeze(-1))


def _vocab_statistics(logits: Tensor, target: Tensor, is_local: Tensor, columns: int) -> Tensor:
    """This rank's logits [c, v/tp] -> [3, c] float32, see `exp_and_stats`."""
    return VocabParallelTargets(columns, target, is_local).exp_and_stats(logits.to(torch.float32, copy=True))


def _cross_entropy_gradient_(
    logits: Tensor,
    stats: Tensor,
    target: Tensor,
    is_local: Tensor,
    columns: int,
    token_weight: Tensor,
    find_stats: bool,
) -> None:
    """Overwrite the logits with their gradient.

    stats: [3, c], the statistics of the whole vocabulary. With find_stats, the function writes the statistics, and the
        rank must have the whole vocabulary.
    """
    targets, x = VocabParallelTargets(columns, target, is_local), logits.float()
    local = targets.exp_and_stats(x)
    if find_stats:
        stats.copy_(local)
    logits.copy_(targets.d_logits(x, local, stats, token_weight))


def _examples_of_statistics(dtype: torch.dtype) -> Examples:
    """Yield logits with two blocks of columns, padding columns, and a target that a different shard has."""
    logits = 5 * example_tensor(dtype, 3, 5184)
    logits[:, 5120:5122] = 20.0  # The last column and the first padding column are large.
    yield logits, torch.tensor([0, 5120, 4500]), torch.tensor([False, True, True]), 5121


def _examples_of_gradient(dtype: torch.dtype) -> Examples:
    for logits, *of_targets in _examples_of_statistics(dtype):
        stats = _vocab_statistics(logits, *of_targets)
        for find_stats, of_whole in ((True, torch.zeros_like(stats)), (False, stats + 1)):
            yield logits, of_whole, *of_targets, torch.tensor([0.5, 2.0, 1.0]), find_stats


VOCAB_STATISTICS = TritonKernel(_vocab_statistics, _examples_of_statistics)
CROSS_ENTROPY_GRADIENT = TritonKernel(_cross_entropy_gradient_, _examples_of_gradient, ("logits", "stats"))


def rows_in_cache(columns: int) -> int:
    """Return how many rows of logits a CPU keeps in float32 at once: 0.75 MB for each core, which fit into the core's
    cache. Blocks of this size take half the time of blocks of 512 rows. Time of 128 rows with 0.75, 1.5 and 3 MB, in
    ms: 13, 15 and 18 with AVX-512; 9, 14 and 22 with AVX2."""
    return max(torch.get_num_threads() * _ELEMENTS // columns, 1)


def vocab_parallel_softmax(
    logits: Tensor,
    targets: VocabParallelTargets,
    token_weight: Tensor | None,
    combine: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """This rank's logits [c, v/tp] -> statistics of the whole vocabulary [3, c] float32: largest logit, sum of
    exponentials, target's logit.

    token_weight: [c]; if given, the logits are overwritten with token_weight · (softmax - one-hot(target)).
    combine: computes the statistics of the whole vocabulary from this rank's; None if this rank has the whole
        vocabulary.
    """
    if logits.is_cpu:
        return softmax_by_rows(
            [logits],
            [targets],
            token_weight,
            lambda parts: parts[0] if combine is None else combine(parts[0]),
            rows=rows_in_cache(logits.size(1)),
            by_block=combine is None,
        )
    of_targets = targets.target, targets.is_local, targets.columns
    in_one_pass = combine is None and token_weight is not None
    if in_one_pass:
        stats = logits.new_empty(3, len(logits), dtype=torch.float32)
    else:
        stats = VOCAB_STATISTICS(logits, *of_targets)
        stats = stats if combine is None else combine(stats)
    if token_weight is not None:
        CROSS_ENTROPY_GRADIENT(logits, stats, *of_targets, token_weight, in_one_pass)
    return stats


def softmax_by_rows(
    logits: Sequence[Tensor],
    targets: Sequence[VocabParallelTargets],
    token_weight: Tensor | None,
    combine: Callable[[Tensor], Tensor],
    *,
    rows: int,
    by_block: bool,
) -> Tensor:
    """`vocab_parallel_softmax` for a rank that holds several shards of equal width, `rows` tokens at a time.

    combine: computes [3, c] of the whole vocabulary from this rank's [shards, 3, c].
    by_block: call `combine` for each block of rows, else once for all tokens.
    """
    tokens, columns = logits[0].shape
    count = min(rows, tokens)
    blocks = [slice(first, min(first + count, tokens)) for first in range(0, tokens, count)]
    buffers = [torch.empty(count, columns, dtype=torch.float32, device=part.device) for part in logits]
    local = torch.empty(len(logits), 3, tokens, dtype=torch.float32, device=logits[0].device)
    stats = torch.empty_like(local[0])

    def fill_exp(rows: slice) -> None:
        for part, shard_targets, buffer, shard_stats in zip(logits, targets, buffers, local, strict=True):
            shard_stats[:, rows] = shard_targets[rows].exp_and_stats(buffer[: rows.stop - rows.start].copy_(part[rows]))

    def to_gradient(rows: slice, token_weight: Tensor) -> None:
        for part, shard_targets, buffer, shard_stats in zip(logits, targets, buffers, local, strict=True):
            x = buffer[: rows.stop - rows.start]
            part[rows] = shard_targets[rows].d_logits(x, shard_stats[:, rows], stats[:, rows], token_weight[rows])

    for group in [[block] for block in blocks] if by_block else [blocks]:
        for block in group:
            fill_exp(block)
        group_rows = slice(group[0].start, group[-1].stop)
        stats[:, group_rows] = combine(local[:, :, group_rows])
        if token_weight is not None:
            for block in group:
                if len(group) > 1:
                    # The exponentials are computed again, because all rows in float32 do not fit into the cache.
                    fill_exp(block)
                to_gradient(block, token_weight)
    return stats


def products_at_once(dtype: torch.dtype, device: str) -> int | None:
    """Return how many products are added before their sum is added to a float32 sum. None means all.

    In 16 bits, a CPU adds 4 products directly, which saves passes over the matrix. As each direct addition rounds the
    sum, the relative error in bf16 is 2.7e-3 instead of 2.4e-3.

    device: "cpu" or "cuda".
    """
    if dtype == torch.float32:
        return None
    return 4 if device == "cpu" else 1


class MatmulAccumulator:
    """Σ aᵀb of [c, m] and [c, n]: [m, n], with few passes over the matrix, which has the size of the vocabulary."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._part: Tensor | None = None
        self._products = 0

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add aᵀb.

        a, b: [c, m] and [c, n], in one dtype.
        """
        if self._part is not None and self._products == products_at_once(a.dtype, a.device.type):
            self._sum = self.total().float()
            self._part, self._products = None, 0
        self._part = a.t() @ b if self._part is None else self._part.addmm_(a.t(), b)
        self._products += 1

    def total(self) -> Tensor:
        """Return the sum [m, n], in float32 or in the dtype of the products."""
        assert self._part is not None
        return self._part if self._sum is None else self._sum.add_(self._part)
