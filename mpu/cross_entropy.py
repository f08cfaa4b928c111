"""Cross-entropy of logits whose vocabulary is split over the ranks (arXiv:1909.08053, section 3), alone and
fused with the output layer so that the logits of all tokens never exist at once.

Legend: t tokens, h hidden, v padded vocabulary, p model-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mpu.initialize import get_model_parallel_group, group_rank_and_size
from mpu.mappings import copy_to_model_parallel_region, gather_from_sequence_parallel_region


@dataclass(frozen=True)
class _Softmax:
    """softmax = exponentials · factor over this rank's columns, and where its target lies among them; float32."""

    exponentials: Tensor  # [..., v/p]
    factor: Tensor  # [...]
    target: Tensor  # [...] int64, 0 where another rank holds it
    is_here: Tensor  # [...] bool

    def d_logits(self, weight: Tensor) -> Tensor:
        """weight · (softmax - one-hot(target)), in the place of the exponentials."""
        d_logits = self.exponentials.mul_((self.factor * weight).unsqueeze(-1))
        return d_logits.scatter_add_(-1, self.target.unsqueeze(-1), (self.is_here * -weight).unsqueeze(-1))


def _loss_and_softmax(x: Tensor, target: Tensor, group: ProcessGroup | None,
                      vocab_size: int | None) -> tuple[Tensor, _Softmax]:
    """Logits [..., v/p] in float32, [...] -> loss [...] and this rank's part of the softmax, which takes the place of
    the logits. One all-gather."""
    rank, world_size = group_rank_and_size(group)
    part = x.size(-1)
    start = rank * part
    if vocab_size is not None and start + part > vocab_size:
        x[..., max(vocab_size - start, 0):] = -torch.inf  # padding takes no part in the softmax
    local = target - start
    is_here = (local >= 0) & (local < part)
    local = local.masked_fill(~is_here, 0)
    target_logit = x.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~is_here, 0.0)
    # A rank of padding alone has -inf everywhere; clamped, its sum is 0 instead of NaN.
    peak = x.amax(dim=-1).clamp_min(torch.finfo(torch.float32).min)
    exponentials = x.sub_(peak.unsqueeze(-1)).exp_()
    total = exponentials.sum(dim=-1)
    own_peak = peak
    if world_size > 1:
        # (max, sum of exponentials, target logit) of every rank: one all-gather instead of three all-reduces.
        mine = torch.stack((peak, total, target_logit))
        everyone = mine.new_empty((world_size, *mine.shape))
        dist.all_gather(list(everyone), mine, group=group)
        peaks, totals, target_logits = everyone.unbind(1)
        peak = peaks.amax(dim=0)
        total = (totals * (peaks - peak).exp()).sum(dim=0)
        target_logit = target_logits.sum(dim=0)
    softmax = _Softmax(exponentials, (own_peak - peak).exp() / total, local, is_here)
    return total.log() + peak - target_logit, softmax


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: ProcessGroup | None,
                vocab_size: int | None) -> Tensor:
        loss, softmax = _loss_and_softmax(logits.to(torch.float32, copy=True), target, group, vocab_size)
        ctx.dtype = logits.dtype
        ctx.save_for_backward(softmax.d_logits(torch.ones_like(loss)).to(logits.dtype))
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
        d_hidden = torch.empty_like(hidden)
        d_weight = _SumOfProducts()
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.size(0), chunk_size):
            rows = slice(start, start + chunk_size)
            losses, softmax = _loss_and_softmax((hidden[rows] @ weight.t()).float(), target[rows], group, vocab_size)
            loss += torch.dot(losses, token_weight[rows])
            if needs_grad:
                # The weights (loss scale, 1 / tokens of the global batch) enter before anything is rounded.
                d_logits = softmax.d_logits(token_weight[rows]).to(hidden.dtype)
                del softmax  # the chunk in float32
                torch.mm(d_logits, weight, out=d_hidden[rows])
                d_weight.add(d_logits, hidden[rows])
                del d_logits
        if needs_grad:
            # Rounded now, as autograd would do in the end: half the memory while the layers' backward runs.
            ctx.save_for_backward(d_hidden, d_weight.total().to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return (d_hidden * grad.to(d_hidden.dtype), d_weight * grad.to(d_weight.dtype),
                None, None, None, None, None)


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
                                        sequence_parallel: bool = False, chunk_size: int | None = None) -> Tensor:
    """Σ token_weight · -log softmax(hidden @ weightᵀ)[target], a float32 scalar, the same on every rank.

    The logits exist for `chunk_size` tokens at a time (default: a sixteenth of all, so that they take less than a
    tenth of what all would in float32, but at least 512, which keeps the matrix products efficient). Forward: one
    all-gather a chunk; backward: one all-reduce of d hidden. With sequence_parallel hidden is this rank's [t/p, h]:
    forward one all-gather more, backward a reduce-scatter.

    hidden: [t, h]. weight: [v/p, h], this rank's rows. target: [t] int64. token_weight: [t] float32; it carries
    the loss mask, 1 / tokens of the global batch and the loss scale. vocab_size: rows past it are masked.
    """
    group = group if group is not None else get_model_parallel_group()
    to_every_rank = gather_from_sequence_parallel_region if sequence_parallel else copy_to_model_parallel_region
    hidden = to_every_rank(hidden, group)
    chunk_size = chunk_size or max(512, hidden.size(0) // 16)
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, target, token_weight, group, vocab_size, chunk_size)
    return loss
