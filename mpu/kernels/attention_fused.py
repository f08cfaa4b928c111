"""torch's fused attention, and the views with which every attention kernel begins and ends.

It is the kernel on every GPU, where torch chooses among FlashAttention's, cuDNN's and others, and on a CPU in fp32.

Legend: b batch, s sequence, n heads of this rank, d head size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def split_heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[s, b, n, 3, d] -> queries, keys and values: three views [b, n, s, d]."""
    q, k, v = qkv.permute(3, 1, 2, 0, 4).unbind(0)  # [s, b, n, 3, d] -> [3, b, n, s, d] -> three of [b, n, s, d]
    return q, k, v


def merge_heads(y: Tensor) -> Tensor:
    """[b, n, s, d] -> [s, b, n·d]."""
    b, n, s, d = y.shape
    return y.permute(2, 0, 1, 3).reshape(s, b, n * d)  # [b, n, s, d] -> [s, b, n, d] -> [s, b, n·d]


def batch_of_heads(x: Tensor) -> Tensor:
    """[b, n, s, d] -> [b·n, s, d], contiguous, for products of batches of matrices."""
    return x.reshape(-1, x.size(2), x.size(3)).contiguous()


def fused_attention(qkv: Tensor, dropout_p: float) -> Tensor:
    """softmax(QKᵀ/√d, keys up to the query's own position) V: [s, b, n, 3, d] -> [s, b, n·d]."""
    q, k, v = split_heads(qkv)
    return merge_heads(F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True))
