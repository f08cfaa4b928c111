"""Which kernel computes what, by device, dtype and case.

The files above this folder, which read like the papers, call the functions below. `linear`, `linear_without_gradient`,
`weight_gradient`, `dropout` and `gelu_tanh` have the plain equation as their last line; the lines before it say where
something else is faster. The equation of the others is in their docstring. The docstring of each kernel, or of its
file, gives the measurement that justifies it, and a test compares it with the equation. No kernel knows of ranks.

Legend: b batch, s sequence, n heads of this rank, d head size, t tokens, i input and o output features, v padded
vocabulary, p model-parallel size.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.kernels.attention import (
    attention_with_blockwise_backward,
    fused_attention,
    has_varlen_kernel,
    materialised_attention,
    materialised_attention_in_float32,
    varlen_attention,
)
from mpu.kernels.attention_keyed import keyed_attention
from mpu.kernels.cross_entropy import SumOfProducts, VocabShard, rows_in_cache, vocab_parallel_softmax
from mpu.kernels.dropout import dropout_16_bits, keyed_dropout
from mpu.kernels.linear import (
    LinearWithWeightGradient,
    WeightGradientSink,
    linear_in_float32_blocks,
    matrix_vector_product,
    transposed_product,
    weight_gradient_in_parts,
)
from mpu.kernels.processor import HAS_AMX, HAS_BF16_PRODUCTS
from mpu.kernels.recomputed_output import checkpoint_without_output

__all__ = [
    "HAS_AMX",
    "HAS_BF16_PRODUCTS",
    "SumOfProducts",
    "VocabShard",
    "WeightGradientSink",
    "attention_kernel",
    "attention_takes_keys",
    "cast_for_autocast",
    "causal_attention",
    "checkpoint_without_output",
    "document_attention",
    "dropout",
    "gelu_tanh",
    "keyed_attention",
    "keyed_dropout",
    "linear",
    "linear_without_gradient",
    "rows_in_cache",
    "vocab_parallel_softmax",
    "weight_gradient",
]

MATERIALISED_UP_TO = 512  # tokens of a sequence; for longer ones the scores cost more memory than they save time
MANY_ROWS = 17  # from here on F.linear is the fastest, in float32 and where the processor has AMX
FLOAT32_ROWS = 4  # from here on blocks in float32 are faster where the processor has no products in bf16


def cast_for_autocast(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a linear layer in the dtype that torch.autocast gives to its products; as they are without it.

    torch casts inside of its own products. An autograd function that had saved uncast operands would find the gradient
    in another dtype.
    """
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    x, weight = (t if t.dtype == torch.float64 else t.to(dtype) for t in (x, weight))  # torch leaves float64 alone
    return x, weight, None if bias is None else bias.to(weight.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, sink: WeightGradientSink | None = None) -> Tensor:
    """xAᵀ + b: [..., i], [o, i], [o] -> [..., o]. sink: makes the weight gradient in backward (default: autograd)."""
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        return linear_without_gradient(x, weight, bias)
    x, weight, bias = cast_for_autocast(x, weight, bias)
    if sink is None and HAS_AMX and x.device.type == "cpu" and x.dtype == torch.bfloat16:
        sink = weight_gradient_in_parts
    if sink is not None:
        return LinearWithWeightGradient.apply(x, weight, bias, sink)  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


def linear_without_gradient(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """xAᵀ + b: [..., i], [o, i], [o] -> [..., o], of which no gradient can be asked."""
    x, weight, bias = cast_for_autocast(x, weight, bias)
    rows = x.numel() // x.size(-1)
    if x.device.type == "cpu" and x.dtype == torch.bfloat16 and not HAS_AMX:
        if rows >= FLOAT32_ROWS and not HAS_BF16_PRODUCTS:
            return linear_in_float32_blocks(x, weight, bias)
    elif x.device.type == "cpu" and rows < MANY_ROWS:
        if rows == 1:
            return matrix_vector_product(x, weight, bias)
        if weight.stride(0) != 1 and (x.dtype != torch.float32 or rows > 4):  # a weight stored by row
            return transposed_product(x, weight, bias)
    return F.linear(x, weight, bias)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dyᵀx: [t, o], [t, i] -> [o, i]."""
    if HAS_AMX and dy.device.type == "cpu" and dy.dtype == torch.bfloat16:
        return weight_gradient_in_parts(dy, x)
    return dy.t() @ x


def dropout(x: Tensor, p: float) -> Tensor:
    """x with each element zeroed with probability p and the others raised by 1 / (1 - p). Any shape."""
    if p == 0.0:
        return x
    if x.device.type == "cpu":
        return dropout_16_bits(x, p)
    return F.dropout(x, p)


def gelu_tanh(x: Tensor) -> Tensor:
    """½x(1 + tanh(√(2/π)(x + 0.044715x³))), GPT-2's activation. Any shape."""
    if x.device.type == "cpu" and torch.compiler.is_compiling():
        # The same function by its sigmoid: the compiled exp takes half the time of the compiled tanh.
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
    return F.gelu(x, approximate="tanh")


def attention_takes_keys(device: str) -> bool:
    """Whether there is a `keyed_attention` for "cpu" or "cuda": the fused kernels of a GPU draw their own masks."""
    return device == "cpu"


def causal_attention(qkv: Tensor, dropout_p: float) -> Tensor:
    """softmax(QKᵀ/√d, keys up to the query's own position) V for each head, with dropout of the probabilities.

    qkv: [s, b, n, 3, d], queries, keys and values of a head side by side. Returns [s, b, n·d].
    """
    kernel = attention_kernel(qkv.device.type, qkv.dtype, qkv.size(0), dropout_p, gradient=torch.is_grad_enabled())
    return kernel(qkv, dropout_p)


def attention_kernel(
    device: str, dtype: torch.dtype, s: int, dropout_p: float, *, gradient: bool
) -> Callable[[Tensor, float], Tensor]:
    """The function that `causal_attention` calls. device: "cpu" or "cuda"."""
    if device == "cpu" and dtype == torch.bfloat16:
        if dropout_p > 0 and s <= MATERIALISED_UP_TO:
            # Without gradients too: a checkpointed layer must drop the same elements when it is computed again.
            return materialised_attention if HAS_AMX else materialised_attention_in_float32
        if dropout_p == 0 and gradient and HAS_AMX:
            return attention_with_blockwise_backward
    return fused_attention


def document_attention(qkv: Tensor, dropout_p: float, lengths: Sequence[int], cu_seqlens: Tensor) -> Tensor:
    """`causal_attention` within each document: [t, 1, n, 3, d] -> [t, 1, n·d].

    lengths: of the documents, which follow each other; t in all. cu_seqlens: int32, 0 and their sums, on the device.
    """
    if dropout_p == 0 and has_varlen_kernel(qkv):
        return varlen_attention(qkv, cu_seqlens, max(lengths))
    return torch.cat([causal_attention(document, dropout_p) for document in qkv.split(list(lengths))])
