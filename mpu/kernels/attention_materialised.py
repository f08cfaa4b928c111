"""Attention by its formula, with all scores in memory. For a CPU in bf16 with dropout of the probabilities.

torch has no fused kernel with dropout there: its own formula draws 64 bits for each score and computes in float32. 512
tokens, 2 heads, one thread, ms: with AMX 10.3 where scores are held in bf16, 22.2 in float32; without AMX 43.4 and
22.3. The masks are the same in both. Source: docs/explanation/performance.md.

Legend: b batch, s sequence, n heads of this rank, d head size.
"""

import torch
from torch import Tensor

from mpu.kernels.attention_fused import batch_of_heads, merge_heads, split_heads
from mpu.kernels.elementwise import dropout_16_bits


def materialised_attention(qkv: Tensor, dropout_p: float) -> Tensor:
    """softmax(QKᵀ/√d, keys up to the query's own position) V: [s, b, n, 3, d] -> [s, b, n·d]."""
    s, b, n, _, d = qkv.shape
    q, k, v = (batch_of_heads(x) for x in split_heads(qkv))  # [b·n, s, d]
    mask = torch.full((s, s), -torch.inf, dtype=q.dtype).triu_(1)
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=d**-0.5)  # [b·n, s, s]
    y = torch.bmm(dropout_16_bits(torch.softmax(scores, dim=-1), dropout_p), v)
    return merge_heads(y.view(b, n, s, d))  # [b·n, s, d] -> [b, n, s, d] -> [s, b, n·d]


def materialised_attention_in_float32(qkv: Tensor, dropout_p: float) -> Tensor:
    """`materialised_attention` of a bf16 tensor, computed in float32. The result is bf16."""
    return materialised_attention(qkv.float(), dropout_p).to(qkv.dtype)
