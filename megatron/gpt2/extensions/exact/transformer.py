"""Attention and MLP, computed in V shards, and the spec of all exact layers.

Legend: b batch, s sequence, h hidden, n heads, d head size, f width inside the MLP, V virtual ranks.
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
from megatron.gpt2.extensions.exact.sums import VirtualRanks
from mpu.attention import PackedSeqParams
from mpu.initialize import get_tensor_model_parallel_group
from mpu.random import checkpoint_without_output
from mpu.transformer import AttentionFn, ModelSubmodules, ParallelMLP, ParallelSelfAttention


class ExactSelfAttention(ParallelSelfAttention):
    """Causal self-attention, computed n/V heads at a time."""

    def forward(
        self,
        x: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        attention_fn: AttentionFn | None = None,
        dropout_seeds: Tensor | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h], with the arguments of `ParallelSelfAttention.forward`."""
        qkv = [self.split_heads(part) for part in self.query_key_value(x)]
        if attention_fn is not None:  # The KV cache keeps all heads of a rank in one tensor.
            outputs = attention_fn(torch.cat(qkv, dim=2)).chunk(len(qkv), dim=-1)
        else:
            outputs = tuple(
                self.compute_attention(part, packed_seq_params, dropout_seeds, virtual_rank * part.size(2))
                for virtual_rank, part in enumerate(qkv, self.dense.tp_rank * len(qkv))
            )
        out: Tensor = self.dense(outputs)
        return out


class ExactMLP(ParallelMLP):
    """gelu(xAᵀ + a)Bᵀ + b, computed for f/V rows of A and columns of B at a time."""

    def forward(self, x: Tensor) -> Tensor:
        intermediate = self.dense_h_to_4h(x)  # V/tp of [s, b, f/V]
        if self.recompute:
            return checkpoint_without_output(self.gelu, lambda *parts: self.dense_4h_to_h(parts), *intermediate)
        out: Tensor = self.dense_4h_to_h([self.gelu(part) for part in intermediate])
        return out


def exact_submodules(virtual_ranks: int, group: ProcessGroup | None = None) -> ModelSubmodules:
    """Return the layers of a model with the same bits at every tensor-parallel size that divides `virtual_ranks`.

    `virtual_ranks` must divide the heads, the width inside the MLP, the padded vocabulary and the sequence length.
    group: the model's tensor-parallel group (default: the default tensor-parallel group)."""
    group = group or get_tensor_model_parallel_group()

    def layer_norm(*args: Any, sequence_parallel: bool = False, **kwargs: Any) -> ExactLayerNorm:
        return ExactLayerNorm(
            *args, virtual=VirtualRanks(virtual_ranks, group if sequence_parallel else None), **kwargs
        )

    return ModelSubmodules(
        self_attention=ExactSelfAttention,
        mlp=ExactMLP,
        column_parallel_linear=functools.partial(ExactColumnParallelLinear, virtual_ranks=virtual_ranks),
        row_parallel_linear=functools.partial(ExactRowParallelLinear, virtual_ranks=virtual_ranks),
        layer_norm=layer_norm,
        position_embedding=functools.partial(ExactPositionEmbedding, virtual_ranks=virtual_ranks),
        linear_cross_entropy=functools.partial(exact_linear_cross_entropy, virtual_ranks=virtual_ranks),
    )
