"""Cross-entropy of logits whose vocabulary is split over the ranks (arXiv:1909.08053, section 3), alone and
fused with the output layer so that the logits of all tokens never exist at once.

Legend: t tokens, h hidden, v padded vocabulary, p model-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mpu.initialize import get_model_parallel_group, group_rank_and_size
from mpu.mappings import copy_to_model_parallel_region, gather_from_sequence_parallel_region


@dataclass(frozen=True)
class _Shard:
    """The columns of the vocabulary that this rank holds, and where the targets [...] lie among them."""

    columns: int  # true ones; those after them are padding and take no part in the softmax
    target: Tensor  # [...] int64, 0 where another rank holds it
    is_here: Tensor  # [...] bool

    @staticmethod
    def of(target: Tensor, part: int, rank: int, vocab_size: int | None) -> _Shard:
        local = target - rank * part
        is_here = (local >= 0) & (local < part)
        columns = part if vocab_size is None else min(max(vocab_size - rank * part, 0), part)
        return _Shard(columns, local.masked_fill(~is_here, 0), is_here)

    def __getitem__(self, rows: slice) -> _Shard:
        return _Shard(self.columns, self.target[rows], self.is_here[rows])

    def exponentials(self, logits: Tensor) -> Tensor:
        """[..., v/p] float32 -> exp(logits - peak), in their place; and [3, ...]: (peak, sum of them, target's logit).
        """
        logits[..., self.columns:] = -torch.inf
        target_logit = logits.gather(-1, self.target.unsqueeze(-1)).squeeze(-1).masked_fill(~self.is_here, 0.0)
        # A rank of padding alone has -inf everywhere; clamped, its sum is 0 instead of NaN.
        peak = logits.amax(dim=-1).clamp_min(torch.finfo(torch.float32).min)
        return torch.stack((peak, logits.sub_(peak.unsqueeze(-1)).exp_().sum(dim=-1), target_logit))

    def d_logits(self, exponentials: Tensor, own: Tensor, whole: Tensor, weight: Tensor) -> Tensor:
        """weight · (softmax - one-hot(target)), in the place of the exponentials."""
        factor = (own[0] - whole[0]).exp() / whole[1]
        d_logits: Tensor = exponentials.mul_((factor * weight).unsqueeze(-1))
        d_logits.scatter_add_(-1, self.target.unsqueeze(-1), (self.is_here * -weight).unsqueeze(-1))
        return d_logits


def _over_ranks(own: Tensor, group: ProcessGroup | None) -> Tensor:
    """[3, ...] of the whole vocabulary out of every rank's: one all-gather instead of three all-reduces."""
    if group is None or group.size() == 1:
        return own
    everyone = own.new_empty((group.size(), *own.shape))
    dist.all_gather(list(everyone), own, group=group)
    peaks, totals, target_logits = everyone.unbind(1)
    peak = peaks.amax(dim=0)
    return torch.stack((peak, (totals * (peaks - peak).exp()).sum(dim=0), target_logits.sum(dim=0)))


def _loss(whole: Tensor) -> Tensor:
    peak, total, target_logit = whole.unbind()
    return total.log() + peak - target_logit


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: ProcessGroup | None, vocab_size: int | None,
                grad_enabled: bool) -> Tensor:
        shard = _Shard.of(target, logits.size(-1), group_rank_and_size(group)[0], vocab_size)
        x = logits.to(torch.float32, copy=True)
        own = shard.exponentials(x)
        whole = _over_ranks(own, group)
        loss = _loss(whole)
        if grad_enabled and ctx.needs_input_grad[0]:
            ctx.dtype = logits.dtype
            ctx.save_for_backward(shard.d_logits(x, own, whole, torch.ones_like(loss)).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (d_logits,) = ctx.saved_tensors
        return (d_logits * grad.unsqueeze(-1)).to(ctx.dtype), None, None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, target: Tensor, group: ProcessGroup | None = None, *,
                                 vocab_size: int | None = None) -> Tensor:
    """-log softmax(logits)[target] in float32, the same on every rank. Forward: one all-gather; backward: none.

    logits: [..., v/p], this rank's columns. target: [...] int64, ids of the whole vocabulary.
    vocab_size: the true vocabulary; columns past it are masked (default: every column counts).
    """
    group = group if group is not None else get_model_parallel_group()
    # Inside of `forward` gradients are always off, and needs_input_grad does not know of no_grad.
    loss: Tensor = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, target, group, vocab_size, torch.is_grad_enabled())
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradients are made in the forward pass, chunk by chunk, and scaled by d loss in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, token_weight: Tensor,
                group: ProcessGroup | None, vocab_size: int, chunk_size: int,
                collect: Callable[[Tensor], object] | None, grad_enabled: bool) -> Tensor:
        needs_grad = grad_enabled and any(ctx.needs_input_grad)
        alone = group is None or group.size() == 1
        shard_of_all = _Shard.of(target, weight.size(0), group_rank_and_size(group)[0], vocab_size)
        d_hidden = hidden.new_empty(hidden.shape if needs_grad else 0)
        d_weight = _SumOfProducts()
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        block = _rows_in_float32(chunk_size, weight)
        room = torch.empty(block, weight.size(0), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.size(0), chunk_size):
            rows = slice(start, min(start + chunk_size, hidden.size(0)))
            shard, weights = shard_of_all[rows], token_weight[rows]
            logits = hidden[rows] @ weight.t()
            blocks = [slice(first, min(first + block, logits.size(0))) for first in range(0, logits.size(0), block)]
            own = torch.empty(3, logits.size(0), dtype=torch.float32, device=hidden.device)
            for part in blocks:
                x = room[:part.stop - part.start].copy_(logits[part])
                own[:, part] = shard[part].exponentials(x)
                if needs_grad and alone:
                    logits[part] = shard[part].d_logits(x, own[:, part], own[:, part], weights[part])
            whole = _over_ranks(own, group)
            loss += torch.dot(_loss(whole), weights)
            if needs_grad:
                # The weights (loss scale, 1 / tokens of the global batch) enter before anything is rounded.
                for part in () if alone else blocks:
                    x = room[:part.stop - part.start].copy_(logits[part])
                    shard[part].exponentials(x)
                    logits[part] = shard[part].d_logits(x, own[:, part], whole[:, part], weights[part])
                torch.mm(logits, weight, out=d_hidden[rows])  # now d logits
                d_weight.add(logits, hidden[rows])
            del logits  # before the next ones are made
        if needs_grad:
            # Rounded now, as autograd would do in the end: half the memory until backward comes.
            ctx.gradients, ctx.collect = (d_hidden, d_weight.total().to(weight.dtype)), collect
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.gradients
        del ctx.gradients  # scaled in their place, so that there is no second backward
        if not (grad.is_cpu and grad == 1):  # a GPU is not asked: that would wait for it
            d_hidden, d_weight = d_hidden.mul_(grad), d_weight.mul_(grad)
        if ctx.collect is not None:
            ctx.collect(d_weight)
            d_weight = None
        return d_hidden, d_weight, None, None, None, None, None, None, None


def _rows_in_float32(chunk_size: int, weight: Tensor) -> int:
    """The rows of logits [chunk_size, v/p] that exist in float32 at once: on a CPU 0.75 MB a core, which stay in
    its cache from the first pass to the last, be it 1 or 2 MB (half the time of 512 rows at once); on a GPU all of
    them. A rule for every processor (ms of 128 rows at 0.75, 1.5 and 3 MB: 13, 15, 18 with AVX-512; 9, 14, 22 with
    AVX2)."""
    if not weight.is_cpu:
        return chunk_size
    return min(max(torch.get_num_threads() * (3 << 16) // weight.size(0), 1), chunk_size)


class _SumOfProducts:
    """Σ aᵀb of [t, m], [t, n].

    float32 adds in the product itself. So do 16 bits on a CPU, up to 4 products at a time: their sum is rounded with
    each, by which its error rises from 2.4e-3 to 2.7e-3 in bf16, and as many passes over a matrix of the vocabulary's
    size are saved. Anything more is added in float32.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._part: Tensor | None = None
        self._products = 0

    def add(self, a: Tensor, b: Tensor) -> None:
        if self._part is not None and a.dtype != torch.float32 and self._products == (4 if a.is_cpu else 1):
            self._sum = self.total().float()
            self._part, self._products = None, 0
        self._part = a.t() @ b if self._part is None else self._part.addmm_(a.t(), b)
        self._products += 1

    def total(self) -> Tensor:
        """The sum, in float32 or in the products' own precision."""
        assert self._part is not None
        return self._part if self._sum is None else self._sum.add_(self._part)


def vocab_parallel_linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, token_weight: Tensor,
                                        group: ProcessGroup | None = None, *, vocab_size: int,
                                        sequence_parallel: bool = False, chunk_size: int | None = None,
                                        collect: Callable[[Tensor], object] | None = None) -> Tensor:
    """Σ token_weight · -log softmax(hidden @ weightᵀ)[target], a float32 scalar, the same on every rank.

    The logits exist for `chunk_size` tokens at a time (default: a sixteenth of all, so that they take less than a
    tenth of what all would in float32, but at least 512, which keeps the matrix products efficient). Forward: one
    all-gather a chunk; backward: one all-reduce of d hidden. With sequence_parallel hidden is this rank's [t/p, h]:
    forward one all-gather more, backward a reduce-scatter.

    hidden: [t, h]. weight: [v/p, h], this rank's rows. target: [t] int64. token_weight: [t] float32; it carries
    the loss mask, 1 / tokens of the global batch and the loss scale. vocab_size: rows past it are masked.
    collect: takes the gradient of `weight` during backward, in its dtype, in the place of autograd.
    """
    group = group if group is not None else get_model_parallel_group()
    to_every_rank = gather_from_sequence_parallel_region if sequence_parallel else copy_to_model_parallel_region
    hidden = to_every_rank(hidden, group)
    chunk_size = chunk_size or max(512, hidden.size(0) // 16)
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, target, token_weight, group, vocab_size, chunk_size, collect, torch.is_grad_enabled())
    return loss
