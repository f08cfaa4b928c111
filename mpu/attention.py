"""Causal attention, by the kernels that were measured to be fastest where it runs.

Legend: b batch, s sequence, n heads of this rank, d head size, t = b · s tokens, a sample after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.processor import HAS_AMX
from mpu.random import dropout

# Queries that the backward of a CPU in bf16 takes together. Fewer mean smaller matrix products, more mean that less of
# what causality masks is left out; the scores of a block are all that is held of them.
BLOCK = 256
# Scores of a block that a core works on at once: what is made of them stays in its cache (10 % less than all heads at
# once, at b·n = 24 and s = 1,024).
SCORES = 3 << 18
# Up to here a CPU in bf16 with dropout takes our formulas; beyond, the scores would cost more memory than they save
# time.
MATERIALISE_UP_TO = 512


class Documents:
    """The documents of a micro-batch: what attention needs to know so that none looks into another.

    lengths: of each document or its part in a sample, one after the other, t in all. ends: int32 [len(lengths) + 1], 0
    and the sums of the lengths, on the device of the model.
    """

    def __init__(self, tokens: Tensor, eod: int, device: torch.device | str) -> None:
        """tokens: [b, s] on the host. A document's last token is its EOD; nothing is longer than a sample."""
        last = tokens == eod
        last[:, -1] = True
        ends = F.pad(last.flatten().nonzero().flatten() + 1, (1, 0))
        self.lengths: list[int] = ends.diff().tolist()
        ends = ends.int()
        on_gpu = torch.device(device).type == "cuda"
        self.ends = ends.pin_memory().to(device, non_blocking=True) if on_gpu else ends


def document_attention(qkv: Tensor, dropout_p: float, documents: Documents) -> Tensor:
    """`causal_attention` within each document: never more memory than without, and less work.

    On a GPU one kernel that takes cumulative lengths, where it can (16 bits, no dropout); else document by document.
    """
    s, b, n, _, d = qkv.shape
    if len(documents.lengths) == b:
        return causal_attention(qkv, dropout_p)
    flat = qkv.transpose(0, 1).reshape(b * s, 1, n, 3, d)
    if dropout_p == 0 and _has_varlen_kernel(qkv):
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = flat.squeeze(1).unbind(2)  # [t, n, d]
        ends, longest = documents.ends, max(documents.lengths)
        y = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))
        assert isinstance(y, Tensor)  # not with its log-sum-exp
    else:
        y = torch.cat([causal_attention(one, dropout_p) for one in flat.split(documents.lengths)])
    return y.reshape(b, s, n * d).transpose(0, 1)


def _has_varlen_kernel(qkv: Tensor) -> bool:
    return qkv.device.type == "cuda" and qkv.dtype in (torch.float16, torch.bfloat16) and qkv.size(-1) % 8 == 0 \
        and torch.cuda.get_device_capability(qkv.device) >= (8, 0)


def causal_attention(qkv: Tensor, dropout_p: float) -> Tensor:
    """softmax(qkᵀ/√d, keys up to the query's own position) v, with dropout of the probabilities.

    qkv: [s, b, n, 3, d], queries, keys and values of a head side by side. Returns [s, b, n·d].
    """
    if qkv.device.type == "cpu" and qkv.dtype == torch.bfloat16:
        if dropout_p > 0 and qkv.size(0) <= MATERIALISE_UP_TO:
            # Without gradients too: a checkpointed layer must drop the same elements when it is computed again.
            if HAS_AMX:
                return _materialised(qkv, dropout_p)
            return _materialised(qkv.float(), dropout_p).to(qkv.dtype)  # half the time there; the same masks
        if HAS_AMX and dropout_p == 0 and torch.is_grad_enabled():
            y: Tensor = _BlockwiseBackward.apply(qkv)  # type: ignore[no-untyped-call]
            return y
    return _by_torch(qkv, dropout_p)


def _by_torch(qkv: Tensor, dropout_p: float = 0.0) -> Tensor:
    s, b, n, _, d = qkv.shape
    q, k, v = _heads(qkv)
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
    return y.permute(2, 0, 1, 3).reshape(s, b, n * d)  # [b, n, s, d] -> [s, b, n·d]


def _heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[s, b, n, 3, d] -> three views [b, n, s, d]."""
    q, k, v = qkv.permute(3, 1, 2, 0, 4).unbind(0)
    return q, k, v


def _flat_heads(x: Tensor) -> Tensor:
    """[b, n, s, d] -> [b·n, s, d], contiguous."""
    return x.reshape(-1, x.size(2), x.size(3)).contiguous()


class _BlockwiseBackward(torch.autograd.Function):
    """The fused kernel forward; backward by matrix products over blocks of queries, in which the scores are computed
    again (FlashAttention's way, arXiv:2205.14135).

    In bf16 on a CPU with AMX the backward of torch 2.13's fused kernel takes longer (2 cores, b·n = 24, d = 64: 31 ms
    against 26 ms at s = 1,024); without AMX it does not.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        ctx.save_for_backward(qkv)
        s, b, n, _, d = qkv.shape
        y = F.scaled_dot_product_attention(*_heads(qkv), is_causal=True)
        return y.permute(2, 0, 1, 3).reshape(s, b, n * d)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (qkv,) = ctx.saved_tensors
        # To call the operator loads torch's compiler: 1 s and 70 MB.
        backward = _blockwise_operator if torch.compiler.is_compiling() else _blockwise_backward
        d_qkv: Tensor = backward(qkv, dy)
        return d_qkv


def _blockwise_backward(qkv: Tensor, dy: Tensor) -> Tensor:
    """[s, b, n, 3, d], [s, b, n·d] -> the gradient of qkv."""
    s, b, n, _, d = qkv.shape
    scale = d ** -0.5
    q, k, v = (_flat_heads(x) for x in _heads(qkv))
    q = q * scale
    dy = _flat_heads(dy.view(s, b, n, d).permute(1, 2, 0, 3))
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    later = torch.full((BLOCK, BLOCK), -torch.inf, dtype=qkv.dtype).triu_(1)
    heads = max(torch.get_num_threads() * SCORES // (BLOCK * s), 1)
    for first in range(0, b * n, heads):
        some = slice(first, first + heads)
        for start in range(0, s, BLOCK):
            end = min(start + BLOCK, s)
            # Contiguous once, where each product would copy them for itself.
            block_q, block_dy, block_k = (x.contiguous() for x in (q[some, start:end], dy[some, start:end],
                                                                   k[some, :end]))
            p = torch.bmm(block_q, block_k.transpose(1, 2))  # [heads, block, end]
            p[:, :, start:] += later[:end - start, :end - start]
            p = torch.softmax(p, dim=-1)
            dp = torch.bmm(block_dy, v[some, :end].transpose(1, 2))
            d_scores = torch._softmax_backward_data(dp, p, -1, p.dtype)
            dv[some, :end].baddbmm_(p.transpose(1, 2), block_dy)
            dk[some, :end].baddbmm_(d_scores.transpose(1, 2), block_q)
            dq[some, start:end] = torch.bmm(d_scores, block_k)
    d_qkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    for out, grad in zip(_heads(d_qkv), (dq.mul_(scale), dk, dv), strict=True):
        out.copy_(grad.view(b, n, s, d))
    return d_qkv


# An operator of its own: a compiler that sees inside makes it slower than its parts are.
_blockwise_operator = torch.library.custom_op("mpu::blockwise_attention_backward", _blockwise_backward,
                                              mutates_args=())


@_blockwise_operator.register_fake
def _(qkv: Tensor, dy: Tensor) -> Tensor:
    return torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)


def _materialised(qkv: Tensor, dropout_p: float) -> Tensor:
    s, b, n, _, d = qkv.shape
    q, k, v = (_flat_heads(x) for x in _heads(qkv))
    mask = torch.full((s, s), -torch.inf, dtype=q.dtype).triu_(1)
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=d ** -0.5)
    y = torch.bmm(dropout(torch.softmax(scores, dim=-1), dropout_p), v)
    return y.view(b, n, s, d).permute(2, 0, 1, 3).reshape(s, b, n * d)
