"""Operations on lists of tensors on a GPU, in one launch for all tensors: the sum of squares, AdamW, and gradients that
are added to their buckets.

A program computes one chunk of one tensor. It finds both in a table on the GPU, int64 [2 + lists, tensors]: the number
of each tensor's first chunk, its number of elements, and for each list the tensor's distance from the list's first
tensor. Distances are counted in units of 16 elements, so that the compiler loads 16 bytes at once.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import itertools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

UNIT = 16  # elements
CHUNK = 16384  # elements of a program
BLOCK = 1024  # elements at a time
WARPS = 8


def is_aligned(*lists: Sequence[Tensor]) -> bool:
    """Return True if all tensors are contiguous, and if those of a list have one dtype and distances of whole units."""
    return all(
        x.is_contiguous()
        and x.dtype == of[0].dtype
        and (x.data_ptr() - of[0].data_ptr()) % (UNIT * x.element_size()) == 0
        for of in lists
        for x in of
    )


def table_of(*lists: Sequence[Tensor]) -> tuple[Tensor, int, dict[str, int]]:
    """Return the table of these lists, whose tensors have equal sizes, the number of chunks, and the constants of a
    kernel. Sizes are counted in whole units, too, if that is possible."""
    assert is_aligned(*lists)
    sizes, device = [x.numel() for x in lists[0]], lists[0][0].device
    first_chunks = list(itertools.accumulate((triton.cdiv(size, CHUNK) for size in sizes), initial=0))
    size_unit = UNIT if all(size % UNIT == 0 for size in sizes) else 1
    distances = [[(x.data_ptr() - of[0].data_ptr()) // (UNIT * x.element_size()) for x in of] for of in lists]
    # From pinned memory, so that the host does not wait.
    rows = [first_chunks[:-1], [size // size_unit for size in sizes], *distances]
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    constants = {
        "TENSORS": triton.next_power_of_2(len(sizes)),
        "SIZE_UNIT": size_unit,
        "UNIT": UNIT,
        "CHUNK": CHUNK,
        "BLOCK": BLOCK,
    }
    return table.to(device, non_blocking=True), first_chunks[-1], constants


@triton.jit
def find_chunk(table, tensors, TENSORS: tl.constexpr, SIZE_UNIT: tl.constexpr, CHUNK: tl.constexpr):
    """The column of this program's tensor in the table, and the first element and the end of the program's chunk."""
    chunk = tl.program_id(0)
    number = tl.arange(0, TENSORS)
    first_chunk = tl.load(table + number, mask=number < tensors, other=9223372036854775807)
    tensor = tl.sum((first_chunk <= chunk).to(tl.int32)) - 1
    start = (chunk - tl.load(table + tensor)) * CHUNK
    return table + tensor, start, tl.load(table + tensors + tensor) * SIZE_UNIT


@triton.jit
def squares_kernel(
    x,
    partial_sums,
    table,
    tensors,
    TENSORS: tl.constexpr,
    SIZE_UNIT: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Σ x² of each chunk, float32."""
    column, start, end = find_chunk(table, tensors, TENSORS, SIZE_UNIT, CHUNK)
    x += tl.load(column + 2 * tensors) * UNIT
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, CHUNK, BLOCK):
        at = start + first + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < end, other=0.0).to(tl.float32)
        total += value * value
    tl.store(partial_sums + tl.program_id(0), tl.sum(total))


def sum_of_squares_on_gpu(tensors: Sequence[Tensor]) -> Tensor:
    """Σ x² of all tensors, a float32 scalar. The order of the sum is the same in each run."""
    table, chunks, constants = table_of(tensors)
    partial_sums = torch.empty(chunks, dtype=torch.float32, device=table.device)
    squares_kernel[(chunks,)](
        tensors[0],
        partial_sums,
        table,
        len(tensors),
        **constants,
        num_warps=WARPS,
    )
    return partial_sums.sum()


@triton.jit
def add_kernel(
    total,
    x,
    table,
    tensors,
    ADD: tl.constexpr,
    TENSORS: tl.constexpr,
    SIZE_UNIT: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """total += x, or total = x without ADD."""
    column, start, end = find_chunk(table, tensors, TENSORS, SIZE_UNIT, CHUNK)
    total += tl.load(column + 2 * tensors) * UNIT
    x += tl.load(column + 3 * tensors) * UNIT
    for first in range(0, CHUNK, BLOCK):
        at = start + first + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < end).to(tl.float32)
        if ADD:
            value += tl.load(total + at, mask=at < end)
        tl.store(total + at, value, mask=at < end)


def add_on_gpu(totals: Sequence[Tensor], tensors: Sequence[Tensor], *, add: bool) -> None:
    """totals += tensors, or totals = tensors without `add`. totals: float32."""
    table, chunks, constants = table_of(totals, tensors)
    add_kernel[(chunks,)](
        totals[0],
        tensors[0],
        table,
        len(totals),
        ADD=add,
        **constants,
        num_warps=WARPS,
    )


@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    param,
    table,
    tensors,
    step,
    rate,
    grad_scale,
    found_inf,
    new_share,
    new_share_sq,
    log2_beta1,
    log2_beta2,
    eps,
    weight_decay,
    HAS_PARAM: tl.constexpr,
    TENSORS: tl.constexpr,
    SIZE_UNIT: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`adamw_` of a chunk. new_share: 1 - β1, new_share_sq: 1 - β2, computed in float64 and rounded."""
    column, start, end = find_chunk(table, tensors, TENSORS, SIZE_UNIT, CHUNK)
    if tl.load(found_inf) == 0:
        master += tl.load(column + 2 * tensors) * UNIT
        grad += tl.load(column + 3 * tensors) * UNIT
        exp_avg += tl.load(column + 4 * tensors) * UNIT
        exp_avg_sq += tl.load(column + 5 * tensors) * UNIT
        if HAS_PARAM:
            param += tl.load(column + 6 * tensors) * UNIT
        # 1 - β^step; β2 is so near 1 that float32 would leave 3 digits of the first step.
        number = (tl.load(step) + 1).to(tl.float64)
        correction = (1.0 - tl.exp2(number * log2_beta1)).to(tl.float32)
        correction_sq = tl.sqrt((1.0 - tl.exp2(number * log2_beta2)).to(tl.float32))
        lr = tl.load(rate)
        unscale = 1.0 / tl.load(grad_scale)
        for first in range(0, CHUNK, BLOCK):
            at = start + first + tl.arange(0, BLOCK)
            g = tl.load(grad + at, mask=at < end) * unscale
            m = tl.load(exp_avg + at, mask=at < end)
            v = tl.load(exp_avg_sq + at, mask=at < end)
            w = tl.load(master + at, mask=at < end)
            m += new_share * (g - m)
            v += new_share_sq * (g * g - v)
            w -= lr * weight_decay * w
            w -= lr / correction * m / (tl.sqrt(v) / correction_sq + eps)
            tl.store(exp_avg + at, m, mask=at < end)
            tl.store(exp_avg_sq + at, v, mask=at < end)
            tl.store(master + at, w, mask=at < end)
            if HAS_PARAM:
                tl.store(param + at, w.to(param.dtype.element_ty), mask=at < end)


def adamw_on_gpu(
    masters: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    params: Sequence[Tensor],
    step: Tensor,
    rate: Tensor,
    grad_scale: Tensor,
    found_inf: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """See `mpu.kernels.optimizer.adamw_`. step: the number of earlier updates."""
    table, chunks, constants = table_of(masters, grads, exp_avgs, exp_avg_sqs, *([params] if params else []))
    adamw_kernel[(chunks,)](
        masters[0],
        grads[0],
        exp_avgs[0],
        exp_avg_sqs[0],
        params[0] if params else masters[0],
        table,
        len(masters),
        step,
        rate,
        grad_scale,
        found_inf,
        1 - beta1,
        1 - beta2,
        math.log2(beta1),
        math.log2(beta2),
        eps,
        weight_decay,
        HAS_PARAM=bool(params),
        **constants,
        num_warps=WARPS,
    )
