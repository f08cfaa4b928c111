"""The softmax of a rank's columns of the vocabulary, a few rows at a time on a CPU, and the sum of products for the
gradient of the head's weight.

    loss = log Σ exp(logits - peak) + peak - logits[target]        d logits = softmax(logits) - one-hot(target)

Legend: c tokens of a chunk, v padded vocabulary, p model-parallel size, m rows and n columns of a sum of products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ELEMENTS = 3 << 16  # of float32, for each core: 0.75 MB


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns of the vocabulary, and the targets [...] among them.

    columns: without padding; columns after them take no part in the softmax. target: int64, the column of each target
    on this rank, 0 if a different rank holds it. is_here: bool, whether this rank holds it.
    """

    columns: int
    target: Tensor
    is_here: Tensor

    def __getitem__(self, rows: slice) -> VocabShard:
        return VocabShard(self.columns, self.target[rows], self.is_here[rows])

    def exponentials(self, logits: Tensor) -> Tensor:
        """[..., v/p] float32, which become exp(logits - peak) -> [3, ...]: peak, sum, and the target's logit."""
        logits[..., self.columns :] = -torch.inf
        target_logit = logits.gather(-1, self.target.unsqueeze(-1)).squeeze(-1)  # [...] -> [..., 1] -> [...]
        target_logit = target_logit.masked_fill(~self.is_here, 0.0)
        # A shard of padding only has -inf everywhere; clamped, its sum is 0 instead of NaN.
        peak = logits.amax(dim=-1).clamp_min(torch.finfo(torch.float32).min)
        return torch.stack((peak, logits.sub_(peak.unsqueeze(-1)).exp_().sum(dim=-1), target_logit))

    def d_logits(self, exponentials: Tensor, local: Tensor, whole: Tensor, weight: Tensor) -> Tensor:
        """weight · (softmax - one-hot(target)) [..., v/p], written over the exponentials.

        local, whole: [3, ...] of this shard and of the whole vocabulary. weight: [...].
        """
        factor = (local[0] - whole[0]).exp() / whole[1] * weight
        exponentials.mul_(factor.unsqueeze(-1))
        return exponentials.scatter_add_(-1, self.target.unsqueeze(-1), (self.is_here * -weight).unsqueeze(-1))


def rows_in_cache(columns: int) -> int:
    """How many rows of logits a CPU holds in float32 at once: 0.75 MB for each core, which stay in its cache from the
    first pass to the last. This takes half the time of 512 rows at once. Milliseconds of 128 rows at 0.75, 1.5 and 3 MB:
    13, 15 and 18 with AVX-512; 9, 14 and 22 with AVX2."""
    return max(torch.get_num_threads() * _ELEMENTS // columns, 1)


def vocab_parallel_softmax(
    logits: Tensor, shard: VocabShard, weight: Tensor | None, combine: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """This rank's logits [c, v/p] -> [3, c] float32 of the whole vocabulary: peak, sum of exponentials, the target's
    logit.

    weight: [c] float32; with it the logits become weight · (softmax - one-hot(target)). combine: makes the three numbers
    of the whole vocabulary out of this rank's; None if this rank has the whole vocabulary.
    """
    if not logits.is_cpu:
        x = logits.float()
        local = shard.exponentials(x)
        whole = local if combine is None else combine(local)
        if weight is not None:
            logits.copy_(shard.d_logits(x, local, whole, weight))
        return whole
    return softmax_by_rows(
        [logits],
        [shard],
        weight,
        lambda parts: parts[0] if combine is None else combine(parts[0]),
        rows=rows_in_cache(logits.size(1)),
        by_block=combine is None,
    )


def softmax_by_rows(
    logits: Sequence[Tensor],
    shards: Sequence[VocabShard],
    weight: Tensor | None,
    combine: Callable[[Tensor], Tensor],
    *,
    rows: int,
    by_block: bool,
) -> Tensor:
    """`vocab_parallel_softmax` of this rank's columns in parts of equal width, `rows` tokens at a time.

    combine: makes [3, c] of the whole vocabulary out of this rank's [parts, 3, c]. by_block: it is called for each
    block of rows, else once, for all tokens.
    """
    tokens, columns = logits[0].shape
    count = min(rows, tokens)
    blocks = [slice(first, min(first + count, tokens)) for first in range(0, tokens, count)]
    buffers = [torch.empty(count, columns, dtype=torch.float32, device=part.device) for part in logits]
    local = torch.empty(len(logits), 3, tokens, dtype=torch.float32, device=logits[0].device)
    whole = torch.empty_like(local[0])

    def exponentials(rows: slice) -> None:
        for part, shard, buffer, own in zip(logits, shards, buffers, local, strict=True):
            own[:, rows] = shard[rows].exponentials(buffer[: rows.stop - rows.start].copy_(part[rows]))

    def to_gradient(rows: slice, weight: Tensor) -> None:
        for part, shard, buffer, own in zip(logits, shards, buffers, local, strict=True):
            x = buffer[: rows.stop - rows.start]
            part[rows] = shard[rows].d_logits(x, own[:, rows], whole[:, rows], weight[rows])

    for block in blocks:
        exponentials(block)
        if by_block:
            whole[:, block] = combine(local[:, :, block])
            if weight is not None:
                to_gradient(block, weight)
    if by_block:
        return whole
    whole.copy_(combine(local))
    if weight is not None:
        for block in blocks:
            if len(blocks) > 1:
                exponentials(block)  # again: all of them in float32 would not stay in the cache
            to_gradient(block, weight)
    return whole


def products_at_once(dtype: torch.dtype, device: str) -> int | None:
    """How many products are added before their sum goes into float32; None: all of them. device: "cpu" or "cuda".

    float32 adds in the product itself. So do 16 bits on a CPU, up to 4 products at a time: their sum is rounded with
    each, which raises its relative error from 2.4e-3 to 2.7e-3 in bf16 and saves as many passes over the matrix.
    """
    if dtype == torch.float32:
        return None
    return 4 if device == "cpu" else 1


class SumOfProducts:
    """Σ aᵀb of [c, m] and [c, n]: [m, n], in few passes over a matrix of the vocabulary's size."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._part: Tensor | None = None
        self._products = 0

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add aᵀb. a: [c, m], b: [c, n], of one dtype."""
        if self._part is not None and self._products == products_at_once(a.dtype, a.device.type):
            self._sum = self.total().float()
            self._part, self._products = None, 0
        self._part = a.t() @ b if self._part is None else self._part.addmm_(a.t(), b)
        self._products += 1

    def total(self) -> Tensor:
        """The sum [m, n], in float32 or in the products' own dtype."""
        assert self._part is not None
        return self._part if self._sum is None else self._sum.add_(self._part)
