"""The head and its loss in V parts of the vocabulary.

Legend: c tokens of a chunk, t tokens, h hidden, v padded vocabulary, p model-parallel size, V parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.gpt2.extensions.exact.sums import Parts, sum_of_products, tree_sum
from mpu.cross_entropy import LinearCrossEntropy, VocabSums, chunk_size_for
from mpu.initialize import get_tensor_model_parallel_group
from mpu.partition import check_ids, divide


class ExactVocabSums(VocabSums):
    """Each part has a peak of its own, also on one rank."""

    def __init__(self, columns: int, parts: Parts, vocab_size: int, *, sequence_parallel: bool) -> None:
        super().__init__(columns, parts.group, vocab_size)
        self._sums, self.parts = parts, parts.own
        self._sequence_parallel = sequence_parallel and parts.group is not None
        self.columns_at_once = divide(columns, parts.own) * parts.count  # the same rows at once in every layout

    def whole(self, everyone: Tensor) -> Tensor:
        """[p, 3, ..., V/p], or without p where a rank has the whole vocabulary -> [3, ...]."""
        of_ranks = everyone.unsqueeze(0) if self.is_local else everyone
        peaks, totals, target_logits = of_ranks.movedim(-1, 1).flatten(0, 1).unbind(1)  # three of [V, ...]
        peak = peaks.amax(dim=0)
        terms = totals * (peaks - peak).exp()
        return torch.stack((peak, tree_sum(terms.unbind()), tree_sum(target_logits.unbind())))

    def all_tokens(self, hidden: Tensor) -> Tensor:
        """[t, h], or [t/p, h] with sequence_parallel -> [t, h]."""
        return self._sums.gathered(hidden) if self._sequence_parallel else hidden

    def room(self, hidden: Tensor) -> Tensor:
        """[t, h], for sums over this rank's parts."""
        return hidden.new_empty(hidden.shape, dtype=self._sums.sum_dtype(hidden.dtype))

    def input_gradient(self, d_logits: Sequence[Tensor], weights: Sequence[Tensor], out: Tensor) -> None:
        """[c, v/V] and [v/V, h] of each part -> [c, h]."""
        out.copy_(sum_of_products(d_logits, weights, out.dtype))

    def complete(self, d_hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum over all parts, [t, h], or [t/p, h] with sequence_parallel."""
        complete = self._sums.to_own_rows if self._sequence_parallel else self._sums.to_all_rows
        return complete(d_hidden, dtype)


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
    group = group if group is not None else get_tensor_model_parallel_group()
    check_ids(target, vocab_size, "target")
    sums = ExactVocabSums(weight.size(0), Parts(parts, group), vocab_size, sequence_parallel=sequence_parallel)
    return LinearCrossEntropy.apply(  # type: ignore[no-any-return]
        hidden,
        weight,
        target,
        token_weight,
        sums,
        chunk_size_for(target.numel()),
        weight_grad_hook,
        torch.is_grad_enabled(),
    )
