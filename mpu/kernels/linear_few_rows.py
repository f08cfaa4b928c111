"""xAᵀ + b for the few rows of x that generation has, on a CPU, where no gradient is needed.

Milliseconds for one token of all weights of GPT-2 124M, 2 cores with AMX, F.linear first. One row in bf16: 15, and 7 by
a matrix-vector product. 8 rows in bf16: 15, and 10 as (A xᵀ)ᵀ. 8 rows in fp32: 41 and 33, and 23 where A is stored by
column. In bf16 without AMX F.linear or blocks in float32 are faster; fp32 is the same on both. Source:
docs/explanation/performance.md.

Legend: r rows of x in all, i input features, o output features.
"""

from __future__ import annotations

import torch
from torch import Tensor

MANY_ROWS = 17  # from here on F.linear is the fastest


def matrix_vector_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """For one row: [..., i] -> [..., o]."""
    row = x.reshape(-1)  # [..., i] -> [i]
    y = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
    return y.view(*x.shape[:-1], weight.size(0))  # [o] -> [..., o]


def transposed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(A xᵀ)ᵀ + b: [..., i] -> [..., o], contiguous: attention would take a slow way through a result stored by
    column."""
    y = torch.mm(weight, x.reshape(-1, x.size(-1)).t()).t()  # [..., i] -> [r, i]; [o, r] -> [r, o]
    by_row = torch.empty_like(y, memory_format=torch.contiguous_format)
    by_row = by_row.copy_(y) if bias is None else torch.add(y, bias, out=by_row)
    return by_row.view(*x.shape[:-1], weight.size(0))  # [r, o] -> [..., o]
