"""torch's own kernels of attention, and the views with which every attention kernel begins and ends.

Legend: b batch, s sequence, n heads of this rank, d head size, t tokens of the micro-batch.
"""

import torch
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


def heads_of_output(y: Tensor, n: int) -> Tensor:
    """[s, b, n·d], an output of attention or its gradient -> [b·n, s, d], contiguous."""
    s, b, _ = y.shape
    return batch_of_heads(y.view(s, b, n, -1).permute(1, 2, 0, 3))  # [s, b, n·d] -> [b, n, s, d] -> [b·n, s, d]


def gradient_of_qkv(qkv: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    """Three gradients [b·n, s, d] -> that of qkv, [s, b, n, 3, d], in its dtype."""
    s, b, n, _, d = qkv.shape
    d_qkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    for out, grad in zip(split_heads(d_qkv), (dq, dk, dv), strict=True):
        out.copy_(grad.view(b, n, s, d))  # [b·n, s, d] -> [b, n, s, d]
    return d_qkv


def fused_attention(qkv: Tensor, dropout_p: float) -> Tensor:
    """softmax(QKᵀ/√d, keys up to the query's own position) V: [s, b, n, 3, d] -> [s, b, n·d].

    The kernel on every GPU, where torch chooses among FlashAttention's, cuDNN's and others, and on a CPU in fp32.
    """
    q, k, v = split_heads(qkv)
    return merge_heads(F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True))


def has_varlen_kernel(qkv: Tensor) -> bool:
    """Whether `varlen_attention` takes this device, dtype and head size (the last dimension)."""
    return (
        qkv.device.type == "cuda"
        and qkv.dtype in (torch.float16, torch.bfloat16)
        and qkv.size(-1) % 8 == 0
        and torch.cuda.get_device_capability(qkv.device) >= (8, 0)
    )


def varlen_attention(qkv: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Causal attention within each document, without dropout: [t, 1, n, 3, d] -> [t, 1, n·d]. cu_seqlens: int32, 0 and
    the sums of the documents' lengths. longest: of them.

    torch's one kernel that takes cumulative lengths. It computes all documents in one launch, where the plain way
    launches one kernel for each document, and it makes no mask. No speed has been measured: no GPU has been at hand
    (see README).
    """
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = qkv.squeeze(1).unbind(2)  # [t, 1, n, 3, d] -> three of [t, n, d]
    y = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0))
    assert isinstance(y, Tensor)  # not a pair with its log-sum-exp
    return y.flatten(1).unsqueeze(1)  # [t, n, d] -> [t, 1, n·d]
