"""The transformer layer on a GPU: the equations of `transformer.py`, with kernels that move less memory."""

from typing import Any

from torch import Tensor

from mpu import kernels
from mpu.attention import PackedSeqParams
from mpu.random import POST_ATTENTION_DROPOUT, POST_MLP_DROPOUT
from mpu.transformer import AttentionFn, ParallelTransformerLayer, TransformerConfig


class FusedTransformerLayer(ParallelTransformerLayer):
    """`ParallelTransformerLayer` with the functions of `kernels/layer.py` between its matrix products.

    It runs the base class's forward for everything that these functions do not support: a CPU, generation, selective
    recomputation and masks from torch's generators. It also does so if the first layer norm has a hook, because these
    functions do not call the modules of the layer norms."""

    def __init__(self, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self._approximate = "tanh" if config.gelu == "tanh" else "none"

    def forward(
        self,
        x: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        attention_fn: AttentionFn | None = None,
        dropout_seeds: Tensor | None = None,
    ) -> Tensor:
        """See `ParallelTransformerLayer.forward`."""
        p = self.hidden_dropout if self.training else 0.0
        is_plain = self.recompute or attention_fn is not None or (p > 0 and dropout_seeds is None)
        if is_plain or self.input_layernorm._forward_hooks or not kernels.has_fused_layer(x):
            return super().forward(x, packed_seq_params, attention_fn, dropout_seeds)
        attention, mlp = self.attention, self.mlp
        seeds, first = dropout_seeds if p > 0 else None, attention.dense.rank * x.size(0) * self.sequence_parallel

        x, y = kernels.add_norm(x, None, None, self.input_layernorm)
        sums_bias = packed_seq_params is None and not (self.training and attention.attention_dropout > 0)
        qkv = attention.split_heads(attention.query_key_value(y, bias_gradient=not sums_bias))
        bias = attention.query_key_value.bias if sums_bias else None
        first_head = attention.dense.rank * qkv.size(2)
        y = attention.compute_attention(qkv, packed_seq_params, dropout_seeds, first_head, bias)
        branch = attention.dense(y, skip_bias_add=True)
        dropout = seeds, p, POST_ATTENTION_DROPOUT, first
        x, y = kernels.add_norm(x, branch, attention.dense.bias, self.post_attention_layernorm, dropout)
        inside = mlp.dense_h_to_4h(y, bias_gradient=False)  # [s, b, f/tp]
        y = kernels.gelu_with_bias_gradient(inside, mlp.dense_h_to_4h.bias, self._approximate)
        branch = mlp.dense_4h_to_h(y, skip_bias_add=True)
        return kernels.add_norm(x, branch, mlp.dense_4h_to_h.bias, None, (seeds, p, POST_MLP_DROPOUT, first))[0]
