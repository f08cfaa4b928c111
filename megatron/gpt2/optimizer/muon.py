"""Muon for the matrices of the transformer layers, and AdamW for embeddings, head, layer norms and biases.

A matrix W [m, n] with the gradient g, unscaled and clipped, the learning rate η and the weight decay λ is updated by

    M ← μ M + (1 − μ) g                              momentum, saved as exp_avg; there is no second moment
    U = orthogonalize(μ M + (1 − μ) g)               Nesterov's momentum
    W ← (1 − η λ) W − η · c · √max(m, n) · U         c = --muon-extra-scale-factor

With muP, m and n in √max(m, n) are those of a model with the base width, so an update has the same spectral norm at
every width.

Sources: Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon) for μ = 0.95, Nesterov and the iteration of
`orthogonalize`. Moonlight (arXiv:2502.16982) for weight decay and c = 0.2: an update then has the root mean square of
a typical update of AdamW, so both parts share --lr and --weight-decay. Megatron's --muon-scale-mode spectral also
multiplies by √max(m, n).

Q, K and V are orthogonalized separately, as in Megatron. If Q, K and V were one matrix, the largest of the three
gradients would decide the scale of all three updates. The order of the heads does not matter, because orthogonalization
does not depend on the order of rows.

One rank orthogonalizes a whole matrix, with the same operands in every layout, as --exact-layouts needs. The matrices
are divided over the tensor-parallel ranks, and with a sharded optimizer also over the data-parallel ranks. In a step a
rank sends its part of each matrix and receives the update of this part, 4 bytes for each element.
"""

import collections
import itertools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mpu
from megatron.gpt2.model.gpt2 import GPT2Model
from megatron.gpt2.optimizer.optimizer import MixedPrecisionOptimizer
from mpu.initialize import new_tensor_and_data_parallel_group

# Keller Jordan's coefficients: after 5 iterations, singular values are between 0.7 and 1.2. One iteration multiplies a
# small singular value by up to 3.4445.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# A GPU orthogonalizes matrices of this many elements (128 MiB in float32) together, because kernels for one small
# matrix take less time than their launches.
GPU_BATCH_ELEMENTS = 2**25


def layer_matrices(model: GPT2Model) -> list[str]:
    """Return the names of the parameters that Muon updates."""
    named = model.transformer.named_parameters(prefix="transformer")
    return [name for name, parameter in named if parameter.dim() == 2]


def orthogonalize(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return approximately U Vᵀ for each matrix U Σ Vᵀ: [k, m, n] float32 -> [k, m, n] of `dtype`.

    The function applies the Newton-Schulz iteration X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X `steps` times, in `dtype`.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = x.size(1) > x.size(2)
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)).to(dtype)
    x = x.mT if is_tall else x  # For a wide matrix X, X Xᵀ is smaller than Xᵀ X.
    for _ in range(steps):
        product = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(product, product, product, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class MuonOptimizer(MixedPrecisionOptimizer):
    """Updates `buffer.muon_params` of `model` with Muon, and the other parameters with AdamW.

    others: the arguments of `MixedPrecisionOptimizer`.
    batch_elements: the largest number of elements of the matrices that a rank orthogonalizes together. A larger matrix
        is orthogonalized alone. A batch can round differently than single matrices.
    timeout: the time limit of a collective.
    """

    def __init__(self, model: GPT2Model, *others: Any, batch_elements: int, timeout: timedelta | None = None) -> None:
        super().__init__(*others)
        self._specs, self._heads = mpu.partition_specs(model), model.config.num_attention_heads
        self._mup_scale = model.config.mup_scale
        self._tensor_rank, self._tensor_size = model.tp_rank, model.tp_size
        # the ranks that hold the parts of a matrix
        self._group = new_tensor_and_data_parallel_group(timeout) if self.buffer.is_sharded else model.group
        self._matrix_indices = [i for i, owned in enumerate(self.buffer.owned_ranges) if owned.group_key.uses_muon]
        self._empty = torch.empty(0, device=self.buffer.params.device)  # torch.cat needs a tensor.
        # Matrices of equal shape are neighbours. Rank 1 of 4 orthogonalizes matrices 1, 5, 9, ... of a round.
        shapes = {name: self.buffer.parameters[name].shape for name in self.buffer.muon_params}
        names = sorted(shapes, key=lambda name: (shapes[name].numel(), shapes[name]), reverse=True)
        self._ranks = len(self.buffer.elements_by_rank(names[0])) * self._tensor_size  # of `_group`
        self._rounds: list[list[str]] = []
        while names:
            length = self._ranks * max(1, batch_elements // (self._tensor_size * shapes[names[0]].numel()))
            self._rounds.append(names[:length])
            names = names[length:]

    def _update(self, grads: Sequence[Tensor], rate: Tensor, grad_scale: Tensor, found_inf: Tensor) -> None:
        super()._update(grads, rate, grad_scale, found_inf)
        momentum, skipped = self._config.muon_momentum, found_inf > 0
        matrix_grads, exp_avgs, masters, steps = (
            [tensors[index] for index in self._matrix_indices]
            for tensors in (grads, self.moments["exp_avg"], self.buffer.masters, self._adam_steps)
        )
        # Each operation rounds once, so results do not depend on which elements a kernel computes with vector
        # instructions.
        if self._matrix_indices:  # torch refuses empty lists.
            for grad in matrix_grads:
                grad.masked_fill_(skipped, 0.0)
            torch._foreach_mul_(matrix_grads, (1 - momentum) / grad_scale)
            torch._foreach_mul_(exp_avgs, torch.where(skipped, 1.0, momentum))
            torch._foreach_add_(exp_avgs, matrix_grads)
            for grad, exp_avg in zip(matrix_grads, exp_avgs, strict=True):
                grad.add_(exp_avg * momentum)
        for names in self._rounds:
            self._orthogonalize_round(grads, names)
        if self._matrix_indices:
            rate = rate * (1 - found_inf)
            torch._foreach_mul_(masters, 1 - rate * self._config.weight_decay)
            torch._foreach_mul_(matrix_grads, rate)
            torch._foreach_sub_(masters, matrix_grads)
            torch._foreach_add_(steps, [1 - found_inf] * len(steps))
        for index in self._matrix_indices:
            self.buffer.round_master(index)

    def _orthogonalize_round(self, grads: Sequence[Tensor], names: Sequence[str]) -> None:
        """Replace this rank's parts of the matrices `names` in `grads` by parts of the scaled, orthogonalized matrices.

        Each rank sends its part of a matrix to the rank that orthogonalizes the matrix, and receives the result for
        this part."""
        buffer, t = self.buffer, self._tensor_size
        sizes = {name: buffer.elements_by_rank(name) for name in names}
        parts = {name: grads[index][part] for name in names for index, part, _ in [buffer.owned_part(name)]}
        names_of = [names[rank :: self._ranks] for rank in range(self._ranks)]
        own = names_of[buffer.shard_rank * t + self._tensor_rank]
        received = self._exchange(
            [[parts[name] for name in of_rank] for of_rank in names_of],
            [[sizes[name][rank // t] for name in own] for rank in range(self._ranks)],
        )
        matrices = {}
        for name, *pieces in zip(own, *received, strict=True):
            spec = self._specs[name]
            # A tensor-parallel rank's part of the matrix is cut into pieces by the shards of the optimizer.
            local_parts = [torch.cat(pieces[rank::t]) if len(pieces) > t else pieces[rank] for rank in range(t)]
            matrices[name] = spec.merge([flat.view(spec.local_shape(t)) for flat in local_parts])
        updates = self._scaled_updates(matrices)
        sent: list[list[Tensor]] = [[] for _ in range(self._ranks)]
        for name in own:
            for rank in range(t):
                local_part = updates[name][self._specs[name].local_slice(rank, t).slices()].flatten()
                for of_rank, piece in zip(sent[rank::t], local_part.split(sizes[name]), strict=True):
                    of_rank.append(piece)
        returned = self._exchange(sent, [[sizes[name][buffer.shard_rank] for name in of_rank] for of_rank in names_of])
        targets = [parts[name] for name in itertools.chain(*names_of)]
        torch._foreach_copy_(targets, list(itertools.chain(*returned)))

    def _scaled_updates(self, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return c · √(r max(m, n)) · orthogonalize(x) for the whole matrices x [m, n], in float32. Matrices of equal
        shape are one batch."""
        batches = collections.defaultdict[tuple[int, torch.Size], list[str]](list)
        for name, x in matrices.items():
            batches[self._heads * name.endswith("query_key_value.weight"), x.shape].append(name)
        updates: dict[str, Tensor] = {}
        for (heads, _), names in batches.items():
            x = torch.stack([matrices[name] for name in names])
            # [k, n 3 d, h] -> [k 3, n d, h]
            x = x.unflatten(1, (heads, 3, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1) if heads else x
            scale = self._config.muon_extra_scale_factor * (self._mup_scale * max(x.shape[1:])) ** 0.5
            x = orthogonalize(x, self._config.muon_num_ns_steps, self.buffer.params.dtype).float() * scale
            # [k 3, n d, h] -> [k, n 3 d, h]
            x = x.unflatten(0, (-1, 3)).unflatten(2, (heads, -1)).transpose(1, 2).flatten(1, 3) if heads else x
            updates |= zip(names, x, strict=True)
        return updates

    def _exchange(self, sent: list[list[Tensor]], sizes: Sequence[Sequence[int]]) -> list[list[Tensor]]:
        """Send the 1-D tensors `sent[r]` to rank r of the group. Return the tensors that this rank receives, by sender.

        sizes: the lengths of the received tensors, by sender.
        """
        if len(sent) == 1:
            return sent
        received = self._empty.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            received,
            torch.cat([self._empty, *itertools.chain(*sent)]),
            [sum(lengths) for lengths in sizes],
            [sum(tensor.numel() for tensor in tensors) for tensors in sent],
            group=self._group,
        )
        tensors = iter(received.split(list(itertools.chain(*sizes))))
        return [[next(tensors) for _ in lengths] for lengths in sizes]
