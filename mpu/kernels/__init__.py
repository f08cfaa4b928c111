"""Chooses the kernel of each operation by device, dtype and shape. On a GPU, `TritonKernel` chooses between PyTorch and
Triton.

The other modules of `mpu` call the functions of this file. Each function has its equation in its docstring. The
docstring of a kernel, or of its module, gives the measurement that justifies the kernel. A test compares each kernel
with its equation. Kernels do not use process groups.

Legend: b batch, s sequence, n heads of this rank, d head size, t tokens, i input and o output features, v padded
vocabulary, tp tensor-parallel size.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.kernels import cpu_features
from mpu.kernels.attention import (
    attention_with_blockwise_backward,
    fused_attention,
    has_varlen_kernel,
    seeded_attention,
    varlen_attention,
)
from mpu.kernels.cross_entropy import (
    MatmulAccumulator,
    VocabParallelTargets,
    rows_in_cache,
    softmax_by_rows,
    vocab_parallel_softmax,
)
from mpu.kernels.dropout import seeded_dropout
from mpu.kernels.layer import (
    ResidualTerms,
    add_norm,
    has_fused_layer,
    linear_gelu,
    linear_gelu_backward,
    sum_terms,
)
from mpu.kernels.linear import (
    linear_in_float32_blocks,
    matrix_vector_product,
    pack_weight,
    packed_product,
    transposed_product,
    weight_gradient_in_parts,
)
from mpu.kernels.optimizer import adamw_, add_grads_, sum_of_squares
from mpu.kernels.triton_kernel import new_choices

__all__ = [
    "adamw_",
    "add_grads_",
    "add_rows_",
    "sum_of_squares",
    "MatmulAccumulator",
    "ResidualTerms",
    "VocabParallelTargets",
    "add_norm",
    "cast_for_autocast",
    "causal_attention",
    "gelu_tanh",
    "has_fused_layer",
    "has_seeded_attention",
    "linear_gelu",
    "linear_gelu_backward",
    "linear_without_gradient",
    "new_choices",
    "rows_in_cache",
    "seeded_attention",
    "seeded_dropout",
    "softmax_by_rows",
    "sum_terms",
    "uses_amx",
    "varlen_causal_attention",
    "vocab_parallel_softmax",
    "weight_for_inference",
    "weight_gradient",
]

MANY_ROWS = 17  # From this number of rows on, F.linear is the fastest in float32 and on processors with AMX.
FLOAT32_ROWS = 4  # From this number of rows on, blocks in float32 are faster on processors without bf16 products.


def cast_for_autocast(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operands of a linear layer in the dtype that torch.autocast uses for matrix products; without autocast
    they are unchanged.

    F.linear casts its operands itself. A custom autograd function must cast its operands before it saves them;
    otherwise the gradients would have a different dtype.
    """
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    x, weight = (t if t.dtype == torch.float64 else t.to(dtype) for t in (x, weight))  # torch does not cast float64.
    return x, weight, None if bias is None else bias.to(weight.dtype)


def linear_without_gradient(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """xAᵀ + b: [..., i], [o, i], [o] -> [..., o], without support for gradients.

    weight: stored by row, or a result of `weight_for_inference`.
    """
    if weight.is_mkldnn:
        return packed_product(x, weight, bias)
    x, weight, bias = cast_for_autocast(x, weight, bias)
    rows = x.numel() // x.size(-1)
    if x.is_cpu and x.dtype == torch.bfloat16 and not cpu_features.HAS_AMX:
        if rows >= FLOAT32_ROWS and not cpu_features.HAS_BF16_PRODUCTS:
            return linear_in_float32_blocks(x, weight, bias)
    elif x.is_cpu and rows < MANY_ROWS:
        if rows == 1:
            return matrix_vector_product(x, weight, bias)
        if weight.stride(0) != 1 and (x.dtype != torch.float32 or rows > 4):  # The weight is stored by row.
            return transposed_product(x, weight, bias)
    return F.linear(x, weight, bias)


def weight_for_inference(weight: Tensor) -> Tensor:
    """Return the weight [o, i] in the order that `linear_without_gradient` reads fastest. The values stay the same."""
    is_float32 = weight.dtype == torch.float32
    if not weight.is_cpu or not (is_float32 or weight.dtype == torch.bfloat16):
        return weight
    if cpu_features.HAS_PACKED_WEIGHTS and (is_float32 or cpu_features.HAS_BF16_PRODUCTS):
        return pack_weight(weight)
    return weight.t().contiguous().t() if is_float32 else weight


def uses_amx(x: Tensor) -> bool:
    """Return True if AMX multiplies x."""
    return cpu_features.HAS_AMX and x.is_cpu and x.dtype == torch.bfloat16


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dyᵀx: [t, o], [t, i] -> [o, i]."""
    return weight_gradient_in_parts(dy, x) if uses_amx(dy) else dy.t() @ x


def add_rows_(total: Tensor, rows: Tensor, gradients: Tensor) -> None:
    """total[rows[i]] += gradients[i] for each i: [v, h] float32, [t] int64, [t, h]. The order of summation is fixed."""
    if total.is_cuda:
        # index_put_ adds the gradients of a row one after the other, which takes 1 ms for 32k tokens of text. The
        # backward pass of an embedding adds them in parallel.
        total += torch.ops.aten.embedding_dense_backward(gradients.float(), rows, total.size(0), -1, False)
    else:
        total.index_put_((rows,), gradients.float(), accumulate=True)


def gelu_tanh(x: Tensor) -> Tensor:
    """½x(1 + tanh(√(2/π)(x + 0.044715x³))), GPT-2's activation. Any shape."""
    if x.is_cpu and torch.compiler.is_compiling():
        # Written with sigmoid, because a compiled exp takes half the time of a compiled tanh.
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
    return F.gelu(x, approximate="tanh")


def has_seeded_attention(device: str) -> bool:
    """Return True if `seeded_attention` supports the device, "cpu" or "cuda". The fused kernels of a GPU draw their own
    masks."""
    return device == "cpu"


def causal_attention(qkv: Tensor, dropout_p: float, bias: Tensor | None = None) -> Tensor:
    """softmax(QKᵀ/√d, keys up to the query's position) V for each head, with dropout of the probabilities.

    qkv: [s, b, n, 3, d]; each head has its query, key and value side by side. The result is [s, b, n·d].
    bias: see `split_qkv`; None unless `has_fused_layer(qkv)`.
    """
    if uses_amx(qkv) and dropout_p == 0 and torch.is_grad_enabled() and bias is None:
        return attention_with_blockwise_backward(qkv)
    return fused_attention(qkv, dropout_p, bias)


def varlen_causal_attention(qkv: Tensor, dropout_p: float, lengths: Sequence[int], cu_seqlens: Tensor) -> Tensor:
    """`causal_attention` within each document: [t, 1, n, 3, d] -> [t, 1, n·d].

    lengths: the lengths of successive documents, t in total.
    cu_seqlens: int32, 0 and the cumulative lengths, on the device.
    """
    if dropout_p == 0 and has_varlen_kernel(qkv):
        return varlen_attention(qkv, cu_seqlens, max(lengths))
    return torch.cat([causal_attention(document, dropout_p) for document in qkv.split(list(lengths))])
