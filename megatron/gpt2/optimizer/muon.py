"""Muon for the matrices of the transformer layers, and AdamW for embeddings, head, layer norms and biases.

A matrix W [m, n] with the gradient g, unscaled and clipped, the learning rate η and the weight decay λ is updated by

    M ← μ M + (1 − μ) g                              momentum, saved as exp_avg; there is no second moment
    U = orthogonalize(μ M + (1 − μ) g)               Nesterov's momentum
    W ← (1 − η λ) W − η · c · √max(m, n) · U         c = --muon-extra-scale-factor

With muP, √max(m, n) is that of the base width. An update then has the same spectral norm at every width.

Sources: Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon) for μ = 0.95, Nesterov and the iteration of
`orthogonalize`. Moonlight (arXiv:2502.16982) for weight decay and c = 0.2: an update then has the root mean square of
a typical update of AdamW, so both parts share --lr and --weight-decay. This is Megatron's --muon-scale-mode spectral.

Q, K and V are orthogonalized separately, as in Megatron: attention uses them as three matrices, and together the one
with the largest gradient would decide the scale of all three. The order of the heads does not matter, because
orthogonalization does not depend on the order of rows.

Each whole matrix is orthogonalized by one rank, with the same operands in every layout. So --exact-layouts holds, and
the work is divided over the tensor-parallel ranks, with a sharded optimizer also over the data-parallel ranks. Per
step a rank then sends and receives 4 bytes for each element that it updates, twice, or four times if both groups have
several ranks.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import mpu
from megatron.gpt2.model.gpt2 import GPT2Model
from megatron.gpt2.optimizer.optimizer import MixedPrecisionOptimizer

# With Keller Jordan's coefficients, singular values end between 0.7 and 1.2 after 5 steps. Smaller values grow by up to
# 3.4445 in each step.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def layer_matrices(model: GPT2Model) -> list[str]:
    """Return the names of the parameters that Muon updates."""
    named = model.transformer.named_parameters(prefix="transformer")
    return [name for name, parameter in named if parameter.dim() == 2]


def orthogonalize(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return approximately U Vᵀ for each matrix U Σ Vᵀ: [k, m, n] float32 -> [k, m, n] of `dtype`.

    It applies the Newton-Schulz iteration X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X `steps` times, in `dtype`.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = x.size(1) > x.size(2)
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)).to(dtype)
    x = x.mT if is_tall else x  # X Xᵀ is then the smaller one of the two products.
    for _ in range(steps):
        product = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(product, product, product, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class MuonOptimizer(MixedPrecisionOptimizer):
    """Updates `buffer.matrices` of `model` with Muon, and the other parameters with AdamW.

    others: the arguments of `MixedPrecisionOptimizer`.
    """

    def __init__(self, model: GPT2Model, *others: Any) -> None:
        super().__init__(*others)
        self._specs, self._heads = mpu.partition_specs(model), model.config.num_attention_heads
        self._mup_scale = model.config.mup_scale
        self._tensor_group, self._tensor_rank, self._tensor_size = model.group, model.tp_rank, model.tp_size
        self._data_group = mpu.get_parallel_state().data_parallel_group
        self._matrix_shards = [i for i, shard in enumerate(self.buffer.local_shards) if shard.group_key.is_matrix]
        # Each rank orthogonalizes one matrix of a round. The matrices of a round have similar sizes.
        names = sorted(self.buffer.matrices, key=lambda name: -self.buffer.parameters[name].numel())
        size = len(self.buffer.shard_sizes(names[0])) * self._tensor_size
        self._rounds = [names[start : start + size] for start in range(0, len(names), size)]

    def _update(self, grads: Sequence[Tensor], rate: Tensor, grad_scale: Tensor, found_inf: Tensor) -> None:
        super()._update(grads, rate, grad_scale, found_inf)
        momentum, skipped = self._config.muon_momentum, found_inf > 0
        # Each operation rounds once, so no bit depends on where a kernel starts to vectorise.
        for index in self._matrix_shards:
            grad, exp_avg = grads[index], self.moments["exp_avg"][index]
            grad.masked_fill_(skipped, 0.0).mul_((1 - momentum) / grad_scale)
            exp_avg.mul_(torch.where(skipped, 1.0, momentum)).add_(grad)
            grad.add_(exp_avg * momentum)
        for names in self._rounds:
            self._orthogonalize_round(grads, names)
        rate = rate * (1 - found_inf)
        for index in self._matrix_shards:
            self.buffer.masters[index].mul_(1 - rate * self._config.weight_decay).sub_(grads[index].mul_(rate))
            self._adam_steps[index] += 1 - found_inf
            self.buffer.round_master(index)

    def _orthogonalize_round(self, grads: Sequence[Tensor], names: Sequence[str]) -> None:
        """Replace the parts of the matrices `names` in `grads` by those of the scaled, orthogonalized matrices.

        The parts of a tensor-parallel rank's matrix are gathered on a data-parallel rank, then the whole matrix on a
        tensor-parallel rank of this data-parallel rank. The results return the same way."""
        buffer, t, j = self.buffer, self._tensor_size, self._tensor_rank
        sizes = {name: buffer.shard_sizes(name) for name in names}
        shards = range(len(sizes[names[0]]))
        names_of = [names[r * t : (r + 1) * t] for r in shards]  # the names by the data-parallel rank that gathers them
        own = names_of[buffer.shard_rank]
        parts = {name: grads[index][part] for name in names for index, part, _ in [buffer.local_shard_of(name)]}
        lengths = [[sum(sizes[name])] for name in own] + [[]] * (t - len(own))

        received = self._exchange(
            [[parts[name] for name in of] for of in names_of],
            [[sizes[name][r] for name in own] for r in shards],
            self._data_group,
        )
        local = [[torch.cat(pieces)] for pieces in zip(*received, strict=True)] + [[]] * (t - len(own))
        from_ranks = self._exchange(local, [lengths[j]] * t, self._tensor_group)
        results: list[list[Tensor]] = [[] for _ in range(t)]
        if j < len(own):
            name, spec = own[j], self._specs[own[j]]
            whole = spec.merge([flat.view(spec.local_shape(t)) for (flat,) in from_ranks])
            update = self._scaled_update(name, whole)
            results = [[spec.split(update, rank, t).flatten()] for rank in range(t)]
        local = self._exchange(results, lengths, self._tensor_group)
        updates = [flat.split(sizes[name]) for (flat,), name in zip(local, own, strict=False)]
        received = self._exchange(
            [[update[r] for update in updates] for r in shards],
            [[sizes[name][buffer.shard_rank] for name in of] for of in names_of],
            self._data_group,
        )
        for name, result in zip(names, itertools.chain(*received), strict=True):
            parts[name].copy_(result)

    def _scaled_update(self, name: str, x: Tensor) -> Tensor:
        """Return c · √(r max(m, n)) · orthogonalize(x) for a whole matrix x [m, n], in float32."""
        heads = self._heads if name.endswith("query_key_value.weight") else 0
        # [n 3 d, h] -> [3, n d, h]
        blocks = x.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(1, 2) if heads else x.unsqueeze(0)
        scale = self._config.muon_extra_scale_factor * (self._mup_scale * max(blocks.shape[1:])) ** 0.5
        blocks = orthogonalize(blocks, self._config.muon_num_ns_steps, self.buffer.params.dtype).float() * scale
        # [3, n d, h] -> [n 3 d, h]
        return blocks.unflatten(1, (heads, -1)).transpose(0, 1).flatten(0, 2) if heads else blocks[0]

    def _exchange(
        self, sent: list[list[Tensor]], sizes: Sequence[Sequence[int]], group: ProcessGroup | None
    ) -> list[list[Tensor]]:
        """Send the 1-D tensors `sent[r]` to rank r of the group. Return those that each rank sends here.

        sizes: the lengths of these tensors.
        """
        if len(sent) == 1:
            return sent
        empty = torch.empty(0, device=self.buffer.params.device)  # torch.cat needs a tensor.
        received = empty.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            received,
            torch.cat([empty, *itertools.chain(*sent)]),
            [sum(lengths) for lengths in sizes],
            [sum(tensor.numel() for tensor in tensors) for tensors in sent],
            group=group,
        )
        tensors = iter(received.split(list(itertools.chain(*sizes))))
        return [[next(tensors) for _ in lengths] for lengths in sizes]
