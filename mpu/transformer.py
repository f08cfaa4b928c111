"""The transformer layer, its attention and MLP split over a model-parallel group (arXiv:1909.08053, section 3).

Legend: b batch, s sequence, h hidden, n heads, d head size, f width inside the MLP, p model-parallel size.
Hidden states are [s, b, h] and replicated; between a column- and a row-parallel linear they are split.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mpu.attention import causal_attention
from mpu.layers import ColumnParallelLinear, InitMethod, RowParallelLinear
from mpu.partition import divide
from mpu.random import dropout, get_cuda_rng_tracker


class ParallelSelfAttention(nn.Module):
    """Causal self-attention, heads split over the ranks. [s, b, h] -> [s, b, h]. Forward: one all-reduce;
    backward: one.

    The fused query-key-value weight is head-major, [n, 3, d] rows, so that every rank's shard is contiguous.
    """

    def __init__(self, hidden_size: int, num_heads: int, *, attention_dropout: float, init_method: InitMethod,
                 output_init_method: InitMethod, group: ProcessGroup | None = None,
                 device: torch.device | str | None = None) -> None:
        super().__init__()
        self.head_size = divide(hidden_size, num_heads)
        self.attention_dropout = attention_dropout
        self.query_key_value = ColumnParallelLinear(hidden_size, 3 * hidden_size, gather_output=False,
                                                    init_method=init_method, group=group, device=device)
        self.dense = RowParallelLinear(hidden_size, hidden_size, input_is_parallel=True,
                                       init_method=output_init_method, group=group, device=device)
        divide(num_heads, self.dense.world_size)

    def forward(self, x: Tensor) -> Tensor:
        s, b, _ = x.shape
        qkv = self.query_key_value(x).view(s, b, -1, 3, self.head_size)  # [s, b, 3h/p] -> [s, b, n/p, 3, d]
        q, k, v = qkv.permute(3, 1, 2, 0, 4).unbind(0)  # [s, b, n/p, 3, d] -> 3 views [b, n/p, s, d]
        if self.training and self.attention_dropout > 0:
            with get_cuda_rng_tracker().fork():  # heads differ by rank, so must their masks
                y = causal_attention(q, k, v, self.attention_dropout)
        else:
            y = causal_attention(q, k, v, 0.0)
        out: Tensor = self.dense(y.permute(2, 0, 1, 3).reshape(s, b, -1))  # [b, n/p, s, d] -> [s, b, h/p]
        return out


class ParallelMLP(nn.Module):
    """gelu(xAᵀ)Bᵀ; A split by column, B by row. [s, b, h] -> [s, b, h]. Forward: one all-reduce; backward: one.

    gelu: "tanh", GPT-2's, or "erf".
    """

    def __init__(self, hidden_size: int, ffn_size: int, *, init_method: InitMethod, output_init_method: InitMethod,
                 gelu: str = "tanh", group: ProcessGroup | None = None,
                 device: torch.device | str | None = None) -> None:
        super().__init__()
        self.approximate = {"tanh": "tanh", "erf": "none"}[gelu]
        self.dense_h_to_4h = ColumnParallelLinear(hidden_size, ffn_size, gather_output=False,
                                                  init_method=init_method, group=group, device=device)
        self.dense_4h_to_h = RowParallelLinear(ffn_size, hidden_size, input_is_parallel=True,
                                               init_method=output_init_method, group=group, device=device)

    def forward(self, x: Tensor) -> Tensor:
        inside = F.gelu(self.dense_h_to_4h(x), approximate=self.approximate)  # [s, b, f/p]
        y: Tensor = self.dense_4h_to_h(inside)
        return y


class ParallelTransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), dropout on both branches. [s, b, h] -> [s, b, h].

    The branches' dropout draws from the default generator: the ranks hold the same activations and must drop
    the same elements.
    """

    def __init__(self, hidden_size: int, num_heads: int, ffn_size: int, *, attention_dropout: float,
                 hidden_dropout: float, layernorm_epsilon: float, gelu: str = "tanh",
                 init_method_for: Callable[[str], InitMethod],
                 group: ProcessGroup | None = None, device: torch.device | str | None = None) -> None:
        """init_method_for: gives the init_method of a weight by its name here, e.g. "attention.dense.weight"."""
        super().__init__()
        self.hidden_dropout = hidden_dropout
        self.input_layernorm = nn.LayerNorm(hidden_size, eps=layernorm_epsilon, device=device)
        self.attention = ParallelSelfAttention(
            hidden_size, num_heads, attention_dropout=attention_dropout,
            init_method=init_method_for("attention.query_key_value.weight"),
            output_init_method=init_method_for("attention.dense.weight"), group=group, device=device)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size, eps=layernorm_epsilon, device=device)
        self.mlp = ParallelMLP(
            hidden_size, ffn_size, init_method=init_method_for("mlp.dense_h_to_4h.weight"),
            output_init_method=init_method_for("mlp.dense_4h_to_h.weight"), gelu=gelu, group=group, device=device)

    def forward(self, x: Tensor) -> Tensor:
        p = self.hidden_dropout if self.training else 0.0
        x = x + dropout(self.attention(self.input_layernorm(x)), p)
        return x + dropout(self.mlp(self.post_attention_layernorm(x)), p)
