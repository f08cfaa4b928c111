"""The output layer and its loss, computed in V shards of the vocabulary.

Legend: c tokens of a chunk, t tokens, h hidden, v padded vocabulary, tp tensor-parallel size, V virtual ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.gpt2.extensions.exact.sums import VirtualRanks, tree_sum
from mpu import kernels
from mpu.cross_entropy import LinearCrossEntropy, chunk_size_for, loss_from_stats, vocab_parallel_targets
from mpu.initialize import get_tensor_model_parallel_group
from mpu.partition import check_ids


def _combine(local: Tensor) -> Tensor:
    """Combine the softmax statistics of all shards: largest logit, sum of exponentials and target's logit, [V, 3, c] ->
    [3, c]."""
    max_logits, totals, target_logits = local.unbind(1)
    max_logit = max_logits.amax(dim=0)
    terms = totals * (max_logits - max_logit).exp()
    return torch.stack((max_logit, tree_sum(terms.unbind()), tree_sum(target_logits.unbind())))


class _ExactLinearCrossEntropy(LinearCrossEntropy):
    """`LinearCrossEntropy` whose forward computes the logits in V shards."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        token_weight: Tensor,
        virtual: VirtualRanks,
        vocab_size: int,
        is_split: bool,
        weight_grad_sink: Callable[[Tensor], object] | None,
        grad_enabled: bool,
    ) -> Tensor:
        """Compute the loss.

        is_split: whether hidden is this rank's shard [t/tp, h] of the sequence.
        """
        needs_grad = grad_enabled and any(ctx.needs_input_grad)
        hidden = virtual.all_gather(hidden) if is_split else hidden
        weights = weight.chunk(virtual.per_rank)
        targets = [
            vocab_parallel_targets(target, shard_index, part.size(0), vocab_size)
            for shard_index, part in enumerate(weights, virtual.first)
        ]
        shape = (virtual.num_partial_sums, *hidden.shape)
        d_hidden = hidden.new_empty(shape if needs_grad else 0, dtype=virtual.sum_dtype(hidden.dtype))
        d_weights = [kernels.MatmulAccumulator() for _ in weights]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        chunk_size = chunk_size_for(hidden.size(0))
        for start in range(0, hidden.size(0), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = [hidden[rows] @ part.t() for part in weights]  # [c, v/V]
            row_targets = [shard_targets[rows] for shard_targets in targets]
            stats = kernels.softmax_by_rows(
                logits,
                row_targets,
                token_weight[rows] if needs_grad else None,
                lambda local: _combine(virtual.all_gather(local)),
                # Every layout must process the same number of rows at a time.
                rows=kernels.rows_in_cache(weights[0].size(0) * virtual.size) if hidden.is_cpu else chunk_size,
                by_block=virtual.group is None,
            )
            loss += torch.dot(loss_from_stats(stats), token_weight[rows])
            if needs_grad:  # The softmax has overwritten the logits with their gradients.
                d_hidden[:, rows] = virtual.sum_of_products(logits, weights, hidden.dtype)
                for d_weight, d_logits in zip(d_weights, logits, strict=True):
                    d_weight.add(d_logits, hidden[rows])
                del d_logits
            del logits
        if needs_grad:
            totals = [d_weight.total().to(weight.dtype) for d_weight in d_weights]
            ctx.gradients = virtual.reduce(d_hidden, hidden.dtype, is_split), torch.cat(totals)
            ctx.weight_grad_sink = weight_grad_sink
        return loss


def exact_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weight: Tensor,
    group: ProcessGroup | None = None,
    *,
    virtual_ranks: int,
    vocab_size: int,
    sequence_parallel: bool = False,
    weight_grad_sink: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """`mpu.vocab_parallel_linear_cross_entropy`, computed in V = `virtual_ranks` shards of the vocabulary.

    Forward also sums the gradient of hidden over the ranks; backward needs no communication."""
    virtual = VirtualRanks(virtual_ranks, group or get_tensor_model_parallel_group())
    check_ids(target, vocab_size, "target")
    is_split = sequence_parallel and virtual.group is not None
    return _ExactLinearCrossEntropy.apply(  # type: ignore[no-any-return]
        hidden,
        weight,
        target,
        token_weight,
        virtual,
        vocab_size,
        is_split,
        weight_grad_sink,
        torch.is_grad_enabled(),
    )
