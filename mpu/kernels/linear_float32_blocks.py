"""xAᵀ + b of bf16 tensors by blocks in float32, where no gradient is needed. For a CPU without products in bf16.

Milliseconds for all linear layers of GPT-2 124M once, two threads, F.linear first: 4 rows 61 and 44, 8 rows 84 and 54,
16 rows 124 and 95. For one row F.linear is faster (18 and 37), and so it is for every number of rows where AVX-512 has
bf16 products. Source: docs/explanation/performance.md.

Legend: r rows of x in all, i input features, o output features.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_ROWS = 4  # from here on this is faster than F.linear
_ELEMENTS = 1 << 19  # of the weight that exist in float32 at once: 2 MB


def linear_in_float32_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., i], [o, i], [o] of 16 bits -> [..., o] of the same dtype, computed in float32 and rounded once at the
    end."""
    rows = x.reshape(-1, x.size(-1)).float()  # [..., i] -> [r, i]
    y = x.new_empty(rows.size(0), weight.size(0))
    for start in range(0, weight.size(0), size := max(_ELEMENTS // weight.size(1), 1)):
        part = slice(start, start + size)
        product = torch.mm(rows, weight[part].float().t())
        y[:, part] = product if bias is None else product.add_(bias[part])
    return y.view(*x.shape[:-1], weight.size(0))  # [r, o] -> [..., o]
