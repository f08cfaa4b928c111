"""The transformer layer, its attention and MLP split over a model-parallel group (arXiv:1909.08053, section 3).

Legend: b batch, s sequence, h hidden, n heads, d head size, f width inside the MLP, p model-parallel size.
Hidden states are [s, b, h] and replicated; between a column- and a row-parallel linear they are split. With
sequence_parallel (arXiv:2205.05198) they are [s/p, b, h] everywhere else, so that layer norms, dropout and what is kept
of them for backward are split as well.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpu import kernels
from mpu.attention import Attend, Documents, ParallelSelfAttention, core_attention
from mpu.cross_entropy import vocab_parallel_linear_cross_entropy
from mpu.dropout import AFTER_ATTENTION, AFTER_MLP, dropout_of_own_part, hidden_dropout
from mpu.grads import mark_sequence_parallel
from mpu.kernels import checkpoint_without_output
from mpu.layers import ColumnParallelLinear, InitMethod, PositionEmbedding, RowParallelLinear
from mpu.transformer_config import TransformerConfig


class LayerNorm(nn.LayerNorm):
    """torch's layer norm over [..., normalized_shape], replicated. With sequence_parallel its parameters are marked,
    since their gradients are partial sums. Arguments by position are those of Apex's layer norm in 2019."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        *,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device=device)
        if sequence_parallel:
            mark_sequence_parallel(self.parameters())


class ParallelMLP(nn.Module):
    """gelu(xAᵀ + a)Bᵀ + b; A and a split by output features, B by input features. [s, b, h] -> [s, b, h], or
    [s/p, b, h] -> [s/p, b, h] with sequence_parallel. Forward: one all-reduce; backward: one.

    With selective recomputation the output of GELU, a quarter of what a layer keeps, is computed again in backward.
    column, row: make the linear layers.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        init_method: InitMethod,
        output_init_method: InitMethod,
        column: Callable[..., ColumnParallelLinear] = ColumnParallelLinear,
        row: Callable[..., RowParallelLinear] = RowParallelLinear,
    ) -> None:
        super().__init__()
        self.gelu: Callable[[Tensor], Tensor] = kernels.gelu_tanh if config.gelu == "tanh" else F.gelu
        self.recompute = config.recompute_granularity == "selective"
        self.dense_h_to_4h = column(
            config.hidden_size,
            config.ffn_hidden_size,
            gather_output=False,
            init_method=init_method,
            sequence_parallel=config.sequence_parallel,
            group=config.group,
            device=config.device,
        )
        self.dense_4h_to_h = row(
            config.ffn_hidden_size,
            config.hidden_size,
            input_is_parallel=True,
            init_method=output_init_method,
            sequence_parallel=config.sequence_parallel,
            group=config.group,
            device=config.device,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        inside = self.dense_h_to_4h(x)  # [s, b, f/p]
        out: Tensor = (
            checkpoint_without_output(self.gelu, self.dense_4h_to_h, inside)
            if self.recompute
            else self.dense_4h_to_h(self.gelu(inside))
        )
        return out


@dataclass(frozen=True)
class Modules:
    """Of what a model is made: classes, or functions with their arguments, that stand in for the plain ones. Each is
    called as the plain one. (megatron.core's ModuleSpec.)"""

    attention: Callable[..., ParallelSelfAttention] = ParallelSelfAttention
    mlp: Callable[..., ParallelMLP] = ParallelMLP
    layer_norm: Callable[..., LayerNorm] = LayerNorm
    position_embedding: Callable[..., PositionEmbedding] = PositionEmbedding
    linear_cross_entropy: Callable[..., Tensor] = vocab_parallel_linear_cross_entropy


PLAIN_MODULES = Modules()


class ParallelTransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), dropout on both branches. [s, b, h] -> [s, b, h], or
    [s/p, b, h] -> [s/p, b, h] with sequence_parallel.

    init_method_for: gives the init_method of a weight by its name here, for example "attention.dense.weight". modules:
    of what the layer is made.
    """

    def __init__(
        self, config: TransformerConfig, *, init_method_for: Callable[[str], InitMethod], modules: Modules | None = None
    ) -> None:
        super().__init__()
        self.hidden_dropout, self.sequence_parallel = config.hidden_dropout, config.sequence_parallel
        self.recompute = config.recompute_granularity == "selective"
        modules = modules or PLAIN_MODULES
        norm = functools.partial(
            modules.layer_norm,
            config.hidden_size,
            config.layernorm_epsilon,
            sequence_parallel=config.sequence_parallel,
            device=config.device,
        )
        self.input_layernorm = norm()
        self.attention = modules.attention(
            config,
            init_method=init_method_for("attention.query_key_value.weight"),
            output_init_method=init_method_for("attention.dense.weight"),
        )
        self.post_attention_layernorm = norm()
        self.mlp = modules.mlp(
            config,
            init_method=init_method_for("mlp.dense_h_to_4h.weight"),
            output_init_method=init_method_for("mlp.dense_4h_to_h.weight"),
        )
        # An attribute, which `compile` replaces.
        self.dropout_of_own_part = dropout_of_own_part

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """`nn.Module.compile`, which takes torch.compile's arguments.

        Two functions are left out of the graphs: what changes the random stream, which torch.compile cannot trace, and
        attention within documents, whose lengths differ in every batch.
        """
        self.attention.core_attention = _left_out_of_graphs(core_attention)
        self.dropout_of_own_part = _left_out_of_graphs(dropout_of_own_part)
        super().compile(*args, **kwargs)

    def forward(
        self, x: Tensor, documents: Documents | None = None, attend: Attend | None = None, keys: Tensor | None = None
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]. documents, attend, keys: see `ParallelSelfAttention.forward`."""
        attention = (
            self.attention
            if documents is None and attend is None and keys is None
            else functools.partial(self.attention, documents=documents, attend=attend, keys=keys)
        )
        # Neither a loop nor a `with` around the branches: torch.compile leaves out a layer that has a break in one.
        norm = self.input_layernorm
        branch = checkpoint_without_output(norm, attention, x) if self.recompute else attention(norm(x))
        x = x + self._dropped(branch, keys, AFTER_ATTENTION)
        norm = self.post_attention_layernorm
        branch = checkpoint_without_output(norm, self.mlp, x) if self.recompute else self.mlp(norm(x))
        return x + self._dropped(branch, keys, AFTER_MLP)

    def _dropped(self, x: Tensor, keys: Tensor | None, site: int) -> Tensor:
        p = self.hidden_dropout if self.training else 0.0
        if keys is None and self.sequence_parallel and p > 0:
            return self.dropout_of_own_part(x, p)
        return hidden_dropout(x, p, self.sequence_parallel, keys=keys, site=site, rank=self.attention.dense.rank)


@functools.cache
def _left_out_of_graphs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One function for all layers, which share a graph. As a decorator this would load the compiler: 0.9 s of each
    start."""
    return torch.compiler.disable(  # type: ignore[no-any-return]
        function, reason="a change of random stream, or the lengths of documents"
    )
