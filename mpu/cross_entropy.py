"""Cross-entropy of logits whose vocabulary is split over the ranks (arXiv:1909.08053, section 3), by itself and
fused with the output layer so that the logits of all tokens never exist at once.

    loss = log Σ exp(logits - peak) + peak - logits[target]        d logits = softmax(logits) - one-hot(target)

Each rank computes three numbers for each token from its columns: the peak, the sum of exponentials, and the target's
logit if the rank holds it.

Legend: t tokens, h hidden, v padded vocabulary, p model-parallel size.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mpu import kernels
from mpu.initialize import get_tensor_model_parallel_group, group_rank_and_size
from mpu.mappings import copy_to_model_parallel_region, gather_from_sequence_parallel_region
from mpu.partition import check_ids, local_ids


def vocab_shard(target: Tensor, number: int, columns: int, vocab_size: int) -> kernels.VocabShard:
    """Shard `number` of the vocabulary, of `columns` columns, padding included, and the targets [...] among them."""
    first = number * columns
    return kernels.VocabShard(min(max(vocab_size - first, 0), columns), *local_ids(target, first, first + columns))


def _combine(group: ProcessGroup | None) -> Callable[[Tensor], Tensor] | None:
    """What makes [3, ...] of the whole vocabulary out of every rank's [3, ...]; None over one rank."""
    if group is None or group.size() == 1:
        return None

    def combine(local: Tensor) -> Tensor:
        everyone = local.new_empty((group.size(), *local.shape))
        dist.all_gather(list(everyone), local.contiguous(), group=group)  # one, instead of three all-reduces
        peaks, totals, target_logits = everyone.unbind(1)  # [p, 3, ...] -> three of [p, ...]
        peak = peaks.amax(dim=0)
        return torch.stack((peak, (totals * (peaks - peak).exp()).sum(dim=0), target_logits.sum(dim=0)))

    return combine


def loss_of(whole: Tensor) -> Tensor:
    """[3, ...], the peak, the sum of exponentials and the target's logit -> the loss of each token [...]."""
    peak, total, target_logit = whole.unbind()
    return total.log() + peak - target_logit


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, group: ProcessGroup | None, vocab_size: int, grad_enabled: bool
    ) -> Tensor:
        needs_grad = grad_enabled and ctx.needs_input_grad[0]
        columns, target = logits.size(-1), target.flatten()
        shard = vocab_shard(target, group_rank_and_size(group)[0], columns, vocab_size)
        x = logits.clone(memory_format=torch.contiguous_format)  # the softmax writes the gradient over it
        weight = torch.ones(target.shape, device=logits.device) if needs_grad else None
        whole = kernels.vocab_parallel_softmax(x.view(-1, columns), shard, weight, _combine(group))
        if needs_grad:
            ctx.save_for_backward(x)
        return loss_of(whole).view(logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (d_logits,) = ctx.saved_tensors
        return (d_logits * grad.unsqueeze(-1)).to(d_logits.dtype), None, None, None, None


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
    vocab_size = vocab_size or logits.size(-1) * group_rank_and_size(group)[1]
    check_ids(target, vocab_size, "target")
    # Inside of `forward` gradients are always off, and needs_input_grad does not know of no_grad.
    return _VocabParallelCrossEntropy.apply(  # type: ignore[no-any-return]
        logits, target, group, vocab_size, torch.is_grad_enabled()
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
        group: ProcessGroup | None,
        vocab_size: int,
        chunk_size: int,
        weight_grad_hook: Callable[[Tensor], object] | None,
        grad_enabled: bool,
    ) -> Tensor:
        """See `vocab_parallel_linear_cross_entropy`."""
        needs_grad = grad_enabled and any(ctx.needs_input_grad)
        shard = vocab_shard(target, group_rank_and_size(group)[0], weight.size(0), vocab_size)
        combine = _combine(group)
        d_hidden = torch.empty_like(hidden) if needs_grad else hidden
        d_weight = kernels.SumOfProducts()
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.size(0), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = hidden[rows] @ weight.t()  # [chunk, v/p]
            # The weights (loss scale, 1 / tokens of the global batch) enter before anything is rounded.
            whole = kernels.vocab_parallel_softmax(
                logits, shard[rows], token_weight[rows] if needs_grad else None, combine
            )
            loss += torch.dot(loss_of(whole), token_weight[rows])
            if needs_grad:
                d_logits = logits  # the softmax has written them over the logits
                torch.mm(d_logits, weight, out=d_hidden[rows])
                d_weight.add(d_logits, hidden[rows])  # += d logitsᵀ · hidden
                del d_logits
            del logits  # before the next ones are made
        if needs_grad:
            # Rounded now, as autograd would do in the end: half the memory until backward comes.
            ctx.gradients = d_hidden, d_weight.total().to(weight.dtype)
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
        return d_hidden, d_weight, *[None] * 7


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
    the products), instead of autograd. For a target outside of the vocabulary see `check_ids`.
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
        group,
        vocab_size,
        chunk_size or chunk_size_for(hidden.size(0)),
        weight_grad_hook,
        torch.is_grad_enabled(),
    )
