"""The transformer layer, whose attention and MLP are split over a tensor-parallel group (arXiv:1909.08053, section 3).

Legend: b batch, s sequence, h hidden, n heads, d head size, f width inside the MLP, tp tensor-parallel size.

Hidden states [s, b, h] are replicated. Activations between a column- and a row-parallel linear layer are split. With
sequence_parallel (arXiv:2205.05198), hidden states outside of these layers are [s/tp, b, h], which also splits the work
and the saved activations of layer norms and dropout.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mpu import kernels
from mpu.attention import PackedSeqParams, core_attention
from mpu.cross_entropy import vocab_parallel_linear_cross_entropy
from mpu.grads import mark_sequence_parallel
from mpu.layers import ColumnParallelLinear, Device, InitMethod, PositionEmbedding, RowParallelLinear
from mpu.partition import divide
from mpu.random import (
    POST_ATTENTION_DROPOUT,
    POST_MLP_DROPOUT,
    apply_hidden_dropout,
    checkpoint_without_output,
    current_rng_tracker,
)

GELU_FORMS = ("tanh", "erf")
RECOMPUTE_GRANULARITY = ("none", "selective", "full")
AttentionFn = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TransformerConfig:
    """The configuration of a layer and its parts. Fields that megatron.core also has keep the names of megatron.core.
    Raises ValueError if values are inconsistent.

    hidden_size: h.
    num_attention_heads: n, which must divide h.
    ffn_hidden_size: f, the width inside the MLP.
    attention_dropout: dropout of the attention probabilities.
    hidden_dropout: dropout of the outputs of attention and MLP.
    layernorm_epsilon: the number that layer norms add to the variance.
    gelu: "tanh" (GPT-2) or "erf".

    recompute_granularity: what backward computes again instead of loading saved activations. "selective": the outputs
        of GELU and layer norm (in megatron.core: the core of attention). "full": everything except the inputs of
        layers. The model implements "full"; a layer ignores this value.
    sequence_parallel: shard activations along the sequence between the split layers; the group's size must divide the
        sequence.
    group: the ranks over which the layer is split (default: the default tensor-parallel group).
    device: the device of the parameters.
    """

    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    layernorm_epsilon: float = 1e-5
    gelu: str = "tanh"
    recompute_granularity: str | None = "none"
    sequence_parallel: bool = False
    group: ProcessGroup | None = None
    device: Device = None

    def __post_init__(self) -> None:
        divide(self.hidden_size, self.num_attention_heads)
        for value, choices in ((self.gelu, GELU_FORMS), (self.recompute_granularity or "none", RECOMPUTE_GRANULARITY)):
            if value not in choices:
                raise ValueError(f"{value!r} is not one of {', '.join(choices)}")

    @property
    def head_size(self) -> int:
        """d = h / n."""
        return self.hidden_size // self.num_attention_heads

    @property
    def layer_kwargs(self) -> dict[str, Any]:
        """The arguments for the constructors of the parallel layers."""
        return {"sequence_parallel": self.sequence_parallel, "group": self.group, "device": self.device}


class LayerNorm(nn.LayerNorm):
    """torch's layer norm over [..., normalized_shape], replicated. With sequence_parallel, the gradients of its
    parameters are partial sums. The positional arguments are those of Apex's layer norm."""

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
    """Causal self-attention; its heads are split over the ranks. [s, b, h] -> [s, b, h], or [s/tp, b, h] ->
    [s/tp, b, h] with sequence_parallel. Forward: one all-reduce; backward: one all-reduce. With sequence parallelism,
    forward: an all-gather and a reduce-scatter; backward: two all-gathers and a reduce-scatter.

    The rows of the fused query-key-value weight are ordered [n, 3, d] (head first), so that each rank's shard is
    contiguous. Raises ValueError if tp does not divide n.

    submodules: the implementations of the linear layers.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        init_method: InitMethod,
        output_init_method: InitMethod,
        submodules: "ModelSubmodules | None" = None,
    ) -> None:
        super().__init__()
        submodules = submodules or DEFAULT_SUBMODULES
        h = config.hidden_size
        self.head_size, self.attention_dropout = config.head_size, config.attention_dropout
        self.query_key_value = submodules.column_parallel_linear(
            h, 3 * h, gather_output=False, init_method=init_method, **config.layer_kwargs
        )
        self.dense = submodules.row_parallel_linear(
            h, h, input_is_parallel=True, init_method=output_init_method, **config.layer_kwargs
        )
        divide(config.num_attention_heads, self.dense.tp_size)
        # The function for attention within documents, and for attention whose dropout masks come from torch's
        # generators. `ParallelTransformerLayer.compile` sets a function that runs outside the graph.
        self.eager_attention_fn = core_attention

    def forward(
        self,
        x: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        attention_fn: AttentionFn | None = None,
        dropout_seeds: Tensor | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h].

        packed_seq_params: lengths of the documents; None lets each token attend to all tokens before it.
        attention_fn: replaces causal attention, [s, b, n/tp, 3, d] -> [s, b, h/tp], for example by
            `KeyValueCache.attend`.
        dropout_seeds: int64 [b, 3], the entry of this layer in the result of `mpu.make_dropout_seeds`. Without seeds,
            torch's generators draw the masks.
        """
        qkv = self.split_heads(self.query_key_value(x))
        out: Tensor = self.dense(
            attention_fn(qkv)
            if attention_fn is not None
            else self.compute_attention(qkv, packed_seq_params, dropout_seeds, self.dense.tp_rank * qkv.size(2))
        )
        return out

    def split_heads(self, qkv: Tensor) -> Tensor:
        """Reshape [s, b, 3h/tp] to [s, b, n/tp, 3, d]."""
        return qkv.view(*qkv.shape[:2], -1, 3, self.head_size)

    def compute_attention(
        self,
        qkv: Tensor,
        packed_seq_params: PackedSeqParams | None,
        dropout_seeds: Tensor | None,
        first_head: int,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of successive heads: [s, b, n/tp, 3, d] -> [s, b, h/tp].

        first_head: the number of the first head in qkv.
        bias: see `kernels.causal_attention`. With documents or dropout, `bias` must be None.
        """
        dropout_p = self.attention_dropout if self.training else 0.0
        if dropout_p == 0 and packed_seq_params is None:
            return kernels.causal_attention(qkv, 0.0, bias)
        can_be_compiled = packed_seq_params is None and dropout_seeds is not None
        attention = core_attention if can_be_compiled else self.eager_attention_fn
        return attention(qkv, dropout_p, packed_seq_params, dropout_seeds, first_head)


class ParallelMLP(nn.Module):
    """gelu(xAᵀ + a)Bᵀ + b; A and a are split by output features, B by input features.
    [s, b, h] -> [s, b, h], or [s/tp, b, h] -> [s/tp, b, h] with sequence_parallel. Collectives: as in
    `ParallelSelfAttention`.

    With selective recomputation, backward computes the output of GELU again. This output is a quarter of a layer's
    activations.

    submodules: the implementations of the linear layers.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        init_method: InitMethod,
        output_init_method: InitMethod,
        submodules: "ModelSubmodules | None" = None,
    ) -> None:
        super().__init__()
        submodules = submodules or DEFAULT_SUBMODULES
        h, f = config.hidden_size, config.ffn_hidden_size
        self.gelu: Callable[[Tensor], Tensor] = kernels.gelu_tanh if config.gelu == "tanh" else F.gelu
        self.gelu_approximate = "tanh" if config.gelu == "tanh" else "none"  # argument of F.gelu
        self.recompute = config.recompute_granularity == "selective"
        self.dense_h_to_4h = submodules.column_parallel_linear(
            h, f, gather_output=False, init_method=init_method, **config.layer_kwargs
        )
        self.dense_4h_to_h = submodules.row_parallel_linear(
            f, h, input_is_parallel=True, init_method=output_init_method, **config.layer_kwargs
        )

    def forward(self, x: Tensor) -> Tensor:
        intermediate = self.dense_h_to_4h(x)  # [s, b, f/tp]
        out: Tensor = (
            checkpoint_without_output(self.gelu, self.dense_4h_to_h, intermediate)
            if self.recompute
            else self.dense_4h_to_h(self.gelu(intermediate))
        )
        return out


@dataclass(frozen=True)
class ModelSubmodules:
    """The implementations of a model's parts, like the `...Submodules` of megatron.core. Each field is a class or a
    function with the signature of its default."""

    self_attention: Callable[..., ParallelSelfAttention] = ParallelSelfAttention
    mlp: Callable[..., ParallelMLP] = ParallelMLP
    column_parallel_linear: Callable[..., ColumnParallelLinear] = ColumnParallelLinear
    row_parallel_linear: Callable[..., RowParallelLinear] = RowParallelLinear
    layer_norm: Callable[..., LayerNorm] = LayerNorm
    position_embedding: Callable[..., PositionEmbedding] = PositionEmbedding
    linear_cross_entropy: Callable[..., Tensor] = vocab_parallel_linear_cross_entropy


DEFAULT_SUBMODULES = ModelSubmodules()


class ParallelTransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both branches.
    [s, b, h] -> [s, b, h], or [s/tp, b, h] -> [s/tp, b, h] with sequence_parallel.

    init_method_for: returns the init_method of a weight, given its name in this layer, e.g. "attention.dense.weight".
    submodules: the implementations of the layer's parts.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        init_method_for: Callable[[str], InitMethod],
        submodules: ModelSubmodules = DEFAULT_SUBMODULES,
    ) -> None:
        super().__init__()
        self.hidden_dropout, self.sequence_parallel = config.hidden_dropout, config.sequence_parallel
        self.recompute = config.recompute_granularity == "selective"
        norm = functools.partial(
            submodules.layer_norm,
            config.hidden_size,
            config.layernorm_epsilon,
            sequence_parallel=config.sequence_parallel,
            device=config.device,
        )
        self.input_layernorm = norm()
        self.attention = submodules.self_attention(
            config,
            init_method=init_method_for("attention.query_key_value.weight"),
            output_init_method=init_method_for("attention.dense.weight"),
            submodules=submodules,
        )
        self.post_attention_layernorm = norm()
        self.mlp = submodules.mlp(
            config,
            init_method=init_method_for("mlp.dense_h_to_4h.weight"),
            output_init_method=init_method_for("mlp.dense_4h_to_h.weight"),
            submodules=submodules,
        )
        self._is_compiled = False

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """`nn.Module.compile`, with torch.compile's arguments. The layer becomes one graph. Attention within documents
        stays outside the graph, because the lengths of documents differ in every batch. Dropout needs `dropout_seeds`.
        """
        self.attention.eager_attention_fn = _eager_attention()
        super().compile(*args, **kwargs)
        self._is_compiled = True

    def __call__(
        self,
        x: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        attention_fn: AttentionFn | None = None,
        dropout_seeds: Tensor | None = None,
    ) -> Tensor:
        """Call `forward`. If the attention of a compiled layer draws dropout masks from a generator, as on a GPU, the
        whole layer runs in the random stream of the tracker. Hidden dropout does not use the stream, because its masks
        are computed from `dropout_seeds`."""
        device = self.attention.dense.weight.device.type
        attention_draws = (
            self.training and self.attention.attention_dropout > 0 and not kernels.has_seeded_attention(device)
        )
        uses_tracker = self._is_compiled and attention_draws and dropout_seeds is not None and packed_seq_params is None
        with current_rng_tracker().fork() if uses_tracker else contextlib.nullcontext():
            out: Tensor = super().__call__(x, packed_seq_params, attention_fn, dropout_seeds)
        return out

    def forward(
        self,
        x: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        attention_fn: AttentionFn | None = None,
        dropout_seeds: Tensor | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h].

        packed_seq_params, attention_fn, dropout_seeds: see `ParallelSelfAttention.forward`.
        """
        attention = functools.partial(
            self.attention,
            packed_seq_params=packed_seq_params,
            attention_fn=attention_fn,
            dropout_seeds=dropout_seeds,
        )
        # The branches are not in a loop or a `with` block: torch.compile skips a layer whose graph breaks inside one.
        norm = self.input_layernorm
        branch = checkpoint_without_output(norm, attention, x) if self.recompute else attention(norm(x))
        x = x + self._dropout(branch, dropout_seeds, POST_ATTENTION_DROPOUT)
        norm = self.post_attention_layernorm
        branch = checkpoint_without_output(norm, self.mlp, x) if self.recompute else self.mlp(norm(x))
        return x + self._dropout(branch, dropout_seeds, POST_MLP_DROPOUT)

    def _dropout(self, x: Tensor, dropout_seeds: Tensor | None, location: int) -> Tensor:
        return apply_hidden_dropout(
            x,
            self.hidden_dropout if self.training else 0.0,
            self.sequence_parallel,
            dropout_seeds=dropout_seeds,
            location=location,
            first_position=self.attention.dense.first_position(x),
        )


class FusedTransformerLayer(ParallelTransformerLayer):
    """`ParallelTransformerLayer` with a second forward for GPUs. On a CPU the layer only runs the base class's forward.

    On a GPU, the layer calls the fused functions of `kernels/layer.py`. These functions read and write less memory than
    PyTorch's operators. The layer then returns `kernels.ResidualTerms`, which the first
    kernel of the next layer adds. `kernels.sum_terms` returns the sum of the terms. The bias of a linear layer is
    added, and its gradient is computed, by the layer or by one of these functions:

        linear layer                      adds the bias    computes its gradient
        attention.query_key_value         the layer        `split_qkv`; with documents or attention dropout, the layer
        attention.dense, dense_4h_to_h    `add_norm`       `add_norm`
        mlp.dense_h_to_4h                 the layer        `linear_gelu_backward`

    The base class's forward runs in generation with a key-value cache, with selective recomputation, if torch's
    generators draw the masks of hidden dropout, and if `kernels.has_fused_layer` is false, because the fused functions
    do not support these cases. The base class's forward also runs if a layer norm, `attention`, `mlp` or a linear layer
    of `mlp` has a hook, because the fused forward does not call them as modules.
    """

    def forward(  # type: ignore[override]
        self,
        x: Tensor | kernels.ResidualTerms,
        packed_seq_params: PackedSeqParams | None = None,
        attention_fn: AttentionFn | None = None,
        dropout_seeds: Tensor | None = None,
    ) -> Tensor | kernels.ResidualTerms:
        """See `ParallelTransformerLayer.forward`. `kernels.add_norm` ends a branch and starts the next one: it returns
        x = x + dropout(branch + bias) and y = norm(x)."""
        terms = kernels.ResidualTerms(x) if isinstance(x, Tensor) else x
        dropout_p = self.hidden_dropout if self.training else 0.0
        is_unsupported = self.recompute or attention_fn is not None or (dropout_p > 0 and dropout_seeds is None)
        attention, mlp = self.attention, self.mlp
        modules = self.input_layernorm, attention, self.post_attention_layernorm, mlp, *mlp.children()
        if is_unsupported or not kernels.has_fused_layer(terms.x) or any(map(_has_hooks, modules)):
            return super().forward(kernels.sum_terms(x), packed_seq_params, attention_fn, dropout_seeds)
        seeds = dropout_seeds if dropout_p > 0 else None
        first_position = attention.dense.first_position(terms.x)

        x, y = kernels.add_norm(terms, self.input_layernorm)
        # `causal_attention`, which runs in this case, computes the gradient of the bias with `split_qkv`.
        attention_sums_bias_grad = packed_seq_params is None and not (self.training and attention.attention_dropout > 0)
        qkv = attention.split_heads(attention.query_key_value(y, bias_gradient=not attention_sums_bias_grad))
        bias = attention.query_key_value.bias if attention_sums_bias_grad else None
        first_head = attention.dense.tp_rank * qkv.size(2)
        y = attention.compute_attention(qkv, packed_seq_params, dropout_seeds, first_head, bias)
        branch = attention.dense(y, skip_bias_add=True)
        terms = kernels.ResidualTerms(
            x, branch, attention.dense.bias, seeds, dropout_p, POST_ATTENTION_DROPOUT, first_position
        )
        x, y = kernels.add_norm(terms, self.post_attention_layernorm)
        branch = mlp.dense_4h_to_h.of_gelu(mlp.dense_h_to_4h.with_gelu(y, mlp.gelu_approximate))
        return kernels.ResidualTerms(
            x, branch, mlp.dense_4h_to_h.bias, seeds, dropout_p, POST_MLP_DROPOUT, first_position
        )


def _has_hooks(module: nn.Module) -> bool:
    """Return True if `module` has hooks, which run only if the module is called."""
    return any((module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks))


@functools.cache
def _eager_attention() -> Callable[..., Tensor]:
    """Return `core_attention` as a function that stays outside compiled graphs. The result is cached, so that all
    layers share one graph. torch.compiler.disable as a decorator would load the compiler at import, which takes
    0.9 s."""
    return torch.compiler.disable(core_attention, reason="the lengths of documents")  # type: ignore[no-any-return]
