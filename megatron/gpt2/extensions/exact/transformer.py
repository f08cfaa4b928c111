"""Attention and MLP in V parts, and all that a model is made of.

Legend: b batch, s sequence, h hidden, n heads, d head size, f width inside the MLP, V parts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.gpt2.extensions.exact.cross_entropy import exact_linear_cross_entropy
from megatron.gpt2.extensions.exact.layers import (
    ExactColumnParallelLinear,
    ExactLayerNorm,
    ExactPositionEmbedding,
    ExactRowParallelLinear,
)
from megatron.gpt2.extensions.exact.sums import Parts
from mpu.attention import Documents
from mpu.initialize import get_tensor_model_parallel_group
from mpu.random import checkpoint_without_output
from mpu.transformer import Attend, Modules, ParallelMLP, ParallelSelfAttention


class ExactSelfAttention(ParallelSelfAttention):
    """Causal self-attention, n/V heads at a time. [s, b, h] -> [s, b, h]."""

    def forward(
        self, x: Tensor, documents: Documents | None = None, attend: Attend | None = None, keys: Tensor | None = None
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]; see `ParallelSelfAttention.forward`."""
        qkv = [self.split_heads(part) for part in self.query_key_value(x)]
        if attend is not None:  # the cache has all heads of a rank together
            parts = attend(torch.cat(qkv, dim=2)).chunk(len(qkv), dim=-1)
        else:
            first = self.dense.rank * len(qkv)
            parts = tuple(
                self.of_heads(part, documents, None, keys, (first + number) * part.size(2))
                for number, part in enumerate(qkv)
            )
        out: Tensor = self.dense(parts)
        return out


class ExactMLP(ParallelMLP):
    """gelu(xAᵀ + a)Bᵀ + b, f/V of its width at a time. [s, b, h] -> [s, b, h]."""

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        inside = self.dense_h_to_4h(x)  # V/p of [s, b, f/V]
        if self.recompute:
            return checkpoint_without_output(self.gelu, lambda *parts: self.dense_4h_to_h(parts), *inside)
        out: Tensor = self.dense_4h_to_h([self.gelu(part) for part in inside])
        return out


def exact_modules(parts: int, group: ProcessGroup | None = None) -> Modules:
    """What a model with the same numbers at every tensor-parallel size that divides `parts` is made of. `parts` divides
    the heads, the width inside the MLP, the padded vocabulary and the sequence. group: the model's (default: the
    default tensor-parallel group)."""
    group = group if group is not None else get_tensor_model_parallel_group()

    def layer_norm(*args: Any, sequence_parallel: bool = False, **kwargs: Any) -> ExactLayerNorm:
        return ExactLayerNorm(*args, parts=Parts(parts, group if sequence_parallel else None), **kwargs)

    return Modules(
        attention=ExactSelfAttention,
        mlp=ExactMLP,
        column=functools.partial(ExactColumnParallelLinear, parts=parts),
        row=functools.partial(ExactRowParallelLinear, parts=parts),
        layer_norm=layer_norm,
        position_embedding=functools.partial(ExactPositionEmbedding, parts=parts),
        linear_cross_entropy=functools.partial(exact_linear_cross_entropy, parts=parts),
    )
