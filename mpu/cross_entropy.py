"""Cross-entropy of logits whose vocabulary is split over the ranks (arXiv:1909.08053, section 3), alone and
fused with the output layer so that the logits of all tokens never exist at once.

    loss = log Σ exp(logits - peak) + peak - logits[target]        d logits = softmax(logits) - one-hot(target)

Each rank computes three numbers for each token from its columns: the peak, the sum of exponentials, and the target's
logit where the rank holds it.

Legend: t tokens, h hidden, v padded vocabulary, p model-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mpu import kernels
from mpu.initialize import get_tensor_model_parallel_group, group_rank_and_size
from mpu.mappings import copy_to_model_parallel_region, gather_from_sequence_parallel_region
from mpu.partition import check_ids, local_ids


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns of the vocabulary in k equal parts, and where the targets [...] lie among them."""

    columns: int  # true ones of this rank; those after them are padding and take no part in the softmax
    target: Tensor  # [..., k] int64, 0 where another part holds it
    is_here: Tensor  # [..., k] bool

    @staticmethod
    def of(target: Tensor, columns: int, rank: int, vocab_size: int | None, parts: int = 1) -> VocabShard:
        """columns: of this rank, padding included."""
        true = columns if vocab_size is None else min(max(vocab_size - rank * columns, 0), columns)
        size = columns // parts
        first: int | Tensor = rank * columns
        if parts > 1:
            first = first + size * torch.arange(parts, device=target.device)
        return VocabShard(true, *local_ids(target.unsqueeze(-1), first, first + size))

    def __getitem__(self, rows: slice) -> VocabShard:
        return VocabShard(self.columns, self.target[rows], self.is_here[rows])

    def exponentials(self, logits: Tensor) -> Tensor:
        """[..., k, v/pk] float32, which become exp(logits - peak) -> [3, ..., k]: peak, sum, and the target's logit."""
        logits.flatten(-2)[..., self.columns :] = -torch.inf
        target_logit = logits.gather(-1, self.target.unsqueeze(-1)).squeeze(-1)  # [..., k] -> [..., k, 1] -> [..., k]
        target_logit = target_logit.masked_fill(~self.is_here, 0.0)
        # A part of padding alone has -inf everywhere; clamped, its sum is 0 instead of NaN.
        peak = logits.amax(dim=-1).clamp_min(torch.finfo(torch.float32).min)
        return torch.stack((peak, _sum_of_each(logits.sub_(peak.unsqueeze(-1)).exp_()), target_logit))

    def d_logits(self, exponentials: Tensor, local: Tensor, whole: Tensor, weight: Tensor) -> Tensor:
        """weight · (softmax - one-hot(target)) [..., k, v/pk], in the place of the exponentials.

        local: [3, ..., k] of each part. whole: [3, ...] of the whole vocabulary. weight: [...].
        """
        factor = (local[0] - whole[0].unsqueeze(-1)).exp() / whole[1].unsqueeze(-1)
        weight = weight.unsqueeze(-1)
        d_logits: Tensor = exponentials.mul_((factor * weight).unsqueeze(-1))
        d_logits.scatter_add_(-1, self.target.unsqueeze(-1), (self.is_here * -weight).unsqueeze(-1))
        return d_logits


def _sum_of_each(parts: Tensor) -> Tensor:
    """[..., k, n] -> [..., k]. One part at a time: a GPU chooses the order of a sum by the shape of its operand, which
    must not depend on how many parts a rank has."""
    sums = [part.sum(dim=-1, keepdim=True) for part in parts.unbind(-2)]
    return sums[0] if len(sums) == 1 else torch.cat(sums, dim=-1)


class VocabSums:
    """How the columns of the vocabulary that each rank of `group` holds become the whole, in plain sums.

    columns: of this rank, padding included. vocab_size: the true vocabulary (default: every column counts). parts: of
    this rank's columns; each has a peak of its own.
    """

    parts = 1

    def __init__(self, columns: int, group: ProcessGroup | None, vocab_size: int | None) -> None:
        self.columns, self.columns_at_once = columns, columns
        self._group, self._vocab_size = group, vocab_size
        self._rank, self._size = group_rank_and_size(group)

    @property
    def is_local(self) -> bool:
        """Whether this rank has the whole vocabulary."""
        return self._size == 1

    def shard(self, target: Tensor) -> VocabShard:
        """Where the targets [...] lie in this rank's parts of the vocabulary."""
        return VocabShard.of(target, self.columns, self._rank, self._vocab_size, self.parts)

    def gathered(self, local: Tensor) -> Tensor:
        """[3, ..., parts of this rank] -> [p, 3, ..., parts of a rank]: one all-gather instead of three
        all-reduces."""
        assert self._group is not None
        everyone = local.new_empty((self._size, *local.shape))
        dist.all_gather(list(everyone), local.contiguous(), group=self._group)
        return everyone

    def whole(self, everyone: Tensor) -> Tensor:
        """[p, 3, ..., parts of a rank], or without p where a rank has the whole vocabulary -> [3, ...]."""
        if self.is_local:
            return everyone[..., 0]
        peaks, totals, target_logits = everyone[..., 0].unbind(1)  # [p, 3, ...] -> three of [p, ...]
        peak = peaks.amax(dim=0)
        return torch.stack((peak, (totals * (peaks - peak).exp()).sum(dim=0), target_logits.sum(dim=0)))

    def all_tokens(self, hidden: Tensor) -> Tensor:
        """[t, h] of all tokens. The operation before the head has gathered them."""
        return hidden

    def room(self, hidden: Tensor) -> Tensor:
        """Where the gradient of the hidden states [t, h] is put together."""
        return torch.empty_like(hidden)

    def input_gradient(self, d_logits: Sequence[Tensor], weights: Sequence[Tensor], out: Tensor) -> None:
        """This rank's part of d hidden [c, h] of some tokens, from each part of the vocabulary: [c, v/p], [v/p, h]."""
        torch.mm(d_logits[0], weights[0], out=out)

    def complete(self, d_hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """What is given to autograd as the gradient of the hidden states, where all tokens have theirs. The operation
        before the head sums it over the ranks."""
        return d_hidden


def _loss(whole: Tensor) -> Tensor:
    peak, total, target_logit = whole.unbind()  # [3, ...] -> three of [...]
    return total.log() + peak - target_logit


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, sums: VocabSums, grad_enabled: bool) -> Tensor:
        shard = sums.shard(target)
        x = logits.to(torch.float32, copy=True).unsqueeze(-2)
        local = shard.exponentials(x)
        whole = sums.whole(local if sums.is_local else sums.gathered(local))
        loss = _loss(whole)
        if grad_enabled and ctx.needs_input_grad[0]:
            ctx.save_for_backward(shard.d_logits(x, local, whole, torch.ones_like(loss)).squeeze(-2).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (d_logits,) = ctx.saved_tensors
        return (d_logits * grad.unsqueeze(-1)).to(d_logits.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, group: ProcessGroup | None = None, *, vocab_size: int | None = None
) -> Tensor:
    """-log softmax(logits)[target] [...] in float32, the same on every rank. Forward: one all-gather; backward:
    nothing.

    logits: [..., v/p], this rank's columns. target: [...] int64, ids of the whole vocabulary; no other number means
    "ignore" (see `check_ids`).
    vocab_size: the true vocabulary; columns past it are masked (default: every column counts).
    """
    group = group if group is not None else get_tensor_model_parallel_group()
    check_ids(target, vocab_size or logits.size(-1) * group_rank_and_size(group)[1], "target")
    # Inside of `forward` gradients are always off, and needs_input_grad does not know of no_grad.
    return _VocabParallelCrossEntropy.apply(  # type: ignore[no-any-return]
        logits, target, VocabSums(logits.size(-1), group, vocab_size), torch.is_grad_enabled()
    )


class LinearCrossEntropy(torch.autograd.Function):
    """The gradients are made in the forward pass, chunk by chunk, and scaled by d loss in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        token_weight: Tensor,
        sums: VocabSums,
        chunk_size: int,
        weight_grad_hook: Callable[[Tensor], object] | None,
        grad_enabled: bool,
    ) -> Tensor:
        """See `vocab_parallel_linear_cross_entropy`."""
        needs_grad = grad_enabled and any(ctx.needs_input_grad)
        hidden, shard = sums.all_tokens(hidden), sums.shard(target)
        weights = weight.chunk(sums.parts)
        d_hidden = sums.room(hidden) if needs_grad else hidden.new_empty(0)
        d_weights = [kernels.SumOfProducts() for _ in weights]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.size(0), chunk_size):
            rows = slice(start, min(start + chunk_size, hidden.size(0)))
            logits = [hidden[rows] @ part.t() for part in weights]  # [chunk, v/p]
            # The weights (loss scale, 1 / tokens of the global batch) enter before anything is rounded.
            whole = kernels.vocab_parallel_softmax(
                logits, shard[rows], token_weight[rows] if needs_grad else None, sums
            )
            loss += torch.dot(_loss(whole), token_weight[rows])
            if needs_grad:
                d_logits = logits  # which the softmax has left in their place
                sums.input_gradient(d_logits, weights, out=d_hidden[rows])
                for number, d_weight in enumerate(d_weights):
                    d_weight.add(d_logits[number], hidden[rows])  # += d logitsᵀ · hidden
                del d_logits
            del logits  # before the next ones are made
        if needs_grad:
            # Rounded now, as autograd would do in the end: half the memory until backward comes.
            parts = [d_weight.total().to(weight.dtype) for d_weight in d_weights]
            ctx.gradients = sums.complete(d_hidden, hidden.dtype), parts[0] if len(parts) == 1 else torch.cat(parts)
            ctx.weight_grad_hook = weight_grad_hook
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """d loss -> d hidden and d weight."""
        d_hidden, d_weight = ctx.gradients
        del ctx.gradients  # scaled in their place, so that there is no second backward
        if not (grad.is_cpu and grad == 1):  # a GPU is not asked: that would wait for it
            d_hidden, d_weight = d_hidden.mul_(grad), d_weight.mul_(grad)
        if ctx.weight_grad_hook is not None:
            ctx.weight_grad_hook(d_weight)
            d_weight = None
        return d_hidden, d_weight, None, None, None, None, None, None


def chunk_size_for(tokens: int) -> int:
    """How many tokens have logits at once: a sixteenth of all, so that they take less than a tenth of what all would in
    float32, but at least 512, which keeps the matrix products efficient."""
    return max(512, tokens // 16)


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weight: Tensor,
    group: ProcessGroup | None = None,
    *,
    vocab_size: int,
    sequence_parallel: bool = False,
    chunk_size: int | None = None,
    weight_grad_hook: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Σ token_weight · -log softmax(hidden @ weightᵀ)[target], a float32 scalar, the same on every rank.

    The logits exist for `chunk_size` tokens at a time (default: `chunk_size_for`). Forward: one all-gather for each
    chunk; backward: one all-reduce of d hidden. With sequence_parallel hidden is this rank's [t/p, h]: forward has one
    all-gather more, backward a reduce-scatter.

    hidden: [t, h]. weight: [v/p, h], this rank's rows. target: [t] int64. token_weight: [t] float32; it carries the
    loss mask, 1 / tokens of the global batch and the loss scale. vocab_size: the true vocabulary; rows past it are
    masked.
    weight_grad_hook: is given the gradient of `weight` during backward, in its dtype (under torch.autocast in that of
    the products), in the place of autograd. For a target outside of the vocabulary see `check_ids`.
    """
    group = group if group is not None else get_tensor_model_parallel_group()
    check_ids(target, vocab_size, "target")
    hidden, weight, _ = kernels.cast_for_autocast(hidden, weight)
    to_every_rank = gather_from_sequence_parallel_region if sequence_parallel else copy_to_model_parallel_region
    hidden = to_every_rank(hidden, group)
    return LinearCrossEntropy.apply(  # type: ignore[no-any-return]
        hidden,
        weight,
        target,
        token_weight,
        VocabSums(weight.size(0), group, vocab_size),
        chunk_size or chunk_size_for(hidden.size(0)),
        weight_grad_hook,
        torch.is_grad_enabled(),
    )
