"""xAᵀ + b on a CPU where no gradient is needed: for the few rows of x that generation has, and for processors without
products in bf16.

All times are milliseconds for all linear layers of GPT-2 124M once, F.linear first. Source:
docs/explanation/performance.md.

Legend: r rows of x in all, i input features, o output features.
"""

import torch
from torch import Tensor

_ELEMENTS = 1 << 19  # of the weight that exist in float32 at once: 2 MB


def matrix_vector_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """For one row: [..., i] -> [..., o].

    2 cores with AMX, bf16: 15 and 7. In bf16 without AMX F.linear is faster; float32 is the same on both.
    """
    row = x.reshape(-1)  # [..., i] -> [i]
    y = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
    return y.view(*x.shape[:-1], weight.size(0))  # [o] -> [..., o]


def transposed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(A xᵀ)ᵀ + b: [..., i] -> [..., o], contiguous: attention would take a slow way through a result stored by
    column.

    2 cores with AMX, 8 rows: 15 and 10 in bf16; 41 and 33 in float32, and F.linear takes 23 where A is stored by
    column. In bf16 without AMX F.linear or blocks in float32 are faster; float32 is the same on both.
    """
    y = torch.mm(weight, x.reshape(-1, x.size(-1)).t()).t()  # [..., i] -> [r, i]; [o, r] -> [r, o]
    by_row = torch.empty_like(y, memory_format=torch.contiguous_format)
    by_row = by_row.copy_(y) if bias is None else torch.add(y, bias, out=by_row)
    return by_row.view(*x.shape[:-1], weight.size(0))  # [r, o] -> [..., o]


def linear_in_float32_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., i], [o, i], [o] of 16 bits -> [..., o] of the same dtype, computed in float32 and rounded once at the
    end.

    Two threads, no products in bf16: 4 rows 61 and 44, 8 rows 84 and 54, 16 rows 124 and 95. For one row F.linear is
    faster (18 and 37), and so it is for every number of rows where AVX-512 has bf16 products.
    """
    rows = x.reshape(-1, x.size(-1)).float()  # [..., i] -> [r, i]
    y = x.new_empty(rows.size(0), weight.size(0))
    for start in range(0, weight.size(0), size := max(_ELEMENTS // weight.size(1), 1)):
        part = slice(start, start + size)
        product = torch.mm(rows, weight[part].float().t())
        y[:, part] = product if bias is None else product.add_(bias[part])
    return y.view(*x.shape[:-1], weight.size(0))  # [r, o] -> [..., o]
