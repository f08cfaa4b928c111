"""The head and its loss in V parts of the vocabulary, each of which has a peak of its own.

Legend: c tokens of a chunk, t tokens, h hidden, v padded vocabulary, p model-parallel size, V parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.gpt2.extensions.exact.sums import Parts, sum_of_products, tree_sum
from mpu import kernels
from mpu.cross_entropy import LinearCrossEntropy, chunk_size_for, loss_of, vocab_shard
from mpu.initialize import get_tensor_model_parallel_group
from mpu.partition import check_ids


def _whole(local: Tensor) -> Tensor:
    """[V, 3, c] of all parts -> [3, c]: peak, sum of exponentials, the target's logit."""
    peaks, totals, target_logits = local.unbind(1)
    peak = peaks.amax(dim=0)
    terms = totals * (peaks - peak).exp()
    return torch.stack((peak, tree_sum(terms.unbind()), tree_sum(target_logits.unbind())))


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
            vocab_shard(target, parts.first + number, part.size(0), vocab_size) for number, part in enumerate(weights)
        ]
        d_hidden = hidden.new_empty(hidden.shape if needs_grad else 0, dtype=parts.sum_dtype(hidden.dtype))
        d_weights = [kernels.SumOfProducts() for _ in weights]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        chunk_size = chunk_size_for(hidden.size(0))
        for start in range(0, hidden.size(0), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = [hidden[rows] @ part.t() for part in weights]  # [c, v/V]
            own = [shard[rows] for shard in shards]
            whole = kernels.softmax_by_rows(
                logits,
                own,
                token_weight[rows] if needs_grad else None,
                lambda local: _whole(parts.gathered(local)),
                # The same rows at once in every layout.
                rows=kernels.rows_in_cache(weights[0].size(0) * parts.count) if hidden.is_cpu else chunk_size,
                by_block=parts.group is None,
            )
            loss += torch.dot(loss_of(whole), token_weight[rows])
            if needs_grad:  # the softmax has written the gradients over the logits
                d_hidden[rows] = sum_of_products(logits, weights, d_hidden.dtype)
                for number, d_weight in enumerate(d_weights):
                    d_weight.add(logits[number], hidden[rows])
            del logits
        if needs_grad:
            totals = [d_weight.total().to(weight.dtype) for d_weight in d_weights]
            ctx.gradients = parts.complete(d_hidden, hidden.dtype, is_split), torch.cat(totals)
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
