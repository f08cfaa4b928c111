"""Causal attention, by the kernel that was measured to be fastest where it runs.

Legend: b batch, s sequence, n heads of this rank, d head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.random import dropout

# In bf16 on a CPU, the backward of torch 2.13's fused kernel takes 3 to 5 times as long as three matrix products
# (AMX, 2 cores, forward + backward of b·n = 128, d = 32: 47 ms against 20 ms at s = 256). Beyond this length the
# scores, which those need whole, cost more than they save.
_MATERIALISE_UP_TO = 512


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """softmax(qkᵀ/√d, keys up to the query's own position) v, with dropout of the probabilities.

    q, k, v: [b, n, s, d], strided views allowed. Returns [b, n, s, d].
    """
    s = q.size(2)
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and s <= _MATERIALISE_UP_TO and torch.is_grad_enabled():
        mask = torch.full((s, s), -torch.inf, dtype=q.dtype).triu_(1)
        flat_q, flat_k, flat_v = (x.reshape(-1, s, x.size(3)) for x in (q, k, v))  # [b, n, s, d] -> [b·n, s, d]
        scores = torch.baddbmm(mask, flat_q, flat_k.transpose(1, 2), alpha=q.size(3) ** -0.5)
        probabilities = dropout(torch.softmax(scores, dim=-1), dropout_p)
        return torch.bmm(probabilities, flat_v).view(v.shape)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
