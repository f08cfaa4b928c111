"""The loss of a row of logits and its gradient on a GPU: each logit is read once from memory and overwritten once.

    d logits = weight · (softmax(logits) - one-hot(target))

A program has one row, so the second reading of a row (100 KB in bf16) finds it in the cache of the GPU.

Legend: c tokens, v/tp columns of this rank.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # columns at a time
WARPS = 8


@triton.jit
def cross_entropy_kernel(
    logits,
    stats,
    target,
    is_local,
    weight,
    tokens,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    FIND_STATS: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row of logits [c, v/tp].

    stats: [3, c] float32, written if FIND_STATS, else read.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * WIDTH
    stats += row
    block = tl.arange(0, BLOCK)
    if FIND_STATS:
        largest = tl.full((), -3.4028234663852886e38, tl.float32)
        total = tl.full((), 0.0, tl.float32)
        for first in range(0, COLUMNS, BLOCK):
            at = first + block
            # The mask of the load has whole 16 bytes, unlike the padding, which is replaced after it.
            x = tl.load(logits + at, mask=at < WIDTH, other=0.0, eviction_policy="evict_last")
            x = tl.where(at < COLUMNS, x.to(tl.float32), float("-inf"))
            larger = tl.maximum(largest, tl.max(x))
            total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger))
            largest = larger
        target_logit = tl.load(logits + tl.load(target + row)).to(tl.float32)
        tl.store(stats, largest)
        tl.store(stats + tokens, total)
        tl.store(stats + 2 * tokens, tl.where(tl.load(is_local + row), target_logit, 0.0))
    else:
        largest, total = tl.load(stats), tl.load(stats + tokens)
    if WRITE_GRADIENT:
        if FIND_STATS:
            tl.debug_barrier()  # every thread has read the target's logit
        factor = tl.load(weight + row)
        of_target = tl.where(tl.load(is_local + row), tl.load(target + row), -1)
        scale = factor / total
        for first in range(0, WIDTH, BLOCK):
            at = first + block
            x = tl.load(logits + at, mask=at < WIDTH, other=0.0, eviction_policy="evict_first")
            exponent = tl.where(at < COLUMNS, x.to(tl.float32) - largest, float("-inf"))
            gradient = tl.exp(exponent) * scale - tl.where(at == of_target, factor, 0.0)
            tl.store(logits + at, gradient.to(x.dtype), mask=at < WIDTH)


def cross_entropy_on_gpu(
    logits: Tensor,
    stats: Tensor,
    target: Tensor,
    is_local: Tensor,
    columns: int,
    weight: Tensor | None,
    *,
    find_stats: bool,
) -> None:
    """logits: [c, v/tp], contiguous. weight: [c] float32; if given, the logits are overwritten with their gradient. The
    other arguments are those of `VocabParallelTargets` and of `vocab_parallel_softmax`."""
    tokens, width = logits.shape
    cross_entropy_kernel[(tokens,)](
        logits,
        stats,
        target,
        is_local,
        stats if weight is None else weight,
        tokens,
        COLUMNS=columns,
        WIDTH=width,
        FIND_STATS=find_stats,
        WRITE_GRADIENT=weight is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
