"""Linear layers on a CPU: xAᵀ + b without a gradient, for the few rows of x in generation and for processors without
bf16 products; and the gradient of a weight. All times are in ms. `cpu_features.py` has more times.

Legend: r rows of x, t tokens, i input features, o output features.
"""

import torch
from torch import Tensor

_ELEMENTS = 1 << 19  # elements of the weight that exist in float32 at once: 2 MB


def matrix_vector_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """xAᵀ + b for one row: [..., i] -> [..., o].

    On 2 cores with AMX this product takes 7 ms in bf16, and F.linear takes 15 ms. In bf16 without AMX, F.linear is
    faster.
    """
    row = x.reshape(-1)  # [..., i] -> [i]
    y = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
    return y.view(*x.shape[:-1], weight.size(0))  # [o] -> [..., o]


def transposed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(A xᵀ)ᵀ + b: [..., i] -> [..., o], contiguous, because attention is slow for a result stored by column.

    For 8 rows on 2 cores with AMX this product takes 10 ms in bf16 (F.linear: 15) and 33 ms in float32 (F.linear: 41,
    or 23 if A is stored by column). In bf16 without AMX, F.linear or blocks in float32 are faster.
    """
    y = torch.mm(weight, x.reshape(-1, x.size(-1)).t()).t()  # [..., i] -> [r, i]; [o, r] -> [r, o]
    by_row = torch.empty_like(y, memory_format=torch.contiguous_format)
    by_row = by_row.copy_(y) if bias is None else torch.add(y, bias, out=by_row)
    return by_row.view(*x.shape[:-1], weight.size(0))  # [r, o] -> [..., o]


def linear_in_float32_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., i], [o, i], [o] in 16 bits -> [..., o] of the same dtype, computed in float32 and rounded once at the end.

    With two threads and without bf16 products, the blocks take 44 ms for 4 rows (F.linear: 61), 54 for 8 rows (84) and
    95 for 16 rows (124). F.linear is faster for one row (18 instead of 37), and for any number of rows if AVX-512 has
    bf16 products.
    """
    rows = x.reshape(-1, x.size(-1)).float()  # [..., i] -> [r, i]
    y = x.new_empty(rows.size(0), weight.size(0))
    for start in range(0, weight.size(0), size := max(_ELEMENTS // weight.size(1), 1)):
        part = slice(start, start + size)
        product = torch.mm(rows, weight[part].float().t())
        y[:, part] = product if bias is None else product.add_(bias[part])
    return y.view(*x.shape[:-1], weight.size(0))  # [r, o] -> [..., o]


PACKED_ROWS = 8  # rows of x for which oneDNN chooses the blocks: 2 to 64 are equally fast, 1 is slower in float32


def pack_weight(weight: Tensor) -> Tensor:
    """Return the weight [o, i] in the blocked layout of oneDNN, for `packed_product`. The values stay the same.

    F.linear brings the weight into blocks in each call. GPT-2 124M's layers and head on one thread of an AMD EPYC,
    packed and with F.linear: 21 and 29 ms for one row in bf16, 25 and 36 for 8 rows, 50 and 76 for 8 rows in float32.
    One row in float32 on two threads takes 24 ms packed, 39 with F.linear, and 29 with a weight that is stored by
    column, for which `torch.mv` uses only one thread.
    """
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    return packed


def packed_product(x: Tensor, packed_weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., i] -> [..., o], with a result of `pack_weight`."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed_weight, bias, "none", [], "")
    return y


PARTS = 4
MIN_TOKENS = 512  # A part has at least this number of tokens.


def weight_gradient_in_parts(dy: Tensor, x: Tensor) -> Tensor:
    """dyᵀx: [t, o], [t, i] -> [o, i], in the dtype of both. Each part after the first rounds the sum once more.

    For a CPU with AMX in bf16: oneDNN with AMX is slow if the left matrix of a product is transposed and long. On 2
    cores with 2,048 tokens, one whole product runs at 1.3 TFLOP/s, 4 parts at 1.9, and a layer's other products at 2.5.
    On one thread, a product of 3,072 x 768 takes 103 ms, and its parts take 71 ms. Without AMX the parts are slower:
    603 ms instead of 559.
    """
    tokens = max(MIN_TOKENS, -(-dy.size(0) // PARTS))
    total = dy[:tokens].t() @ x[:tokens]
    for start in range(tokens, dy.size(0), tokens):
        part = slice(start, start + tokens)
        total.addmm_(dy[part].t(), x[part])
    return total
