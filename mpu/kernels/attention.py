"""Causal attention by torch's fused kernels and, on a CPU, by two functions that compute a block of queries at a time,
as FlashAttention does (arXiv:2205.14135). One of the two replaces only torch's backward pass. The other one computes
both passes, with seeded dropout.

Legend: b batch, s sequence, n heads of this rank, d head size, t tokens of the micro-batch.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.kernels import cpu_features
from mpu.kernels.dropout import (
    ELEMENTS,
    MaskId,
    drop_threshold,
    keep_scale,
    mask_ids,
    random_draws,
    zero_dropped,
)
from mpu.kernels.layer import split_qkv

# The number of queries in a block of the blockwise backward. Smaller blocks mean smaller matrix products; larger blocks
# compute more scores that the causal mask discards. Only the scores of one block exist at a time.
QUERY_BLOCK = 256
# The number of queries in a block with seeded dropout. Changing this number changes the dropout masks.
SEEDED_QUERY_BLOCK = 128
# The number of scores that a core computes at once. These scores stay in the core's cache, so attention takes 10 % less
# time than with the scores of all heads at once (b·n = 24, s = 1,024). With seeded dropout, twice as many scores take
# 4 % less time (8 samples of 256 tokens, 4 heads, bf16, one thread).
SCORES = {QUERY_BLOCK: 3 << 18, SEEDED_QUERY_BLOCK: 3 << 19}
# The longest sequence whose probabilities are saved for backward. Longer sequences have too many probabilities.
SAVED_UP_TO = 512


def fused_attention(qkv: Tensor, dropout_p: float, bias: Tensor | None = None) -> Tensor:
    """softmax(QKᵀ/√d, keys up to the query's position) V: [s, b, n, 3, d] -> [s, b, n·d].

    On a GPU, torch selects FlashAttention, cuDNN or a different kernel. A CPU uses this function without seeded
    dropout, unless `attention_with_blockwise_backward` is faster.

    bias: see `split_qkv`.
    """
    if qkv.is_cuda or bias is not None:
        q, k, v = split_qkv(qkv, bias)
    else:
        q, k, v = qkv.permute(3, 1, 2, 0, 4).unbind(0)  # [s, b, n, 3, d] -> [3, b, n, s, d] -> three of [b, n, s, d]
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
    return y.permute(2, 0, 1, 3).flatten(2)  # [b, n, s, d] -> [s, b, n, d] -> [s, b, n·d]


def has_varlen_kernel(qkv: Tensor) -> bool:
    """Return True if `varlen_attention` supports this device, dtype and head size (the last dimension)."""
    return (
        qkv.device.type == "cuda"
        and qkv.dtype in (torch.float16, torch.bfloat16)
        and qkv.size(-1) % 8 == 0
        and torch.cuda.get_device_capability(qkv.device) >= (8, 0)
    )


def varlen_attention(qkv: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Causal attention within each document, without dropout: [t, 1, n, 3, d] -> [t, 1, n·d].

    cu_seqlens: int32, 0 and the cumulative lengths.
    longest: the largest length.

    `varlen_attn`, torch's only public function for cumulative lengths, computes all documents in one launch, without
    a mask tensor. On an H200, a training step of two layers gave the same loss and gradient norm as on a CPU.
    """
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = qkv.squeeze(1).unbind(2)  # [t, 1, n, 3, d] -> three of [t, n, d]
    y = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0))
    assert isinstance(y, Tensor)  # The result is not a tuple with the log-sum-exp.
    return y.flatten(1).unsqueeze(1)  # [t, n, d] -> [t, 1, n·d]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of attention scores: `dtype` if the processor multiplies matrices in `dtype`, else float32."""
    return dtype if dtype.itemsize > 2 or (dtype == torch.bfloat16 and cpu_features.HAS_AMX) else torch.float32


def attention_with_blockwise_backward(qkv: Tensor) -> Tensor:
    """softmax(QKᵀ/√d, keys up to the query's position) V: [s, b, n, 3, d] -> [s, b, n·d].

    On a CPU with AMX this function is faster in bf16 than torch 2.13's fused kernel (times: `cpu_features.py`).
    Backward computes the scores of a block of queries again, in bf16. FlashAttention uses float32. Therefore the
    rounding error grows with the scores: with a largest score of 4 or 30, the error of the queries' gradient is 0.4 or
    1.6 %, and with torch's fused kernel 0.25 or 0.45 %.
    """
    out: Tensor = _BlockwiseAttention.apply(qkv, 0, None, 0, 0, 0)
    return out


def seeded_attention(
    qkv: Tensor, p: float, dropout_seeds: Tensor, location: int, first_head: int = 0, first_position: int = 0
) -> Tensor:
    """softmax(QKᵀ/√d, keys up to the query's position), dropped with probability p, times V:
    [s, b, n, 3, d] -> [s, b, n·d]. For a CPU.

    dropout_seeds: int64 [b, 3], as in `seeded_dropout`.
    location: which dropout of the layer, for example `ATTENTION_DROPOUT` of `mpu/random.py`.
    first_head: the index of this rank's first head.
    first_position: the first position of qkv in its sample, which selects the part of the mask.

    Backward computes the masks of a block again and, for sequences of more than SAVED_UP_TO tokens, the scores. No
    mask is saved and, for long sequences, no tensor of size [s, s]. Without AMX, bf16 is computed in float32. Time of
    forward and backward with AMX, one thread, 1,024 tokens, 12 heads: 115 ms in bf16 and 249 ms in float32. torch's
    formula with all scores in memory takes 455 and 465 ms (one run).
    """
    mask_args = location, first_head, first_position
    out: Tensor = _BlockwiseAttention.apply(qkv, drop_threshold(p), dropout_seeds, *mask_args)
    return out


class _BlockwiseAttention(torch.autograd.Function):
    """Without seeds, forward calls torch's fused kernel. Backward always runs over blocks of queries."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, dropped: int, seeds: Tensor | None, *mask_args: int) -> Tensor:
        out: Tensor
        probabilities: list[Tensor] = []
        if seeds is None:
            out = fused_attention(qkv, 0.0)
        else:
            out, probabilities = _operator_or_function(_forward)(qkv, dropped, seeds, *mask_args)
        ctx.dropped, ctx.mask_args = dropped, mask_args
        ctx.save_for_backward(qkv, seeds, *probabilities)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        qkv, seeds, *probabilities = ctx.saved_tensors
        return _operator_or_function(_backward)(qkv, dy, ctx.dropped, seeds, *ctx.mask_args, probabilities), *[None] * 5


def _drop(
    n: int,
    dropped: int,
    masks: list[MaskId],
    first_head: int,
    first: int,
    start: int,
    *pairs: tuple[Tensor, Tensor],
) -> None:
    """For each pair (x, out) of tensors [heads, block, end] of a block of queries, write x with zeros for the dropped
    elements to out. The block starts at head `first`, counted over all samples of n heads, and at query `start`.

    The random bits of a sample are ordered [block of queries][head][query][key]. All queries of a block have as
    many keys as its last query.
    """
    heads, rows, end = pairs[0][0].shape
    head_blocks = rows * -(-end // ELEMENTS)  # number of counter blocks of a head
    heads_done = 0
    while heads_done < heads:
        sample, head = divmod(first + heads_done, n)
        count = min(n - head, heads - heads_done)
        begin = (start // SEEDED_QUERY_BLOCK << 40) + (first_head + head) * head_blocks
        drawn = random_draws(masks[sample], begin, count * head_blocks).view(count, rows, -1)[:, :, :end]
        part = slice(heads_done, heads_done + count)
        for x, out in pairs:
            zero_dropped(x[part], drawn, dropped, out=out[part])
        heads_done += count


def _forward(
    qkv: Tensor, dropped: int, seeds: Tensor, location: int, first_head: int, first_position: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the output of `seeded_attention`, and each block's probabilities if the sequence is short."""
    s, b, n, _, d = qkv.shape
    saved_probabilities = []
    drop = functools.partial(_drop, n, dropped, mask_ids(seeds, location, first_position), first_head)
    q, k, v = _query_key_value(qkv)
    out = torch.empty(s, b, n * d, dtype=qkv.dtype)
    y = out.view(s, b * n, d).transpose(0, 1)  # [b·n, s, d]
    for heads, start, end in _blocks(s, b * n, SEEDED_QUERY_BLOCK):
        # Contiguous operands, and scaling a block while it is in the cache, halve the time.
        block_q, block_k, block_v = (x.contiguous() for x in (q[heads, start:end], k[heads, :end], v[heads, :end]))
        probabilities = _probabilities(block_q * d**-0.5, block_k, start)
        masked = torch.empty_like(probabilities)
        drop(heads.start, start, (probabilities, masked))
        y[heads, start:end] = torch.bmm(masked, block_v).mul_(keep_scale(dropped))
        if s <= SAVED_UP_TO:
            saved_probabilities.append(probabilities)
    return out, saved_probabilities


def _backward(
    qkv: Tensor,
    dy: Tensor,
    dropped: int,
    seeds: Tensor | None,
    location: int,
    first_head: int,
    first_position: int,
    saved_probabilities: list[Tensor],
) -> Tensor:
    """[s, b, n, 3, d], [s, b, n·d] -> the gradient of qkv [s, b, n, 3, d].

    saved_probabilities: one tensor for each block. If the list is empty, the probabilities are computed again.
    """
    s, b, n, _, d = qkv.shape
    drop = None
    if seeds is not None:
        drop = functools.partial(_drop, n, dropped, mask_ids(seeds, location, first_position), first_head)
    q, k, v = _query_key_value(qkv)
    dy = dy.to(q.dtype).reshape(s, b * n, d).transpose(0, 1)  # [b·n, s, d]
    d_qkv = torch.empty(qkv.shape, dtype=qkv.dtype)
    dq, *d_kv = _split_heads(d_qkv)
    dk, dv = torch.zeros(2, b * n, s, d, dtype=q.dtype)
    for index, (heads, start, end) in enumerate(_blocks(s, b * n, SEEDED_QUERY_BLOCK if drop else QUERY_BLOCK)):
        block_q, block_dy, block_k, block_v = (
            x.contiguous() for x in (q[heads, start:end], dy[heads, start:end], k[heads, :end], v[heads, :end])
        )
        block_q = block_q * d**-0.5
        if drop:
            block_dy = block_dy * keep_scale(dropped)
        probabilities = saved_probabilities[index] if saved_probabilities else _probabilities(block_q, block_k, start)
        masked, dp = probabilities, torch.bmm(block_dy, block_v.transpose(1, 2))
        if drop:
            masked = torch.empty_like(probabilities)
            drop(heads.start, start, (probabilities, masked), (dp, dp))
        dv[heads, :end].baddbmm_(masked.transpose(1, 2), block_dy)
        d_scores = torch._softmax_backward_data(dp, probabilities, -1, probabilities.dtype)
        dk[heads, :end].baddbmm_(d_scores.transpose(1, 2), block_q)
        dq[heads, start:end] = torch.bmm(d_scores, block_k).mul_(d**-0.5)
    for out, grad in zip(d_kv, (dk, dv), strict=True):
        out.copy_(grad)
    return d_qkv


# torch.compile does not trace into these custom operators.
_OPERATORS = {
    _forward: torch.library.custom_op("mpu::seeded_attention", _forward, mutates_args=()),
    _backward: torch.library.custom_op("mpu::blockwise_attention_backward", _backward, mutates_args=()),
}


def _operator_or_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the custom operator of `function` if torch.compile traces, else `function`. The call of a custom operator
    loads the compiler, which takes 1 s and 70 MB."""
    return _OPERATORS[function] if torch.compiler.is_compiling() else function


@_OPERATORS[_forward].register_fake
def _(qkv: Tensor, *arguments: object) -> tuple[Tensor, list[Tensor]]:
    s, b, n, _, d = qkv.shape
    blocks = list(_blocks(s, b * n, SEEDED_QUERY_BLOCK)) if s <= SAVED_UP_TO else []
    saved_probabilities = [
        qkv.new_empty(len(range(b * n)[heads]), end - start, end, dtype=compute_dtype(qkv.dtype))
        for heads, start, end in blocks
    ]
    return qkv.new_empty(s, b, n * d), saved_probabilities


@_OPERATORS[_backward].register_fake
def _(qkv: Tensor, *arguments: object) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _split_heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each [b·n, s, d], of [s, b, n, 3, d]. The results are views if qkv is
    contiguous."""
    s, b, n, _, d = qkv.shape
    q, k, v = qkv.reshape(s, b * n, 3, d).permute(2, 1, 0, 3).unbind(0)
    return q, k, v


def _query_key_value(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each [b·n, s, d]. Keys and values are contiguous because many blocks read
    them."""
    q, k, v = _split_heads(qkv.to(compute_dtype(qkv.dtype)))
    return q, k.contiguous(), v.contiguous()


def _blocks(s: int, heads: int, block: int) -> Iterator[tuple[slice, int, int]]:
    """Yield slices of the heads of all samples, and a block of queries [start, end) for each."""
    at_once = max(torch.get_num_threads() * SCORES[block] // (block * s), 1)
    for first in range(0, heads, at_once):
        for start in range(0, s, block):
            yield slice(first, first + at_once), start, min(start + block, s)


def _probabilities(q: Tensor, k: Tensor, start: int) -> Tensor:
    """Return the softmax of [heads, block, d] times [heads, end, d]ᵀ: [heads, block, end]."""
    scores = torch.bmm(q, k.transpose(1, 2))
    rows = q.size(1)
    scores[:, :, start:] += torch.full((rows, rows), -torch.inf, dtype=scores.dtype).triu_(1)
    return torch.softmax(scores, dim=-1)
