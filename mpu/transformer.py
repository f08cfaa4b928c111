"""The transformer layer, its attention and MLP split over a model-parallel group (arXiv:1909.08053, section 3).

Legend: b batch, s sequence, h hidden, n heads, d head size, f width inside the MLP, p model-parallel size.
Hidden states are [s, b, h] and replicated; between a column- and a row-parallel linear they are split. With
sequence_parallel (arXiv:2205.05198) they are [s/p, b, h] elsewhere, so that layer norms, dropout and what is kept of
them for backward are split as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mpu.attention import Documents, causal_attention, document_attention
from mpu.grads import mark_sequence_parallel
from mpu.layers import ColumnParallelLinear, InitMethod, RowParallelLinear
from mpu.partition import divide
from mpu.random import dropout, tracker_in_use

Attend = Callable[[Tensor], Tensor]

_TWO_ROOTS_OF_TWO_OVER_PI = 2 * math.sqrt(2 / math.pi)


class LayerNorm(nn.LayerNorm):
    """torch's, over [..., normalized_shape]; replicated. With sequence_parallel its parameters are marked, since their
    gradients are partial sums."""

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5, elementwise_affine: bool = True, *,
                 sequence_parallel: bool = False, device: torch.device | str | None = None) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device=device)
        if sequence_parallel:
            mark_sequence_parallel(self.parameters())


class ParallelSelfAttention(nn.Module):
    """Causal self-attention, heads split over the ranks. [s, b, h] -> [s, b, h]. Forward: one all-reduce;
    backward: one.

    The fused query-key-value weight is head-major, [n, 3, d] rows, so that every rank's shard is contiguous.
    """

    def __init__(self, hidden_size: int, num_heads: int, *, attention_dropout: float, init_method: InitMethod,
                 output_init_method: InitMethod, sequence_parallel: bool = False, group: ProcessGroup | None = None,
                 device: torch.device | str | None = None) -> None:
        super().__init__()
        self.head_size = divide(hidden_size, num_heads)
        self.attention_dropout = attention_dropout
        self.query_key_value = ColumnParallelLinear(
            hidden_size, 3 * hidden_size, gather_output=False, sequence_parallel=sequence_parallel,
            init_method=init_method, group=group, device=device)
        self.dense = RowParallelLinear(
            hidden_size, hidden_size, input_is_parallel=True, sequence_parallel=sequence_parallel,
            init_method=output_init_method, group=group, device=device)
        divide(num_heads, self.dense.world_size)

    def forward(self, x: Tensor, documents: Documents | None = None, attend: Attend | None = None) -> Tensor:
        """documents: of the whole sequence; None lets every token see all before it. attend: in the place of causal
        attention, [s, b, n/p, 3, d] -> [s, b, h/p]."""
        qkv = self.query_key_value(x)
        qkv = qkv.view(*qkv.shape[:2], -1, 3, self.head_size)  # [s, b, 3h/p] -> [s, b, n/p, 3, d]
        if attend is not None:
            y = attend(qkv)
        elif self.training and self.attention_dropout > 0:
            y = _attention_with_own_masks(qkv, self.attention_dropout, documents)
        elif documents is not None:
            y = document_attention(qkv, 0.0, documents)
        else:
            y = causal_attention(qkv, 0.0)
        out: Tensor = self.dense(y)
        return out


def _attention_with_own_masks(qkv: Tensor, dropout_p: float, documents: Documents | None) -> Tensor:
    """Heads differ by rank, so must their masks."""
    with tracker_in_use().fork():
        return causal_attention(qkv, dropout_p) if documents is None else document_attention(qkv, dropout_p, documents)


class ParallelMLP(nn.Module):
    """gelu(xAᵀ)Bᵀ; A split by column, B by row. [s, b, h] -> [s, b, h]. Forward: one all-reduce; backward: one.

    gelu: "tanh", GPT-2's, or "erf". recompute: compute its output again in backward instead of keeping it, a quarter of
    what a layer keeps.
    """

    def __init__(self, hidden_size: int, ffn_size: int, *, init_method: InitMethod, output_init_method: InitMethod,
                 gelu: str = "tanh", recompute: bool = False, sequence_parallel: bool = False,
                 group: ProcessGroup | None = None, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.gelu = {"tanh": gelu_tanh, "erf": gelu_erf}[gelu]
        self.recompute = recompute
        self.dense_h_to_4h = ColumnParallelLinear(
            hidden_size, ffn_size, gather_output=False, sequence_parallel=sequence_parallel, init_method=init_method,
            group=group, device=device)
        self.dense_4h_to_h = RowParallelLinear(
            ffn_size, hidden_size, input_is_parallel=True, sequence_parallel=sequence_parallel,
            init_method=output_init_method, group=group, device=device)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.dense_h_to_4h(x)  # [s, b, f/p]
        out: Tensor = keeping_input(self.gelu, self.dense_4h_to_h, inside) if self.recompute else \
            self.dense_4h_to_h(self.gelu(inside))
        return out


def keeping_input(function: Callable[[Tensor], Tensor], then: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """then(function(x)). For backward x is kept, which `function` keeps anyway, instead of function(x), which is
    computed again. A compiler decides by itself what to keep, and so of what is cheap."""
    y = function(x)
    if torch.compiler.is_compiling():
        return then(y)
    address, size = y.data_ptr(), y.nbytes  # not y itself, which would live as long as the hook

    def pack(kept: Tensor) -> Tensor | tuple[torch.Size, Tensor]:
        return (kept.shape, x) if kept.data_ptr() == address and kept.nbytes == size else kept

    def unpack(kept: Tensor | tuple[torch.Size, Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else function(kept[1]).view(kept[0])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return then(y)


def gelu_tanh(x: Tensor) -> Tensor:
    """½x(1 + tanh(√(2/π)(x + 0.044715x³)))."""
    if x.device.type == "cpu" and torch.compiler.is_compiling():
        # The same function, ½(1 + tanh u) = sigmoid(2u): compiled, exp takes half the time of tanh.
        return x * torch.sigmoid(_TWO_ROOTS_OF_TWO_OVER_PI * (x + 0.044715 * x * x * x))
    return F.gelu(x, approximate="tanh")


def gelu_erf(x: Tensor) -> Tensor:
    """½x(1 + erf(x/√2))."""
    return F.gelu(x)


class ParallelTransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), dropout on both branches. [s, b, h] -> [s, b, h].

    The branches' dropout draws from the default generator where the ranks hold the same activations and must drop the
    same elements, and from the tracker under sequence parallelism, where each holds a part of its own.
    """

    def __init__(self, hidden_size: int, num_heads: int, ffn_size: int, *, attention_dropout: float,
                 hidden_dropout: float, layernorm_epsilon: float, gelu: str = "tanh", recompute: bool = False,
                 sequence_parallel: bool = False, init_method_for: Callable[[str], InitMethod],
                 group: ProcessGroup | None = None, device: torch.device | str | None = None) -> None:
        """init_method_for: gives the init_method of a weight by its name here, e.g. "attention.dense.weight".
        recompute: compute the outputs of GELU and of the layer norms again in backward instead of keeping them."""
        super().__init__()
        self.hidden_dropout, self.sequence_parallel, self.recompute = hidden_dropout, sequence_parallel, recompute
        self.input_layernorm = LayerNorm(hidden_size, layernorm_epsilon, sequence_parallel=sequence_parallel,
                                         device=device)
        self.attention = ParallelSelfAttention(
            hidden_size, num_heads, attention_dropout=attention_dropout,
            init_method=init_method_for("attention.query_key_value.weight"),
            output_init_method=init_method_for("attention.dense.weight"), sequence_parallel=sequence_parallel,
            group=group, device=device)
        self.post_attention_layernorm = LayerNorm(hidden_size, layernorm_epsilon, sequence_parallel=sequence_parallel,
                                                  device=device)
        self.mlp = ParallelMLP(
            hidden_size, ffn_size, init_method=init_method_for("mlp.dense_h_to_4h.weight"),
            output_init_method=init_method_for("mlp.dense_4h_to_h.weight"), gelu=gelu, recompute=recompute,
            sequence_parallel=sequence_parallel, group=group, device=device)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """`nn.Module.compile`, which takes torch.compile's arguments."""
        _leave_out_of_graphs()
        super().compile(*args, **kwargs)

    def forward(self, x: Tensor, documents: Documents | None = None, attend: Attend | None = None) -> Tensor:
        attention = self.attention if documents is None and attend is None else functools.partial(
            self.attention, documents=documents, attend=attend)
        # Neither a loop nor a `with` around the branches: torch.compile leaves out a layer that has a break in one.
        p = self.hidden_dropout if self.training else 0.0
        norm = self.input_layernorm
        y = keeping_input(norm, attention, x) if self.recompute else attention(norm(x))
        x = x + hidden_dropout(y, p, self.sequence_parallel)
        norm = self.post_attention_layernorm
        y = keeping_input(norm, self.mlp, x) if self.recompute else self.mlp(norm(x))
        return x + hidden_dropout(y, p, self.sequence_parallel)


def hidden_dropout(x: Tensor, p: float, sequence_parallel: bool) -> Tensor:
    """Dropout of hidden states: the same elements on every rank, or its own on each where the sequence is split."""
    return dropout(x, p) if p == 0.0 or not sequence_parallel else _dropout_with_own_masks(x, p)


def _dropout_with_own_masks(x: Tensor, p: float) -> Tensor:
    with tracker_in_use().fork():
        return dropout(x, p)


@functools.cache
def _leave_out_of_graphs() -> None:
    """What changes the random stream, which torch.compile cannot trace, and what differs with every batch's documents.
    As decorators these calls would load the compiler, 0.9 s of every start."""
    global _attention_with_own_masks, _dropout_with_own_masks, document_attention
    document_attention = torch.compiler.disable(document_attention, reason="lengths of documents")
    _attention_with_own_masks = torch.compiler.disable(_attention_with_own_masks, reason="a change of random stream")
    _dropout_with_own_masks = torch.compiler.disable(_dropout_with_own_masks, reason="a change of random stream")
