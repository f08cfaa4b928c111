"""Attention with dropout of the probabilities, whose masks follow from keys alone, by blocks of queries. For a CPU.

Backward makes the masks of a block again, and for long sequences the scores, as FlashAttention does
(arXiv:2205.14135). So no mask is kept, and above KEPT_UP_TO tokens nothing of the size [s, s]. bf16 is computed in
float32 where the processor has no AMX. One thread with AMX, 1,024 tokens, 12 heads, forward and backward, against
torch's formula with all scores in memory, ms of CPU time in one run: 455 and 115 in bf16, 465 and 249 in float32.

Legend: b batch, s sequence, n heads of this rank, d head size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mpu.kernels import attention
from mpu.kernels.philox import ELEMENTS, factor, mask_streams, zero_dropped
from mpu.kernels.processor import HAS_AMX

# Queries that are taken together, which is also the unit of the masks' streams: another number means other masks.
BLOCK = 128
KEPT_UP_TO = 512  # tokens of a sequence; for longer ones the probabilities cost more memory than they save time


def keyed_attention(
    qkv: Tensor, p: float, keys: Tensor, site: int, first_head: int = 0, first_position: int = 0
) -> Tensor:
    """softmax(QKᵀ/√d, keys up to the query's own position), dropped with probability p, times V: [s, b, n, 3, d] ->
    [s, b, n·d].

    keys: int64 [b, 3], as `keyed_dropout` has them. first_head: of this rank. first_position: of a document in its
    sample; the masks of its queries and keys count from there.
    """
    out: Tensor = _KeyedAttention.apply(qkv, p, keys, site, first_head, first_position)  # type: ignore[no-untyped-call]
    return out


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The precision of the scores: dtype itself where the processor computes in it."""
    return dtype if dtype.itemsize > 2 or (dtype == torch.bfloat16 and HAS_AMX) else torch.float32


def heads_at_once(s: int) -> int:
    """How many heads of all samples are taken together: twice those of `attention.heads_at_once`, which takes 4 % less time
    here (8 samples of 256 tokens, 4 heads, bf16, one thread)."""
    return attention.heads_at_once(s, BLOCK // 2)


def kept_pairs(s: int) -> int:
    """Of how many pairs of a query and a key a head keeps the probability for backward."""
    if s > KEPT_UP_TO:
        return 0
    return sum((min(start + BLOCK, s) - start) * min(start + BLOCK, s) for start in range(0, s, BLOCK))


class _Masks:
    """The masks of a micro-batch. A block of queries has a part of its sample's stream to itself, in which the heads
    follow each other, and in a head the queries, each at the width of the keys that the last of them sees."""

    def __init__(self, s: int, n: int, keys: Tensor, site: int, first_head: int, first_position: int) -> None:
        self._s, self._n, self._first_head = s, n, first_head
        self._samples = mask_streams(keys, site, first_position)

    def parts(self, like: Tensor, first: int, start: int) -> Iterator[tuple[slice, Tensor]]:
        """Of scores [heads, block, end], of heads from `first` on, counted over all samples, and queries from `start`
        on: the heads of each sample, and the draws that decide about them, int16 [heads, block, end]."""
        heads, rows, end = like.shape
        of_head = rows * -(-min(start + BLOCK, self._s) // ELEMENTS)  # blocks of the counter
        done = 0
        while done < heads:
            sample, head = divmod(first + done, self._n)
            count = min(self._n - head, heads - done)
            philox, stream = self._samples[sample]
            begin = (start // BLOCK << 40) + (self._first_head + head) * of_head
            draws = philox.draws(stream, begin, count * of_head).view(count, rows, -1)
            yield slice(done, done + count), draws[:, :, :end]
            done += count


class _KeyedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, p: float, keys: Tensor, *rest: int) -> Tensor:
        ctx.rest = p, rest
        s, b, n, _, d = qkv.shape
        again = []  # what backward takes instead of computing it
        masks = _Masks(s, n, keys, *rest)
        q, k, v = _operands(qkv)
        out = torch.empty(s, b, n * d, dtype=qkv.dtype)
        y = out.view(s, b * n, d).transpose(0, 1)  # [b·n, s, d]
        for first, some, start, end in _blocks(s, b * n):
            # Products of contiguous matrices, and factors while a block is in the cache, take half the time.
            block_q, block_k, block_v = (x.contiguous() for x in (q[some, start:end], k[some, :end], v[some, :end]))
            scores = _probabilities(block_q * d**-0.5, block_k, start)
            masked = torch.empty_like(scores)
            for part, draws in masks.parts(scores, first, start):
                zero_dropped(scores[part], draws, p, out=masked[part])
            y[some, start:end] = torch.bmm(masked, block_v).mul_(factor(p))
            if s <= KEPT_UP_TO:
                again.append(scores)
        ctx.save_for_backward(qkv, keys, *again)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (qkv, keys, *again), (p, rest) = ctx.saved_tensors, ctx.rest
        s, b, n, _, d = qkv.shape
        masks = _Masks(s, n, keys, *rest)
        q, k, v = _operands(qkv)
        dy = d_out.to(q.dtype).reshape(s, b * n, d).transpose(0, 1)  # [b·n, s, d]
        d_qkv = torch.empty(qkv.shape, dtype=qkv.dtype)
        dq, *d_kv = _heads(d_qkv)
        dk, dv = torch.zeros(2, b * n, s, d, dtype=q.dtype)
        for first, some, start, end in _blocks(s, b * n):
            block_q, block_dy, block_k, block_v = (
                x.contiguous() for x in (q[some, start:end], dy[some, start:end], k[some, :end], v[some, :end])
            )
            block_q, block_dy = block_q * d**-0.5, block_dy * factor(p)
            scores = again.pop(0) if again else _probabilities(block_q, block_k, start)
            masked, d_masked = torch.empty_like(scores), torch.bmm(block_dy, block_v.transpose(1, 2))
            for part, draws in masks.parts(scores, first, start):
                zero_dropped(scores[part], draws, p, out=masked[part])
                zero_dropped(d_masked[part], draws, p, out=d_masked[part])
            dv[some, :end].baddbmm_(masked.transpose(1, 2), block_dy)
            d_scores = torch._softmax_backward_data(d_masked, scores, -1, scores.dtype)
            dk[some, :end].baddbmm_(d_scores.transpose(1, 2), block_q)
            dq[some, start:end] = torch.bmm(d_scores, block_k).mul_(d**-0.5)
        for out, grad in zip(d_kv, (dk, dv), strict=True):
            out.copy_(grad)
        return d_qkv, None, None, None, None, None


def _heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[s, b, n, 3, d] -> queries, keys and values, each [b·n, s, d]: views where qkv is contiguous."""
    s, b, n, _, d = qkv.shape
    q, k, v = qkv.reshape(s, b * n, 3, d).permute(2, 1, 0, 3)
    return q, k, v


def _operands(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each [b·n, s, d]. Keys and values are contiguous, since many blocks take of them."""
    q, k, v = _heads(qkv.to(computed_in(qkv.dtype)))
    return q, k.contiguous(), v.contiguous()


def _blocks(s: int, heads: int) -> Iterator[tuple[int, slice, int, int]]:
    """Some heads at once, the first and all, and a block of queries, [start, end)."""
    at_once = heads_at_once(s)
    for first in range(0, heads, at_once):
        for start in range(0, s, BLOCK):
            yield first, slice(first, first + at_once), start, min(start + BLOCK, s)


def _probabilities(q: Tensor, k: Tensor, start: int) -> Tensor:
    """softmax of [heads, block, d] times [heads, end, d]ᵀ: [heads, block, end]."""
    scores = torch.bmm(q, k.transpose(1, 2))
    rows = q.size(1)
    scores[:, :, start:] += torch.full((rows, rows), -torch.inf, dtype=scores.dtype).triu_(1)
    return torch.softmax(scores, dim=-1)
