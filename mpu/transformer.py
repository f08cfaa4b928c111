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
from torch.distributed import ProcessGroup

from mpu import kernels
from mpu.attention import Documents, core_attention
from mpu.cross_entropy import vocab_parallel_linear_cross_entropy
from mpu.grads import mark_sequence_parallel
from mpu.layers import ColumnParallelLinear, Device, InitMethod, PositionEmbedding, RowParallelLinear
from mpu.partition import divide
from mpu.random import AFTER_ATTENTION, AFTER_MLP, checkpoint_without_output, dropout_of_own_part, hidden_dropout

GELU = ("tanh", "erf")
RECOMPUTE_GRANULARITY = ("none", "selective", "full")
Attend = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TransformerConfig:
    """One description for a layer and its parts, with the names of megatron.core. Raises ValueError if the numbers do
    not fit each other.

    hidden_size: h. num_attention_heads: n, which divides h. ffn_hidden_size: f, the width inside the MLP.
    attention_dropout: of the attention probabilities. hidden_dropout: of the outputs of attention and MLP.
    layernorm_epsilon: is added to the variance. gelu: "tanh", GPT-2's form, or "erf".
    recompute_granularity: what is computed again in backward instead of being kept. "selective": the outputs of GELU
    and of the layer norms. "full": all but the input of every `recompute_num_layers` layers; the stack of layers does
    this.
    distribute_saved_activations: with "full", every rank of the group keeps only its part of each of these inputs;
    with sequence_parallel it has no more. checkpoint_in_cpu: with "full", they are kept in the host's memory.
    cpu_offloading_num_layers: with "none", what the first so many layers keep is there. On a CPU, whose memory is the
    host's, the two change nothing. The stack of layers does all three.
    sequence_parallel: between the split layers the sequence is split over the group, which must divide it.
    group: over which the layer is split (default: the default model-parallel group). device: of the parameters.
    """

    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    layernorm_epsilon: float = 1e-5
    gelu: str = "tanh"
    recompute_granularity: str = "none"
    recompute_num_layers: int = 1
    distribute_saved_activations: bool = False
    checkpoint_in_cpu: bool = False
    cpu_offloading_num_layers: int = 0
    sequence_parallel: bool = False
    group: ProcessGroup | None = None
    device: Device = None

    def __post_init__(self) -> None:
        divide(self.hidden_size, self.num_attention_heads)
        for value, choices in ((self.gelu, GELU), (self.recompute_granularity, RECOMPUTE_GRANULARITY)):
            if value not in choices:
                raise ValueError(f"{value!r} is none of {', '.join(choices)}")

    @property
    def head_size(self) -> int:
        """d = h / n."""
        return self.hidden_size // self.num_attention_heads

    @property
    def placement(self) -> dict[str, Any]:
        """The arguments of a parallel layer that say how it is split and where its parameters are."""
        return {"sequence_parallel": self.sequence_parallel, "group": self.group, "device": self.device}


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
        device: Device = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device=device)
        if sequence_parallel:
            mark_sequence_parallel(self.parameters())


class ParallelSelfAttention(nn.Module):
    """Causal self-attention, heads split over the ranks. [s, b, h] -> [s, b, h], or [s/p, b, h] -> [s/p, b, h] with
    sequence_parallel. Forward: one all-reduce; backward: one. Under sequence parallelism each becomes two halves.

    The fused query-key-value weight is head-major, its rows ordered as [n, 3, d], so that every rank's shard is
    contiguous. column, row: make the linear layers. Raises ValueError if p does not divide n.
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
        h = config.hidden_size
        self.head_size, self.attention_dropout = config.head_size, config.attention_dropout
        self.query_key_value = column(h, 3 * h, gather_output=False, init_method=init_method, **config.placement)
        self.dense = row(h, h, input_is_parallel=True, init_method=output_init_method, **config.placement)
        divide(config.num_attention_heads, self.dense.world_size)
        # An attribute, which the layer's `compile` replaces by a function that is left out of compiled graphs.
        self.core_attention = core_attention

    def forward(
        self, x: Tensor, documents: Documents | None = None, attend: Attend | None = None, keys: Tensor | None = None
    ) -> Tensor:
        """[s, b, h] -> [s, b, h].

        documents: of the whole sequence; None lets every token see all before it. attend: replaces causal attention,
        [s, b, n/p, 3, d] -> [s, b, h/p]; a `KeyValueCache` has one. keys: this layer's of `mpu.dropout_keys`; None
        lets dropout draw from torch's generators.
        """
        qkv = self.split_heads(self.query_key_value(x))
        out: Tensor = self.dense(self.of_heads(qkv, documents, attend, keys, self.dense.rank * qkv.size(2)))
        return out

    def split_heads(self, qkv: Tensor) -> Tensor:
        """[s, b, 3h/p] -> [s, b, n/p, 3, d]."""
        return qkv.view(*qkv.shape[:2], -1, 3, self.head_size)

    def of_heads(
        self, qkv: Tensor, documents: Documents | None, attend: Attend | None, keys: Tensor | None, first_head: int
    ) -> Tensor:
        """Attention of some heads, of which first_head is the first: [s, b, n/p, 3, d] -> [s, b, h/p]."""
        dropout_p = self.attention_dropout if self.training else 0.0
        if attend is not None:
            return attend(qkv)
        if dropout_p == 0 and documents is None:
            return kernels.causal_attention(qkv, 0.0)
        return self.core_attention(qkv, dropout_p, documents, keys, first_head)


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
        h, f = config.hidden_size, config.ffn_hidden_size
        self.gelu: Callable[[Tensor], Tensor] = kernels.gelu_tanh if config.gelu == "tanh" else F.gelu
        self.recompute = config.recompute_granularity == "selective"
        self.dense_h_to_4h = column(h, f, gather_output=False, init_method=init_method, **config.placement)
        self.dense_4h_to_h = row(f, h, input_is_parallel=True, init_method=output_init_method, **config.placement)

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
    """The parts that a model is made of: classes, or functions with their arguments, that stand in for the plain ones.
    Each is called as the plain one. (megatron.core's ModuleSpec.)"""

    attention: Callable[..., ParallelSelfAttention] = ParallelSelfAttention
    mlp: Callable[..., ParallelMLP] = ParallelMLP
    column: Callable[..., ColumnParallelLinear] = ColumnParallelLinear
    row: Callable[..., RowParallelLinear] = RowParallelLinear
    layer_norm: Callable[..., LayerNorm] = LayerNorm
    position_embedding: Callable[..., PositionEmbedding] = PositionEmbedding
    linear_cross_entropy: Callable[..., Tensor] = vocab_parallel_linear_cross_entropy


PLAIN_MODULES = Modules()


class ParallelTransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), dropout on both branches. [s, b, h] -> [s, b, h], or
    [s/p, b, h] -> [s/p, b, h] with sequence_parallel.

    init_method_for: gives the init_method of a weight by its name here, for example "attention.dense.weight". modules:
    the parts of the layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        init_method_for: Callable[[str], InitMethod],
        modules: Modules = PLAIN_MODULES,
    ) -> None:
        super().__init__()
        self.hidden_dropout, self.sequence_parallel = config.hidden_dropout, config.sequence_parallel
        self.recompute = config.recompute_granularity == "selective"
        norm = functools.partial(
            modules.layer_norm,
            config.hidden_size,
            config.layernorm_epsilon,
            sequence_parallel=config.sequence_parallel,
            device=config.device,
        )
        linears = {"column": modules.column, "row": modules.row}
        self.input_layernorm = norm()
        self.attention = modules.attention(
            config,
            init_method=init_method_for("attention.query_key_value.weight"),
            output_init_method=init_method_for("attention.dense.weight"),
            **linears,
        )
        self.post_attention_layernorm = norm()
        self.mlp = modules.mlp(
            config,
            init_method=init_method_for("mlp.dense_h_to_4h.weight"),
            output_init_method=init_method_for("mlp.dense_4h_to_h.weight"),
            **linears,
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
