"""Attention within each document of a micro-batch, by the one kernel of torch that takes cumulative lengths. For a GPU.

It computes all documents in one launch, where the plain way launches one kernel for each document, and it makes no
mask. It takes 16 bits and no dropout. No speed has been measured: no GPU has been at hand (see README).

Legend: t tokens of the micro-batch, n heads of this rank, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def has_varlen_kernel(qkv: Tensor) -> bool:
    """Whether the kernel takes this device, dtype and head size (the last dimension)."""
    return qkv.device.type == "cuda" and qkv.dtype in (torch.float16, torch.bfloat16) and qkv.size(-1) % 8 == 0 \
        and torch.cuda.get_device_capability(qkv.device) >= (8, 0)


def varlen_attention(qkv: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """[t, 1, n, 3, d] -> [t, 1, n·d]. cu_seqlens: int32, 0 and the sums of the documents' lengths. longest: of them."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = qkv.squeeze(1).unbind(2)  # [t, 1, n, 3, d] -> three of [t, n, d]
    y = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0))
    assert isinstance(y, Tensor)  # not a pair with its log-sum-exp
    return y.flatten(1).unsqueeze(1)  # [t, n, d] -> [t, 1, n·d]
