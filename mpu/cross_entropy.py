"""Cross-entropy of logits whose vocabulary is split over the ranks (arXiv:1909.08053, section 3), alone and
fused with the output layer so that the logits of all tokens never exist at once.

Legend: t tokens, h hidden, v padded vocabulary, p model-parallel size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mpu.initialize import get_model_parallel_group, group_rank_and_size


def _loss_and_softmax(logits: Tensor, target: Tensor, group: ProcessGroup | None,
                      vocab_size: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """[..., v/p], [...] -> loss [...], this rank's columns of the softmax [..., v/p], and those of the one-hot
    target as (index [..., 1], 0 or 1 [..., 1]) stacked; all float32. One all-gather."""
    rank, world_size = group_rank_and_size(group)
    part = logits.size(-1)
    start = rank * part
    # A copy in any case: the softmax is made in it.
    x = logits.to(torch.float32, copy=True)
    if vocab_size is not None and start + part > vocab_size:
        x[..., max(vocab_size - start, 0):] = -torch.inf  # padding takes no part in the softmax
    local = target - start
    here = (local >= 0) & (local < part)
    local = local.masked_fill(~here, 0).unsqueeze(-1)
    target_logit = x.gather(-1, local).squeeze(-1).masked_fill(~here, 0.0)
    # A rank of padding alone has -inf everywhere; clamped, its sum is 0 instead of NaN.
    peak = x.amax(dim=-1).clamp_min(torch.finfo(torch.float32).min)
    softmax = x.sub_(peak.unsqueeze(-1)).exp_()
    total = softmax.sum(dim=-1)
    if world_size > 1:
        # (max, sum of exponentials, target logit) of every rank: one all-gather instead of three all-reduces.
        mine = torch.stack((peak, total, target_logit))
        everyone = mine.new_empty((world_size, *mine.shape))
        dist.all_gather(list(everyone), mine, group=group)
        peaks, totals, target_logits = everyone.unbind(1)
        own_peak, peak = peak, peaks.amax(dim=0)
        total = (totals * (peaks - peak).exp()).sum(dim=0)
        target_logit = target_logits.sum(dim=0)
        softmax.mul_(((own_peak - peak).exp() / total).unsqueeze(-1))
    else:
        softmax.div_(total.unsqueeze(-1))
    return total.log() + peak - target_logit, softmax, torch.stack((local, here.unsqueeze(-1).to(local.dtype)))


def _minus_one_hot(softmax: Tensor, hit: Tensor) -> Tensor:
    """d loss / d logits = softmax - one-hot(target), in place."""
    index, here = hit
    return softmax.scatter_add_(-1, index, -here.to(softmax.dtype))


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: ProcessGroup | None,
                vocab_size: int | None) -> Tensor:
        loss, softmax, hit = _loss_and_softmax(logits, target, group, vocab_size)
        ctx.dtype = logits.dtype
        ctx.save_for_backward(_minus_one_hot(softmax, hit).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (d_logits,) = ctx.saved_tensors
        return (d_logits * grad.unsqueeze(-1)).to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, target: Tensor, group: ProcessGroup | None = None, *,
                                 vocab_size: int | None = None) -> Tensor:
    """-log softmax(logits)[target] in float32, the same on every rank. Forward: one all-gather; backward: none.

    logits: [..., v/p], this rank's columns. target: [...] int64, ids of the whole vocabulary.
    vocab_size: the true vocabulary; columns past it are masked (default: every column counts).
    """
    group = group if group is not None else get_model_parallel_group()
    loss: Tensor = _VocabParallelCrossEntropy.apply(logits, target, group, vocab_size)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradients are made in the forward pass, chunk by chunk, and scaled by d loss in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, token_weight: Tensor,
                group: ProcessGroup | None, vocab_size: int, chunk_size: int) -> Tensor:
        needs_grad = any(ctx.needs_input_grad)
        d_hidden = torch.empty_like(hidden) if needs_grad else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.size(0), chunk_size):
            rows = slice(start, start + chunk_size)
            losses, softmax, hit = _loss_and_softmax(hidden[rows] @ weight.t(), target[rows], group, vocab_size)
            loss += torch.dot(losses, token_weight[rows])
            if d_hidden is not None and d_weight is not None:
                # The weights (loss scale, 1 / tokens of the global batch) enter before anything is rounded.
                d_logits = _minus_one_hot(softmax, hit).mul_(token_weight[rows].unsqueeze(-1)).to(hidden.dtype)
                torch.mm(d_logits, weight, out=d_hidden[rows])
                d_weight += d_logits.t() @ hidden[rows]
        ctx.group = group
        ctx.save_for_backward(d_hidden, d_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        d_hidden = d_hidden * grad.to(d_hidden.dtype)
        if ctx.group is not None and ctx.group.size() > 1:
            dist.all_reduce(d_hidden, group=ctx.group)
        return d_hidden, (d_weight * grad).to(d_hidden.dtype), None, None, None, None, None


def vocab_parallel_linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, token_weight: Tensor,
                                        group: ProcessGroup | None = None, *, vocab_size: int,
                                        chunk_size: int = 1024) -> Tensor:
    """Σ token_weight · -log softmax(hidden @ weightᵀ)[target], a float32 scalar, the same on every rank.

    The logits exist for `chunk_size` tokens at a time. Forward: one all-gather a chunk; backward: one all-reduce
    of d hidden.

    hidden: [t, h]. weight: [v/p, h], this rank's rows. target: [t] int64. token_weight: [t] float32; it carries
    the loss mask, 1 / tokens of the global batch and the loss scale. vocab_size: rows past it are masked.
    """
    group = group if group is not None else get_model_parallel_group()
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, target, token_weight, group, vocab_size, chunk_size)
    return loss
