"""Kernels of causal attention: torch's fused kernels; the formula with all scores in memory; and two kernels for a CPU
that work on blocks of queries, as FlashAttention does (arXiv:2205.14135): a backward pass, and both passes with seeded
dropout.

Legend: b batch, s sequence, n heads of this rank, d head size, t tokens of the micro-batch.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.kernels import processor
from mpu.kernels.dropout import ELEMENTS, dropout_16_bits, keep_scale, random_draws, sample_masks, zero_dropped

# Queries in a block of the blockwise backward. Smaller blocks mean smaller matrix products; larger blocks compute more
# scores that the causal mask discards. Only the scores of one block exist at a time.
BLOCK = 256
# Queries in a block with seeded dropout. The masks depend on it: a different number gives different masks.
SEEDED_BLOCK = 128
# Scores that a core computes at once, in elements. They stay in its cache: 10 % less time than all heads at once
# (b·n = 24, s = 1,024).
SCORES = 3 << 18
# Tokens of a sequence. For longer sequences, saved probabilities of seeded dropout need too much memory.
SAVED_UP_TO = 512


def fused_attention(qkv: Tensor, dropout_p: float) -> Tensor:
    """softmax(QKᵀ/√d, keys up to the query's position) V: [s, b, n, 3, d] -> [s, b, n·d].

    Used on every GPU, where torch selects FlashAttention, cuDNN or a different kernel, and on a CPU in fp32.
    """
    q, k, v = qkv.permute(3, 1, 2, 0, 4).unbind(0)  # [s, b, n, 3, d] -> [3, b, n, s, d] -> three of [b, n, s, d]
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
    return y.permute(2, 0, 1, 3).flatten(2)  # [b, n, s, d] -> [s, b, n, d] -> [s, b, n·d]


def has_varlen_kernel(qkv: Tensor) -> bool:
    """True if `varlen_attention` supports this device, dtype and head size (the last dimension)."""
    return (
        qkv.device.type == "cuda"
        and qkv.dtype in (torch.float16, torch.bfloat16)
        and qkv.size(-1) % 8 == 0
        and torch.cuda.get_device_capability(qkv.device) >= (8, 0)
    )


def varlen_attention(qkv: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Causal attention within each document, without dropout: [t, 1, n, 3, d] -> [t, 1, n·d]. cu_seqlens: int32, 0 and
    the cumulative lengths. longest: the largest length.

    It is torch's only kernel that takes cumulative lengths. It computes all documents in one launch, instead of one
    launch for each, and makes no mask. Its speed has not been measured on a GPU.
    """
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = qkv.squeeze(1).unbind(2)  # [t, 1, n, 3, d] -> three of [t, n, d]
    y = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0))
    assert isinstance(y, Tensor)  # and not a tuple with the log-sum-exp
    return y.flatten(1).unsqueeze(1)  # [t, n, d] -> [t, 1, n·d]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of our own scores: `dtype` itself if the processor computes in it, else float32."""
    return dtype if dtype.itemsize > 2 or (dtype == torch.bfloat16 and processor.HAS_AMX) else torch.float32


def unfused_attention(qkv: Tensor, dropout_p: float) -> Tensor:
    """softmax(QKᵀ/√d, keys up to the query's position) V with all scores in memory: [s, b, n, 3, d] -> [s, b, n·d].

    For a CPU in bf16 with dropout of the probabilities, where torch has no fused kernel: its formula draws 64 bits for
    each score and computes in float32. Times for 512 tokens, 2 heads, one thread, in ms: with AMX 10.3 with bf16
    scores, 22.2 with float32 scores; without AMX 43.4 and 22.3. The masks are the same in both. Source:
    docs/explanation/performance.md.
    """
    s, b, n, _, d = qkv.shape
    q, k, v = (x.contiguous() for x in _heads(qkv.to(compute_dtype(qkv.dtype))))
    mask = torch.full((s, s), -torch.inf, dtype=q.dtype).triu_(1)
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=d**-0.5)  # [b·n, s, s]
    y = torch.bmm(dropout_16_bits(torch.softmax(scores, dim=-1), dropout_p), v)
    return y.transpose(0, 1).reshape(s, b, n * d).to(qkv.dtype)  # [b·n, s, d] -> [s, b·n, d] -> [s, b, n·d]


def attention_with_blockwise_backward(qkv: Tensor, dropout_p: float) -> Tensor:
    """softmax(QKᵀ/√d, keys up to the query's position) V: [s, b, n, 3, d] -> [s, b, n·d]. dropout_p must be 0.

    For a CPU with AMX in bf16. Backward runs over blocks of queries and recomputes the scores, as FlashAttention does
    (arXiv:2205.14135). Unlike FlashAttention it holds the scores of a block in bf16, so the rounding error grows with
    the scores: the queries' gradient is off by 0.4 % if the largest score is 4 and by 1.6 % if it is 30, compared with
    0.25 and 0.45 % for torch's fused kernel.

    The backward pass of torch 2.13's fused kernel is slower there: 31 ms instead of 26 (2 cores, b·n = 24, d = 64, s =
    1,024). Without AMX the fused kernel is faster: 129 ms instead of 151 (one thread, 4 heads, s = 1,024). Source:
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
        # A call of the operator loads torch's compiler: 1 s and 70 MB.
        backward = _blockwise_operator if torch.compiler.is_compiling() else _blockwise_backward
        d_qkv: Tensor = backward(qkv, dy)
        return d_qkv


def _blockwise_backward(qkv: Tensor, dy: Tensor) -> Tensor:
    return _gradient(qkv, dy, BLOCK, heads_at_once(qkv.size(0)))


# A custom operator: torch.compile would make the code inside slower.
_blockwise_operator = torch.library.custom_op("mpu::blockwise_attention_backward", _blockwise_backward, mutates_args=())


@_blockwise_operator.register_fake
def _(qkv: Tensor, dy: Tensor) -> Tensor:
    return torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)


def seeded_attention(
    qkv: Tensor, p: float, dropout_seeds: Tensor, location: int, first_head: int = 0, first_position: int = 0
) -> Tensor:
    """softmax(QKᵀ/√d, keys up to the query's position), dropped with probability p, times V:
    [s, b, n, 3, d] -> [s, b, n·d]. For a CPU.

    dropout_seeds: int64 [b, 3], as in `seeded_dropout`. location: which dropout of the layer. first_head: number of
    this rank's first head. first_position: of a document in its sample; the masks of its queries and keys count from
    there.

    Backward computes the masks of a block again, and the scores of long sequences. So no mask is saved, and above
    SAVED_UP_TO tokens nothing of size [s, s]. bf16 is computed in float32 if the processor has no AMX. CPU time of
    forward and backward, one thread with AMX, 1,024 tokens, 12 heads, compared with torch's formula with all scores in
    memory: 455 and 115 ms in bf16, 465 and 249 ms in float32 (one run).
    """
    out: Tensor = _SeededAttention.apply(qkv, p, dropout_seeds, location, first_head, first_position)  # type: ignore[no-untyped-call]
    return out


class _AttentionMasks:
    """The masks of a micro-batch. The random bits of a sample are ordered [block of queries][head][query][key]. Each
    row has as many keys as the last query of its block sees."""

    def __init__(
        self, qkv: Tensor, p: float, dropout_seeds: Tensor, location: int, first_head: int, first_position: int
    ) -> None:
        self.p, self.keep_scale = p, keep_scale(p)
        self._s, _, self._n, _, _ = qkv.shape
        self._first_head, self._samples = first_head, sample_masks(dropout_seeds, location, first_position)

    def parts(self, like: Tensor, first: int, start: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the heads of each sample in turn, and their random draws, int16 [heads, block, end].

        like: scores [heads, block, end], of heads from `first` on (counted over all samples) and queries from `start`
        on.
        """
        heads, rows, end = like.shape
        head_blocks = rows * -(-min(start + SEEDED_BLOCK, self._s) // ELEMENTS)  # counter blocks of a head
        done = 0
        while done < heads:
            sample, head = divmod(first + done, self._n)
            count = min(self._n - head, heads - done)
            begin = (start // SEEDED_BLOCK << 40) + (self._first_head + head) * head_blocks
            drawn = random_draws(self._samples[sample], begin, count * head_blocks).view(count, rows, -1)
            yield slice(done, done + count), drawn[:, :, :end]
            done += count


class _SeededAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, p: float, dropout_seeds: Tensor, *place: int) -> Tensor:
        ctx.p, ctx.place = p, place
        s, b, n, _, d = qkv.shape
        kept = []  # saved for backward
        masks = _AttentionMasks(qkv, p, dropout_seeds, *place)
        q, k, v = _operands(qkv)
        out = torch.empty(s, b, n * d, dtype=qkv.dtype)
        y = out.view(s, b * n, d).transpose(0, 1)  # [b·n, s, d]
        for first, some, start, end in _blocks(s, b * n, SEEDED_BLOCK, seeded_heads_at_once(s)):
            # Contiguous operands, and scaling a block while it is in the cache, halve the time.
            block_q, block_k, block_v = (x.contiguous() for x in (q[some, start:end], k[some, :end], v[some, :end]))
            probabilities = _probabilities(block_q * d**-0.5, block_k, start)
            masked = torch.empty_like(probabilities)
            for part, drawn in masks.parts(probabilities, first, start):
                zero_dropped(probabilities[part], drawn, p, out=masked[part])
            y[some, start:end] = torch.bmm(masked, block_v).mul_(masks.keep_scale)
            if s <= SAVED_UP_TO:
                kept.append(probabilities)
        ctx.save_for_backward(qkv, dropout_seeds, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        qkv, dropout_seeds, *kept = ctx.saved_tensors
        masks = _AttentionMasks(qkv, ctx.p, dropout_seeds, *ctx.place)
        d_qkv = _gradient(qkv, dy, SEEDED_BLOCK, seeded_heads_at_once(qkv.size(0)), masks, kept)
        return d_qkv, None, None, None, None, None


def _gradient(
    qkv: Tensor,
    dy: Tensor,
    block: int,
    heads: int,
    masks: _AttentionMasks | None = None,
    kept: list[Tensor] | None = None,
) -> Tensor:
    """[s, b, n, 3, d], [s, b, n·d] -> the gradient of qkv [s, b, n, 3, d], computed for `block` queries and `heads`
    heads at a time. masks: of dropout. kept: saved probabilities of each block; without them they are recomputed."""
    s, b, n, _, d = qkv.shape
    q, k, v = _operands(qkv)
    dy = dy.to(q.dtype).reshape(s, b * n, d).transpose(0, 1)  # [b·n, s, d]
    d_qkv = torch.empty(qkv.shape, dtype=qkv.dtype)
    dq, *d_kv = _heads(d_qkv)
    dk, dv = torch.zeros(2, b * n, s, d, dtype=q.dtype)
    for first, some, start, end in _blocks(s, b * n, block, heads):
        block_q, block_dy, block_k, block_v = (
            x.contiguous() for x in (q[some, start:end], dy[some, start:end], k[some, :end], v[some, :end])
        )
        block_q = block_q * d**-0.5
        if masks is not None:
            block_dy = block_dy * masks.keep_scale
        p = kept.pop(0) if kept else _probabilities(block_q, block_k, start)
        masked, dp = p, torch.bmm(block_dy, block_v.transpose(1, 2))
        if masks is not None:
            masked = torch.empty_like(p)
            for part, drawn in masks.parts(p, first, start):
                zero_dropped(p[part], drawn, masks.p, out=masked[part])
                zero_dropped(dp[part], drawn, masks.p, out=dp[part])
        dv[some, :end].baddbmm_(masked.transpose(1, 2), block_dy)
        d_scores = torch._softmax_backward_data(dp, p, -1, p.dtype)
        dk[some, :end].baddbmm_(d_scores.transpose(1, 2), block_q)
        dq[some, start:end] = torch.bmm(d_scores, block_k).mul_(d**-0.5)
    for out, grad in zip(d_kv, (dk, dv), strict=True):
        out.copy_(grad)
    return d_qkv


def heads_at_once(s: int, block: int = BLOCK) -> int:
    """How many heads, over all samples, are computed together if a block has `block` queries."""
    return max(torch.get_num_threads() * SCORES // (block * s), 1)


def seeded_heads_at_once(s: int) -> int:
    """`heads_at_once` for seeded dropout: twice as many, which takes 4 % less time (8 samples of 256 tokens, 4 heads,
    bf16, one thread)."""
    return heads_at_once(s, SEEDED_BLOCK // 2)


def saved_probabilities(s: int) -> int:
    """How many probabilities a head saves for the backward pass of seeded dropout."""
    if s > SAVED_UP_TO:
        return 0
    return sum((end - start) * end for _, _, start, end in _blocks(s, 1, SEEDED_BLOCK, 1))


def _heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[s, b, n, 3, d] -> queries, keys and values, each [b·n, s, d]: views if qkv is contiguous."""
    s, b, n, _, d = qkv.shape
    q, k, v = qkv.reshape(s, b * n, 3, d).permute(2, 1, 0, 3).unbind(0)
    return q, k, v


def _operands(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each [b·n, s, d]. Keys and values are contiguous because many blocks read them."""
    q, k, v = _heads(qkv.to(compute_dtype(qkv.dtype)))
    return q, k.contiguous(), v.contiguous()


def _blocks(s: int, heads: int, block: int, at_once: int) -> Iterator[tuple[int, slice, int, int]]:
    """Yield the first of `at_once` heads, the slice of these heads, and a block of queries, [start, end)."""
    for first in range(0, heads, at_once):
        for start in range(0, s, block):
            yield first, slice(first, first + at_once), start, min(start + block, s)


def _probabilities(q: Tensor, k: Tensor, start: int) -> Tensor:
    """softmax of [heads, block, d] times [heads, end, d]ᵀ: [heads, block, end]."""
    scores = torch.bmm(q, k.transpose(1, 2))
    rows = q.size(1)
    scores[:, :, start:] += torch.full((rows, rows), -torch.inf, dtype=scores.dtype).triu_(1)
    return torch.softmax(scores, dim=-1)
