"""The backward pass of attention over blocks of queries, in which the scores are computed again, as FlashAttention does
(arXiv:2205.14135). For a CPU with AMX in bf16, without dropout.

Other than FlashAttention it holds the scores of a block in bf16, so that their rounding error grows with their size:
the gradient of the queries is off by 0.4 % where the largest score is 4 and by 1.6 % where it is 30, and torch's fused
kernel by 0.25 and 0.45 %.

The backward of torch 2.13's fused kernel takes longer there: 31 ms against 26 (2 cores, b·n = 24, d = 64, s = 1,024).
Without AMX it is the other way round: 129 ms fused, 151 by blocks (one thread, 4 heads, s = 1,024). Source:
docs/explanation/performance.md.

Legend: b batch, s sequence, n heads of this rank, d head size.
"""

from typing import Any

import torch
from torch import Tensor

from mpu.kernels.attention_fused import (
    batch_of_heads,
    fused_attention,
    gradient_of_qkv,
    heads_of_output,
    split_heads,
)

# Queries that backward takes together. Fewer of them mean smaller matrix products; more of them mean that less of what
# causality masks is left out. The scores of one block are all that is held of them.
BLOCK = 256
# Scores of a block that a core works on at once, in elements. They stay in its cache, which takes 10 % less time than
# all heads at once (b·n = 24, s = 1,024).
SCORES = 3 << 18


def heads_at_once(s: int, block: int = BLOCK) -> int:
    """How many heads of all samples are taken together, with a block of so many queries."""
    return max(torch.get_num_threads() * SCORES // (block * s), 1)


def attention_with_blockwise_backward(qkv: Tensor, dropout_p: float) -> Tensor:
    """softmax(QKᵀ/√d, keys up to the query's own position) V: [s, b, n, 3, d] -> [s, b, n·d]. dropout_p must be 0."""
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
