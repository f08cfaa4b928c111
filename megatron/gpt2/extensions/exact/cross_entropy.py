"""The head and its loss in V parts of the vocabulary, each of which has a peak of its own.

Legend: c tokens of a chunk, t tokens, h hidden, v padded vocabulary, p model-parallel size, V parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.gpt2.extensions.exact.sums import Parts, sum_of_products, tree_sum
from mpu.cross_entropy import LinearCrossEntropy, chunk_size_for, loss_of
from mpu.initialize import get_tensor_model_parallel_group
from mpu.kernels import SumOfProducts, VocabShard, rows_in_cache
from mpu.partition import check_ids, local_ids


def shard_of_part(target: Tensor, number: int, columns: int, vocab_size: int) -> VocabShard:
    """Part `number` of the vocabulary, of `columns` columns, and the targets [t] among them."""
    first = number * columns
    return VocabShard(min(max(vocab_size - first, 0), columns), *local_ids(target, first, first + columns))


def _whole(local: Tensor) -> Tensor:
    """[V, 3, c] of all parts -> [3, c]: peak, sum of exponentials, the target's logit."""
    peaks, totals, target_logits = local.unbind(1)
    peak = peaks.amax(dim=0)
    terms = totals * (peaks - peak).exp()
    return torch.stack((peak, tree_sum(terms.unbind()), tree_sum(target_logits.unbind())))


def softmax_in_parts(
    logits: Sequence[Tensor], shards: Sequence[VocabShard], weight: Tensor | None, parts: Parts
) -> Tensor:
    """The logits of each of this rank's parts [c, v/V] -> [3, c] float32 of the whole vocabulary. weight: [c] float32;
    with it the logits become weight · (softmax - one-hot(target))."""
    tokens, columns = logits[0].shape
    # The same rows at once in every layout.
    count = min(rows_in_cache(columns * parts.count), tokens) if logits[0].is_cpu else tokens
    blocks = [slice(first, min(first + count, tokens)) for first in range(0, tokens, count)]
    local = torch.empty(len(logits), 3, tokens, dtype=torch.float32, device=logits[0].device)
    whole = local.new_empty(3, tokens)

    buffers = [torch.empty(count, columns, dtype=torch.float32, device=part.device) for part in logits]

    def exponentials(rows: slice) -> None:
        for number, part in enumerate(logits):
            x = buffers[number][: rows.stop - rows.start].copy_(part[rows])
            local[number, :, rows] = shards[number][rows].exponentials(x)

    def to_gradient(rows: slice, weight: Tensor) -> None:
        for part, shard, buffer, own in zip(logits, shards, buffers, local[:, :, rows], strict=True):
            x = buffer[: rows.stop - rows.start]
            part[rows] = shard[rows].d_logits(x, own, whole[:, rows], weight[rows])

    for rows in blocks:
        exponentials(rows)
        if parts.group is None:
            whole[:, rows] = _whole(local[:, :, rows])
            if weight is not None:
                to_gradient(rows, weight)
    if parts.group is not None:
        whole.copy_(_whole(parts.gathered(local)))
        if weight is not None:
            for rows in blocks:
                if len(blocks) > 1:
                    exponentials(rows)  # again: all of them in float32 would not stay in the cache
                to_gradient(rows, weight)
    return whole


class _ExactLinearCrossEntropy(LinearCrossEntropy):
    """Backward is that of `LinearCrossEntropy`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        token_weight: Tensor,
        parts: Parts,
        vocab_size: int,
        is_split: bool,
        weight_grad_hook: Callable[[Tensor], object] | None,
        grad_enabled: bool,
    ) -> Tensor:
        """is_split: hidden is this rank's [t/p, h]."""
        needs_grad = grad_enabled and any(ctx.needs_input_grad)
        hidden = parts.gathered(hidden) if is_split else hidden
        weights = weight.chunk(parts.own)
        shards = [
            shard_of_part(target, parts.first + number, part.size(0), vocab_size) for number, part in enumerate(weights)
        ]
        d_hidden = hidden.new_empty(hidden.shape if needs_grad else 0, dtype=parts.sum_dtype(hidden.dtype))
        d_weights = [SumOfProducts() for _ in weights]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        chunk_size = chunk_size_for(hidden.size(0))
        for start in range(0, hidden.size(0), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = [hidden[rows] @ part.t() for part in weights]  # [c, v/V]
            own = [shard[rows] for shard in shards]
            whole = softmax_in_parts(logits, own, token_weight[rows] if needs_grad else None, parts)
            loss += torch.dot(loss_of(whole), token_weight[rows])
            if needs_grad:  # the softmax has written the gradients over the logits
                d_hidden[rows] = sum_of_products(logits, weights, d_hidden.dtype)
                for number, d_weight in enumerate(d_weights):
                    d_weight.add(logits[number], hidden[rows])
            del logits
        if needs_grad:
            complete = parts.to_own_rows if is_split else parts.to_all_rows
            totals = [d_weight.total().to(weight.dtype) for d_weight in d_weights]
            ctx.gradients = complete(d_hidden, hidden.dtype), torch.cat(totals)
            ctx.weight_grad_hook = weight_grad_hook
        return loss


def exact_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weight: Tensor,
    group: ProcessGroup | None = None,
    *,
    parts: int,
    vocab_size: int,
    sequence_parallel: bool = False,
    weight_grad_hook: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """`mpu.vocab_parallel_linear_cross_entropy` in V = `parts` parts of the vocabulary. Forward sums the gradient of
    hidden over the ranks; backward sends nothing."""
    of_group = Parts(parts, group if group is not None else get_tensor_model_parallel_group())
    check_ids(target, vocab_size, "target")
    is_split = sequence_parallel and of_group.group is not None
    return _ExactLinearCrossEntropy.apply(  # type: ignore[no-any-return]
        hidden,
        weight,
        target,
        token_weight,
        of_group,
        vocab_size,
        is_split,
        weight_grad_hook,
        torch.is_grad_enabled(),
    )
