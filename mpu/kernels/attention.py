"""Kernels of causal attention: torch's own, a blockwise backward, and the formula with all scores in memory; and the
views with which every one of them begins and ends.

Legend: b batch, s sequence, n heads of this rank, d head size, t tokens of the micro-batch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.kernels.dropout import dropout_16_bits

# Queries that the blockwise backward takes together. Fewer of them mean smaller matrix products; more of them mean that
# less of what causality masks is left out. The scores of one block are all that is held of them.
BLOCK = 256
# Scores of a block that a core works on at once, in elements. They stay in its cache, which takes 10 % less time than
# all heads at once (b·n = 24, s = 1,024).
SCORES = 3 << 18


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


def heads_at_once(s: int, block: int = BLOCK) -> int:
    """How many heads of all samples are taken together, with a block of so many queries."""
    return max(torch.get_num_threads() * SCORES // (block * s), 1)


def attention_with_blockwise_backward(qkv: Tensor, dropout_p: float) -> Tensor:
    """softmax(QKᵀ/√d, keys up to the query's own position) V: [s, b, n, 3, d] -> [s, b, n·d]. dropout_p must be 0.

    For a CPU with AMX in bf16. Backward runs over blocks of queries and computes the scores again, as FlashAttention does
    (arXiv:2205.14135). Unlike FlashAttention it holds the scores of a block in bf16, so that their rounding error grows
    with their size: the gradient of the queries is off by 0.4 % if the largest score is 4 and by 1.6 % if it is 30, and
    torch's fused kernel by 0.25 and 0.45 %.

    The backward of torch 2.13's fused kernel takes longer there: 31 ms against 26 (2 cores, b·n = 24, d = 64, s =
    1,024). Without AMX it is the other way round: 129 ms fused, 151 by blocks (one thread, 4 heads, s = 1,024). Source:
    docs/explanation/performance.md.
    """
    assert dropout_p == 0
    return _BlockwiseBackward.apply(qkv)  # type: ignore[no-any-return]


class _BlockwiseBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        ctx.save_for_backward(qkv)
        return fused_attention(qkv, 0.0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (qkv,) = ctx.saved_tensors
        # To call the operator loads torch's compiler: 1 s and 70 MB.
        backward = _blockwise_operator if torch.compiler.is_compiling() else _blockwise_backward
        d_qkv: Tensor = backward(qkv, dy)
        return d_qkv


def _blockwise_backward(qkv: Tensor, dy: Tensor) -> Tensor:
    """[s, b, n, 3, d], [s, b, n·d] -> the gradient of qkv, [s, b, n, 3, d]."""
    s, b, n, _, d = qkv.shape
    scale = d**-0.5
    q, k, v = (batch_of_heads(x) for x in split_heads(qkv))  # [b·n, s, d]
    q = q * scale
    dy = heads_of_output(dy, n)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    later = torch.full((BLOCK, BLOCK), -torch.inf, dtype=qkv.dtype).triu_(1)
    heads = heads_at_once(s)
    for first in range(0, b * n, heads):
        some = slice(first, first + heads)
        for start in range(0, s, BLOCK):
            end = min(start + BLOCK, s)
            # Contiguous once, where each product would copy them for itself.
            block_q, block_dy, block_k = (
                x.contiguous() for x in (q[some, start:end], dy[some, start:end], k[some, :end])
            )
            p = torch.bmm(block_q, block_k.transpose(1, 2))  # [heads, block, end]
            p[:, :, start:] += later[: end - start, : end - start]
            p = torch.softmax(p, dim=-1)
            dp = torch.bmm(block_dy, v[some, :end].transpose(1, 2))
            d_scores = torch._softmax_backward_data(dp, p, -1, p.dtype)
            dv[some, :end].baddbmm_(p.transpose(1, 2), block_dy)
            dk[some, :end].baddbmm_(d_scores.transpose(1, 2), block_q)
            dq[some, start:end] = torch.bmm(d_scores, block_k)
    return gradient_of_qkv(qkv, dq.mul_(scale), dk, dv)


# An operator of its own: a compiler that sees inside makes it slower than its parts are.
_blockwise_operator = torch.library.custom_op("mpu::blockwise_attention_backward", _blockwise_backward, mutates_args=())


@_blockwise_operator.register_fake
def _(qkv: Tensor, dy: Tensor) -> Tensor:
    return torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)


def materialised_attention(qkv: Tensor, dropout_p: float) -> Tensor:
    """softmax(QKᵀ/√d, keys up to the query's own position) V, all scores in memory: [s, b, n, 3, d] -> [s, b, n·d].

    For a CPU in bf16 with dropout of the probabilities. torch has no fused kernel with dropout there: its own formula
    draws 64 bits for each score and computes in float32. 512 tokens, 2 heads, one thread, ms: with AMX 10.3 if scores are
    held in bf16, 22.2 in float32; without AMX 43.4 and 22.3. The masks are the same in both. Source:
    docs/explanation/performance.md.
    """
    s, b, n, _, d = qkv.shape
    q, k, v = (batch_of_heads(x) for x in split_heads(qkv))  # [b·n, s, d]
    mask = torch.full((s, s), -torch.inf, dtype=q.dtype).triu_(1)
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=d**-0.5)  # [b·n, s, s]
    y = torch.bmm(dropout_16_bits(torch.softmax(scores, dim=-1), dropout_p), v)
    return merge_heads(y.view(b, n, s, d))  # [b·n, s, d] -> [b, n, s, d] -> [s, b, n·d]


def materialised_attention_in_float32(qkv: Tensor, dropout_p: float) -> Tensor:
    """`materialised_attention` of a bf16 tensor, computed in float32. The result is bf16."""
    return materialised_attention(qkv.float(), dropout_p).to(qkv.dtype)
