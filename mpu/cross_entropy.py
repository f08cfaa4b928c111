"""Cross-entropy of logits whose vocabulary is split over ranks (arXiv:1909.08053, section 3). There are two versions:
one takes logits; the other includes the output layer and keeps the logits of one chunk of tokens at a time
(`chunk_size_for`).

    loss = log Σ exp(logits - max) + max - logits[target]        d logits = softmax(logits) - one-hot(target)

Each rank computes three statistics of each token from its columns: the largest logit, the sum of exponentials, and the
target's logit (0 if a different rank holds it).

Legend: t tokens, h hidden, v padded vocabulary, tp tensor-parallel size.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mpu import kernels
from mpu.initialize import get_tensor_model_parallel_group, group_rank_and_size
from mpu.mappings import enter_model_parallel_region
from mpu.partition import check_ids, local_ids


def vocab_parallel_targets(
    target: Tensor, shard_index: int, columns: int, vocab_size: int
) -> kernels.VocabParallelTargets:
    """Return the targets [...] as column numbers of one shard of the vocabulary.

    columns: width of a shard, with padding.
    """
    first_id = shard_index * columns
    return kernels.VocabParallelTargets(
        min(max(vocab_size - first_id, 0), columns), *local_ids(target, first_id, first_id + columns)
    )


def _combine_over(group: ProcessGroup | None) -> Callable[[Tensor], Tensor] | None:
    """Return a function that combines the statistics [3, ...] of all ranks of `group`. Return None if there is only one
    rank."""
    if group is None or group.size() == 1:
        return None

    def combine(local: Tensor) -> Tensor:
        of_ranks = local.new_empty((group.size(), *local.shape))
        dist.all_gather(list(of_ranks), local.contiguous(), group=group)  # one all-gather instead of three all-reduces
        max_logits, totals, target_logits = of_ranks.unbind(1)  # [tp, 3, ...] -> three of [tp, ...]
        max_logit = max_logits.amax(dim=0)
        return torch.stack((max_logit, (totals * (max_logits - max_logit).exp()).sum(dim=0), target_logits.sum(dim=0)))

    return combine


def loss_from_stats(stats: Tensor) -> Tensor:
    """[3, ...]: largest logit, sum of exponentials, target's logit -> the loss of each token [...]."""
    max_logit, total, target_logit = stats.unbind()
    return total.log() + max_logit - target_logit


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """logits [..., v/tp], target [...] -> loss [...]. Forward computes the gradient of the logits if it is needed, and
    backward multiplies it by the gradient of the loss."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, group: ProcessGroup | None, vocab_size: int, grad_enabled: bool
    ) -> Tensor:
        needs_grad = grad_enabled and ctx.needs_input_grad[0]
        columns, target = logits.size(-1), target.flatten()
        targets = vocab_parallel_targets(target, group_rank_and_size(group)[0], columns, vocab_size)
        x = logits.clone(memory_format=torch.contiguous_format)  # The softmax overwrites this copy with the gradient.
        token_weight = torch.ones(target.shape, device=logits.device) if needs_grad else None
        stats = kernels.vocab_parallel_softmax(x.view(-1, columns), targets, token_weight, _combine_over(group))
        if needs_grad:
            ctx.save_for_backward(x)
        return loss_from_stats(stats).view(logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (d_logits,) = ctx.saved_tensors
        return (d_logits * grad.unsqueeze(-1)).to(d_logits.dtype), None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, *, group: ProcessGroup | None = None, vocab_size: int | None = None
) -> Tensor:
    """Return -log softmax(logits)[target] [...] in float32, equal on every rank. Forward: one all-gather; backward: no
    communication.

    logits: [..., v/tp], this rank's columns.
    target: [...] int64, ids in the whole vocabulary. There is no ignore_index, see `check_ids`.
    vocab_size: the true vocabulary size; columns after it are masked (default: no column is masked).

    The label_smoothing of megatron.core is not implemented.
    """
    group = group or get_tensor_model_parallel_group()
    vocab_size = vocab_size or logits.size(-1) * group_rank_and_size(group)[1]
    check_ids(target, vocab_size, "target")
    # `forward` cannot find out whether gradients are enabled: autograd disables gradients inside `forward`, and
    # needs_input_grad ignores no_grad.
    return _VocabParallelCrossEntropy.apply(  # type: ignore[no-any-return]
        logits, target, group, vocab_size, torch.is_grad_enabled()
    )


class LinearCrossEntropy(torch.autograd.Function):
    """The forward pass also computes the gradients, chunk by chunk. Backward only multiplies the computed gradients by
    the gradient of the loss."""

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
        weight_grad_sink: Callable[[Tensor], object] | None,
        grad_enabled: bool,
    ) -> Tensor:
        """See `vocab_parallel_linear_cross_entropy`."""
        needs_grad = grad_enabled and any(ctx.needs_input_grad)
        targets = vocab_parallel_targets(target, group_rank_and_size(group)[0], weight.size(0), vocab_size)
        combine = _combine_over(group)
        d_hidden = torch.empty_like(hidden) if needs_grad else hidden
        d_weight = kernels.MatmulAccumulator()
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.size(0), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = hidden[rows] @ weight.t()  # [chunk, v/tp]
            # Multiply by token_weight (which includes the loss scale and 1 / tokens) before any rounding.
            stats = kernels.vocab_parallel_softmax(
                logits, targets[rows], token_weight[rows] if needs_grad else None, combine
            )
            loss += torch.dot(loss_from_stats(stats), token_weight[rows])
            if needs_grad:
                d_logits = logits  # The softmax has overwritten the logits.
                torch.mm(d_logits, weight, out=d_hidden[rows])
                d_weight.add(d_logits, hidden[rows])
                del d_logits
            del logits  # Free the logits before those of the next chunk exist.
        if needs_grad:
            # Round now, as autograd would do later: this halves the memory until backward.
            ctx.gradients = d_hidden, d_weight.total().to(weight.dtype)
            ctx.weight_grad_sink = weight_grad_sink
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.gradients
        del ctx.gradients  # The gradients are scaled in place below, so a second backward is impossible.
        if not (grad.is_cpu and grad == 1):  # Reading a value on a GPU would make the host wait.
            d_hidden, d_weight = d_hidden.mul_(grad), d_weight.mul_(grad)
        if ctx.weight_grad_sink is not None:
            ctx.weight_grad_sink(d_weight)
            d_weight = None
        return d_hidden, d_weight, *[None] * 7


LOGITS_AT_ONCE = 4 * 10**9  # bytes on a GPU


def chunk_size_for(tokens: int, row_bytes: int = 0) -> int:
    """Return how many tokens have logits at the same time.

    row_bytes: bytes of the logits of one token on a GPU; 0 on a CPU.

    A CPU takes 1/16 of the tokens, which saves memory, but at least 512, because smaller matrix products are slow. A
    GPU takes tokens with up to 4 GB of logits, in chunks of equal size. Few chunks are fast, because each chunk reads
    the weight and updates the gradient of the weight. The logits of 32,768 tokens of GPT-2 in bf16 take 3.3 GB.
    """
    if not row_bytes:
        return max(512, tokens // 16)
    return -(-tokens // -(-tokens * row_bytes // LOGITS_AT_ONCE))


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
    weight_grad_sink: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Return Σ token_weight · -log softmax(hidden @ weightᵀ)[target], a float32 scalar, equal on every rank.

    The logits exist for `chunk_size` tokens at a time (default: `chunk_size_for`). Forward: one all-gather for each
    chunk; backward: one all-reduce of d hidden. With sequence_parallel, hidden is this rank's [t/tp, h]; forward has
    one more all-gather, and backward a reduce-scatter.

    hidden: [t, h].
    weight: [v/tp, h], this rank's rows.
    target: [t] int64, see `check_ids`.
    token_weight: [t] float32, the product of the loss mask, 1 / tokens of the global batch, and the loss scale.
    vocab_size: the true vocabulary size; rows after it are masked.
    weight_grad_sink: backward calls it with the gradient of `weight` instead of giving the gradient to autograd. The
        gradient has the dtype of `weight`, or of the products under torch.autocast.
    """
    group = group or get_tensor_model_parallel_group()
    check_ids(target, vocab_size, "target")
    hidden, weight, _ = kernels.cast_for_autocast(hidden, weight)
    hidden = enter_model_parallel_region(hidden, group, sequence_parallel)
    row_bytes = 0 if hidden.is_cpu else weight.size(0) * hidden.element_size()
    return LinearCrossEntropy.apply(  # type: ignore[no-any-return]
        hidden,
        weight,
        target,
        token_weight,
        group,
        vocab_size,
        chunk_size or chunk_size_for(hidden.size(0), row_bytes),
        weight_grad_sink,
        torch.is_grad_enabled(),
    )
