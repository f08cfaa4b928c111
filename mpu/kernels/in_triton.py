"""The code of all kernels in Triton, which is a part of torch's builds for GPUs; `triton_kernel.py` explains when this
file is imported. A function with the name of an operator launches the kernel of the operator. The reference of the
operator has the same name after an underscore, and describes the arguments.

The dropout kernel draws the masks of `dropout.py`, and reads and writes each element once.

The kernels of a layer are explained in `layer.py`. A kernel that reads or computes the gradient of a linear layer's
output also sums this gradient, which gives the gradient of the bias. Each program sums its rows in float32, in an order
that does not depend on the GPU, and `add_up` adds the sums of all programs.

One launch computes a product and GELU. Each program computes several tiles of the result, one after the other. In
forward, the program rounds a tile of z, and writes the tile and its GELU. In backward, it multiplies a tile of y's
gradient by the slopes of GELU. The tensor memory accelerator of the GPU (since Hopper) copies the tiles from and to
memory. No GPU has run this kernel yet.

The kernel of the loss reads each logit once from memory and overwrites it once. A program computes one row of logits
(100 KB in bf16), so when it reads the row again, the row is in the cache of the GPU:

    d logits = weight · (softmax(logits) - one-hot(target))

The operations on lists of tensors (the sum of squares, AdamW, and gradients that are added to their buckets) take one
launch for all tensors. A program computes one chunk of one tensor, which the program finds in a table on the GPU, int64
[2 + lists, tensors]. For each tensor the table has the index of its first chunk, its number of elements and, for each
list, its distance from the first tensor of the list. Distances are counted in units of 16 elements, so that the
compiler loads 16 bytes at once.

Times on an H200 (its copies reach 4.2 TB/s) for 32,768 tokens of GPT-2 345M in bf16, torch 2.11, 2026-11-26:

    GELU                               0.14 ms, 3.7 TB/s    torch: 0.17 ms
    its gradient and bias sum          0.23 ms, 3.5 TB/s    torch: 0.24 + 0.09 ms
    bias, residual and norm            0.07 ms, 3.8 TB/s    with dropout: 0.08 ms
    their gradients and sums           0.09 ms, 3.0 TB/s    with dropout: 0.13 ms
    qkv gradient and bias sum          0.14 ms, 2.8 TB/s
    loss and gradient of the logits    2.4 ms, 2.8 TB/s
    AdamW of 352M parameters           2.7 ms, 4.0 TB/s

Matrix products with an fp32 result (`out_dtype`) could add weight gradients to their buckets. This would save only 0 to
2 % of a product's time, so such products are not used.

Legend: b batch, s sequence, t or c tokens, h hidden, n heads, d head size, f width of a linear layer's output, v/tp
columns of this rank.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import itertools
import math
from collections.abc import Sequence
from types import NotImplementedType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Kernels can read only global constants that are tl.constexpr.
DROPOUT_BLOCKS = tl.constexpr(64)  # One Triton program computes this number of counter blocks: 1,024 elements.
LAYER_STAGES = tl.constexpr(3)  # A program loads the rows of the next two iterations in advance.
LAYER_TILE = tl.constexpr(2048)  # elements that a program has at once
GELU_COLUMNS = tl.constexpr(256)  # elements of a row that a program of GELU's backward has at once
GELU_ROWS = tl.constexpr(LAYER_TILE // GELU_COLUMNS)
SUM_COLUMNS = tl.constexpr(32)  # columns of a program that adds up sums
LOSS_COLUMNS = tl.constexpr(2048)  # columns of a row that the kernel of the loss computes at a time
UNIT = tl.constexpr(16)  # elements in a unit of the distances and sizes in a table
CHUNK = tl.constexpr(16384)  # elements of a list's tensor that one program computes
LIST_BLOCK = tl.constexpr(1024)  # elements of a chunk that the program computes at a time

DROPOUT_WARPS = 2  # Each thread computes one block.
LAYER_PROGRAMS = 264  # programs that share the rows of a sum: two for each multiprocessor of an H100
LAYER_WARPS = LAYER_TILE.value // 512  # 16 elements for each thread, which are one block of random draws
# A tile of a product has ROWS rows and COLUMNS columns. One step adds TERMS terms to each sum. The programs compute
# GROUP tiles below each other, then the next column of tiles. These tiles share operands, which stay in the cache.
PRODUCT_ROWS, PRODUCT_COLUMNS, PRODUCT_TERMS = 128, 256, 64
PRODUCT_TILE = {"ROWS": PRODUCT_ROWS, "COLUMNS": PRODUCT_COLUMNS, "TERMS": PRODUCT_TERMS, "GROUP": 8}
PRODUCT_MEMORY = 184_320  # bytes of shared memory that a program may need
PRODUCT_STAGES, PRODUCT_WARPS = 3, 8
SUM_WARPS = 8
MOST_SUMS = 1024  # A program that adds up sums has no registers for more.
LOSS_WARPS = 4
LIST_WARPS = 8


@triton.jit
def load(pointer, mask):
    """Return float32 values, 0 outside of the mask."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


# --- dropout


@triton.jit
def philox_4x64(c0, c1, c2, c3, k0, k1):
    """Return four random uint64 words from a counter and a key, in ten rounds."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2E7470EE14C6C93), c0 * 0xD2E7470EE14C6C93
        high1, low1 = tl.umulhi(c2, 0xCA5A826395121157), c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B97F4A7C15
        k1 += 0xBB67AE8584CAA73B
    return c0, c1, c2, c3


@triton.jit
def random_draws(
    seeds, row, block, b, h, first_position, LOCATION: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr
):
    """Return the random draws of blocks of rows, int16 [ROWS, 16 * SIZE]. A row is one position of one sample.

    row: [ROWS]. block: [SIZE], the indices of the blocks in each row.
    """
    key = seeds + row % b * 3
    seed, sample, layer = tl.load(key), tl.load(key + 1), tl.load(key + 2)
    position = (first_position + row // b).to(tl.int64)
    counter = (position[:, None] * tl.cdiv(h, 16) + block[None, :] + 1).to(tl.uint64)
    zero = tl.zeros_like(counter)
    w0, w1, w2, w3 = philox_4x64(
        counter,
        zero + sample.to(tl.uint64)[:, None],
        zero + (layer << 8 | LOCATION).to(tl.uint64)[:, None],
        zero,
        zero + seed.to(tl.uint64)[:, None],
        zero,
    )
    # Each block has the words w0, w1, w2, w3.
    word = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(ROWS, SIZE * 4)
    return tl.join(
        tl.join(word.to(tl.int16), (word >> 32).to(tl.int16)),
        tl.join((word >> 16).to(tl.int16), (word >> 48).to(tl.int16)),
    ).reshape(ROWS, SIZE * 16)


@triton.jit
def dropout_kernel(x, out, seeds, b, h, first_position, dropped, keep_scale, LOCATION: tl.constexpr):
    """program_id is (row, part of the row)."""
    row = tl.program_id(0)
    block = tl.program_id(1) * DROPOUT_BLOCKS + tl.arange(0, DROPOUT_BLOCKS)
    draw = random_draws(seeds, row + tl.arange(0, 1), block, b, h, first_position, LOCATION, 1, DROPOUT_BLOCKS)
    column = tl.program_id(1) * DROPOUT_BLOCKS * 16 + tl.arange(0, DROPOUT_BLOCKS * 16)
    at = row.to(tl.int64) * h + column
    value = tl.load(x + at, mask=column < h)
    raised = (value.to(tl.float32) * keep_scale).to(value.dtype)
    kept = draw.reshape(DROPOUT_BLOCKS * 16) >= dropped
    tl.store(out + at, tl.where(kept, raised, tl.zeros_like(raised)), mask=column < h)


def seeded_dropout(x: Tensor, dropped: int, seeds: Tensor, location: int, first_position: int) -> Tensor:
    """See `_seeded_dropout` of `dropout.py`."""
    x = x.contiguous()
    s, b, h = x.shape
    out = torch.empty_like(x)
    grid = s * b, triton.cdiv(h, 16 * DROPOUT_BLOCKS.value)
    dropout_kernel[grid](
        x, out, seeds, b, h, first_position, *limit_and_scale(dropped), LOCATION=location, num_warps=DROPOUT_WARPS
    )
    return out


def limit_and_scale(dropped: int) -> tuple[int, float]:
    """Return the smallest draw that keeps an element, and the scale of these elements."""
    return dropped - 32768, 65536 / (65536 - dropped)


# --- a layer between its matrix products


@triton.jit
def gelu_gate(z, bell, TANH: tl.constexpr, FAST: tl.constexpr):
    """gelu(z) / z. bell: exp(-z²/2). FAST: formula 7.1.26 of Abramowitz and Stegun for Φ(z), with an error of at most
    4e-7 in float32; the kernels of GELU take 20 % less time than with erf."""
    if TANH:  # ½(1 + tanh(u)) = sigmoid(2u)
        return tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif FAST:
        t = 1 / (1 + 0.2316418882 * tl.abs(z))
        series = t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))
        tail = t * (0.127414796 + t * (-0.142248368 + series)) * bell
        return tl.where(z < 0, tail, 1 - tail)
    else:
        return 0.5 * (1 + tl.erf(z * 0.7071067811865476))


@triton.jit
def gelu_slope(z, TANH: tl.constexpr, FAST: tl.constexpr):
    """gelu'(z)."""
    bell = tl.exp(-0.5 * z * z)
    gate = gelu_gate(z, bell, TANH, FAST)
    if TANH:
        return gate + z * gate * (1 - gate) * 1.5957691216057308 * (1 + 0.134145 * z * z)
    else:
        return gate + z * bell * 0.3989422804014327


@triton.jit
def gelu_kernel(x, y, size, TANH: tl.constexpr, FAST: tl.constexpr):
    """y = gelu(x). program_id is the number of a block of LAYER_TILE elements."""
    at = tl.program_id(0).to(tl.int64) * LAYER_TILE + tl.arange(0, LAYER_TILE)
    z = load(x + at, at < size)
    gate = gelu_gate(z, tl.exp(-0.5 * z * z), TANH, FAST)
    tl.store(y + at, (z * gate).to(y.dtype.element_ty), mask=at < size)


def gelu(x: Tensor, approximate: str) -> Tensor:
    """See `_gelu` of `layer.py`."""
    x = x.contiguous()
    y, size = torch.empty_like(x), x.numel()
    gelu_kernel[(triton.cdiv(size, LAYER_TILE.value),)](x, y, size, **formula(x, approximate), num_warps=LAYER_WARPS)
    return y


def formula(x: Tensor, approximate: str) -> dict[str, bool]:
    """Return the constants of `gelu_gate`."""
    return {"TANH": approximate == "tanh", "FAST": x.dtype != torch.float32}


@triton.jit
def gelu_backward_kernel(dy, x, dx, sums, t, f, rows: tl.constexpr, TANH: tl.constexpr, FAST: tl.constexpr):
    """dx = dy · gelu'(x) [t, f], and its sums [programs, f]. program_id is (block of `rows` rows, block of columns).

    dx may be dy: with one pointer for both, the compiler spills registers.
    """
    column = tl.program_id(1) * GELU_COLUMNS + tl.arange(0, GELU_COLUMNS)
    total = tl.zeros((GELU_ROWS, GELU_COLUMNS), tl.float32)
    for start in tl.range(0, rows, GELU_ROWS, num_stages=LAYER_STAGES):
        row = tl.program_id(0) * rows + start + tl.arange(0, GELU_ROWS)
        inside = (row < t)[:, None] & (column < f)[None, :]
        at = row.to(tl.int64)[:, None] * f + column[None, :]
        grad = load(dy + at, inside) * gelu_slope(load(x + at, inside), TANH, FAST)
        tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=inside)
        total += grad
    tl.store(sums + tl.program_id(0) * f + column, tl.sum(total, axis=0), mask=column < f)


def gelu_backward_(grad: Tensor, total: Tensor, x: Tensor, approximate: str):
    """See `_gelu_backward_` of `layer.py`."""
    if not grad.is_contiguous():
        return NotImplemented
    x, f = x.contiguous(), x.size(-1)
    t = x.numel() // f
    rows, blocks = share_of_rows(t, GELU_ROWS.value)
    sums = x.new_empty(blocks, f, dtype=torch.float32)
    gelu_backward_kernel[blocks, triton.cdiv(f, GELU_COLUMNS.value)](
        grad, x, grad, sums, t, f, rows, **formula(x, approximate), num_warps=LAYER_WARPS
    )
    add_up(sums, total)
    return None


@triton.jit
def product_gelu_kernel(
    a, b, bias_or_sums, z, out, t, f, h, BACKWARD: tl.constexpr, TANH: tl.constexpr, FAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Forward: z = abᵀ + bias and out = gelu(z), for a [t, h], b [f, h] and bias [f]. Backward, with b [h, f]:
    out = gelu'(z) · ab, and the sums of out [tiles of rows, f]."""
    QUARTER: tl.constexpr = COLUMNS // 4
    across = tl.cdiv(f, COLUMNS)
    for tile in tl.range(tl.program_id(0), tl.cdiv(t, ROWS) * across, tl.num_programs(0), flatten=True):
        first = tile // (GROUP * across) * GROUP
        height = min(tl.cdiv(t, ROWS) - first, GROUP)
        block = first + tile % (GROUP * across) % height
        row, column = block * ROWS, tile % (GROUP * across) // height * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(tl.cdiv(h, TERMS)):
            term = step * TERMS
            if BACKWARD:
                total = tl.dot(a.load([row, term]), b.load([term, column]), total)
            else:
                total = tl.dot(a.load([row, term]), b.load([column, term]).T, total)
        # Compute GELU of a quarter of the tile at a time. The whole tile needs more registers than a thread has.
        for half in tl.static_range(2):
            for quarter in tl.static_range(2):
                value = part_of_columns(part_of_columns(total, half), quarter)
                at = column + (2 * half + quarter) * QUARTER
                columns = at + tl.arange(0, QUARTER)
                if BACKWARD:
                    value *= gelu_slope(z.load([row, at]).to(tl.float32), TANH, FAST)
                    tl.store(bias_or_sums + block * f + columns, tl.sum(value, axis=0), mask=columns < f)
                else:
                    rounded = (value + load(bias_or_sums + columns, columns < f)[None, :]).to(z.dtype)
                    z.store([row, at], rounded)
                    value = rounded.to(tl.float32)
                    value *= gelu_gate(value, tl.exp(-0.5 * value * value), TANH, FAST)
                out.store([row, at], value.to(out.dtype))


@triton.jit
def part_of_columns(x, NUMBER: tl.constexpr):
    """Return the left (0) or right (1) half of the columns of x."""
    left, right = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))
    return left if NUMBER == 0 else right


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, approximate: str):
    """See `_linear_gelu` of `layer.py`."""
    if not supports_product(x, weight):
        return NotImplemented
    z, y = (x.new_empty(*x.shape[:-1], len(weight)) for _ in range(2))
    product_gelu(x, descriptor(weight, PRODUCT_COLUMNS, PRODUCT_TERMS), bias, z, y, approximate, backward=False)
    return z, y


def linear_gelu_backward(dy: Tensor, weight: Tensor, z: Tensor, approximate: str):
    """See `_linear_gelu_backward` of `layer.py`."""
    f = z.size(-1)
    tiles_of_rows = triton.cdiv(z.numel() // f, PRODUCT_ROWS)
    if tiles_of_rows > MOST_SUMS or not z.is_contiguous() or not supports_product(dy, weight):
        return NotImplemented
    dz, sums = torch.empty_like(z), z.new_empty(tiles_of_rows, f, dtype=torch.float32)
    product_gelu(dy, descriptor(weight, PRODUCT_TERMS, PRODUCT_COLUMNS), sums, z, dz, approximate, backward=True)
    return dz, add_up(sums, z.new_empty(f))


def supports_product(x: Tensor, weight: Tensor) -> bool:
    """Return True if the GPU and the types and sizes of the matrices suit `product_gelu_kernel`."""
    is_aligned = weight.size(0) % 8 == weight.size(1) % 8 == weight.data_ptr() % 16 == x.data_ptr() % 16 == 0
    if x.dtype == torch.float32 or not (is_aligned and x.is_contiguous() and weight.is_contiguous()):
        return False
    properties: Any = torch.cuda.get_device_properties(x.device) if x.is_cuda else None  # Its type lacks an attribute.
    return properties is None or properties.shared_memory_per_block_optin >= PRODUCT_MEMORY


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe x [..., n] as a matrix that is copied in blocks of rows * columns elements."""
    n = x.size(-1)
    return TensorDescriptor(x, [x.numel() // n, n], [n, 1], [rows, columns])


def product_gelu(
    a: Tensor, b: TensorDescriptor, bias_or_sums: Tensor, z: Tensor, out: Tensor, approximate: str, backward: bool
) -> None:
    """Launch `product_gelu_kernel`."""
    h, f = a.size(-1), z.size(-1)
    t = z.numel() // f
    tiles = triton.cdiv(t, PRODUCT_ROWS) * triton.cdiv(f, PRODUCT_COLUMNS)
    processors = torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 3
    of_z, of_out = (descriptor(x, PRODUCT_ROWS, PRODUCT_COLUMNS // 4) for x in (z, out))
    # At least two tiles for each program, so that the comparison with the reference tests the loop over tiles.
    product_gelu_kernel[(min(triton.cdiv(tiles, 2), processors),)](
        descriptor(a, PRODUCT_ROWS, PRODUCT_TERMS), b, bias_or_sums, of_z, of_out, t, f, h,
        backward, **formula(a, approximate), **PRODUCT_TILE, num_stages=PRODUCT_STAGES, num_warps=PRODUCT_WARPS,
    )  # fmt: skip


@triton.jit
def add_up_kernel(sums, out, programs, width, ROWS: tl.constexpr):
    """out [width] = the sum of sums [programs, width]. program_id is the number of a block of SUM_COLUMNS columns."""
    column = tl.program_id(0) * SUM_COLUMNS + tl.arange(0, SUM_COLUMNS)
    row = tl.arange(0, ROWS)
    inside = (row < programs)[:, None] & (column < width)[None, :]
    value = load(sums + row[:, None] * width + column[None, :], inside)
    tl.store(out + column, tl.sum(value, axis=0).to(out.dtype.element_ty), mask=column < width)


def add_up(sums: Tensor, out: Tensor) -> Tensor:
    """Write the sum over the programs of sums, float32 [programs, ...], to out [...], in one launch. torch would take
    three launches."""
    add_up_kernel[(triton.cdiv(out.numel(), SUM_COLUMNS.value),)](
        sums, out, len(sums), out.numel(), ROWS=triton.next_power_of_2(len(sums)), num_warps=SUM_WARPS
    )
    return out


@triton.jit
def stack_qkv_kernel(
    dq, dk, dv, out, sums, t, b, n, d, stride_s, stride_b, stride_n,
    rows: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy dq, dk and dv [s, b, n, d], which have equal strides, to out [t, n, 3, d], and write the sums of out
    [programs, n, 3, d]. program_id is (block of `rows` rows, head)."""
    head, column = tl.program_id(1), tl.arange(0, COLUMNS)
    for part in tl.static_range(3):
        source = dq if part == 0 else dk if part == 1 else dv
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, rows, ROWS):
            row = (tl.program_id(0) * rows + start + tl.arange(0, ROWS)).to(tl.int64)
            inside = (row < t)[:, None] & (column < d)[None, :]
            given = (row // b * stride_s + row % b * stride_b)[:, None] + head * stride_n + column[None, :]
            value = tl.load(source + given, mask=inside, other=0.0)
            tl.store(out + ((row * n + head) * 3 + part)[:, None] * d + column[None, :], value, mask=inside)
            total += value.to(tl.float32)
        place = ((tl.program_id(0) * n + head) * 3 + part) * d
        tl.store(sums + place + column, tl.sum(total, axis=0), mask=column < d)


def stack_qkv(dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """See `_stack_qkv` of `layer.py`."""
    s, b, n, d = dq.shape
    if dq.stride(-1) != 1 or not dq.stride() == dk.stride() == dv.stride():
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    columns = triton.next_power_of_2(d)
    at_once = max(LAYER_TILE.value // columns, 1)
    rows, blocks = share_of_rows(s * b, at_once)
    out = dq.new_empty(s, b, n, 3, d)
    sums = dq.new_empty(blocks, n * 3 * d, dtype=torch.float32)
    stack_qkv_kernel[blocks, n](
        dq, dk, dv, out, sums, s * b, b, n, d, *dq.stride()[:3],
        rows, ROWS=at_once, COLUMNS=columns, num_warps=LAYER_WARPS,
    )  # fmt: skip
    return out, add_up(sums, dq.new_empty(sums.shape[1:]))


@triton.jit
def add_norm_kernel(
    x, branch, bias, weight, norm_bias, seeds, out, y, mean, rstd,
    t, b, h, eps, first_position, dropped, keep_scale,
    LOCATION: tl.constexpr, BRANCH: tl.constexpr, DROPOUT: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = x + dropout(branch + bias) [t, h] and, with NORM, y = norm(out) with its statistics [t]. Without BRANCH,
    out equals x and is not written. program_id is the number of a block of ROWS rows."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    real = column < h
    inside = (row < t)[:, None] & real[None, :]
    at = row.to(tl.int64)[:, None] * h + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0)
    if BRANCH:
        added = load(branch + at, inside)
        added += load(bias + column, real)[None, :]
        if DROPOUT:
            block = tl.arange(0, BLOCK // 16)
            draw = random_draws(seeds, row, block, b, h, first_position, LOCATION, ROWS, BLOCK // 16)
            added = tl.where(draw >= dropped, added * keep_scale, 0.0)
        value = (value.to(tl.float32) + added).to(value.dtype)
        tl.store(out + at, value, mask=inside)
    if NORM:
        value = value.to(tl.float32)
        centre = tl.sum(tl.where(real[None, :], value, 0.0), axis=1) / h
        value = tl.where(real[None, :], value - centre[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(value * value, axis=1) / h + eps)
        tl.store(mean + row, centre, mask=row < t)
        tl.store(rstd + row, scale, mask=row < t)
        value *= scale[:, None] * load(weight + column, real)[None, :]
        value += load(norm_bias + column, real)[None, :]
        tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_backward_kernel(
    grad, dy, x, mean, rstd, weight, seeds, dx, d_branch, sums,
    t, b, h, rows: tl.constexpr, first_position, dropped, keep_scale,
    LOCATION: tl.constexpr, DROPOUT: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dx = grad + the gradient of norm(x); d_branch = dropout(dx). sums [programs, 3 or 1, h]: of d_branch and, with
    NORM, of the terms of the gradients of the norm's weight and bias. Without NORM, dx equals grad and is not written.
    Without DROPOUT, d_branch equals dx and is not written. program_id is the index of a block of `rows` rows."""
    column = tl.arange(0, BLOCK)
    real = column < h
    if NORM:
        scale = load(weight + column, real)
        of_weight, of_bias = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    of_branch = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(0, rows, ROWS, num_stages=STAGES):
        row = tl.program_id(0) * rows + start + tl.arange(0, ROWS)
        inside = (row < t)[:, None] & real[None, :]
        at = row.to(tl.int64)[:, None] * h + column[None, :]
        value = tl.load(grad + at, mask=inside, other=0.0)
        if NORM:
            of_y = load(dy + at, inside)
            inverse = load(rstd + row, row < t)[:, None]
            centre = load(mean + row, row < t)[:, None]
            normed = (load(x + at, inside) - centre) * inverse
            of_bias += of_y
            of_weight += of_y * normed
            of_y *= scale[None, :]
            # Columns after h have a gradient of 0.
            plain, along = tl.sum(of_y, axis=1) / h, tl.sum(of_y * normed, axis=1) / h
            of_y = (of_y - plain[:, None] - normed * along[:, None]) * inverse
            value = (value.to(tl.float32) + of_y).to(dx.dtype.element_ty)
            tl.store(dx + at, value, mask=inside)
        if DROPOUT:
            block = tl.arange(0, BLOCK // 16)
            draw = random_draws(seeds, row, block, b, h, first_position, LOCATION, ROWS, BLOCK // 16)
            value = tl.where(draw >= dropped, value.to(tl.float32) * keep_scale, 0.0).to(value.dtype)
            tl.store(d_branch + at, value, mask=inside)
        of_branch += tl.where(inside, value.to(tl.float32), 0.0)
    place = sums + tl.program_id(0) * (3 if NORM else 1) * h + column
    tl.store(place, tl.sum(of_branch, axis=0), mask=real)
    if NORM:
        tl.store(place + h, tl.sum(of_weight, axis=0), mask=real)
        tl.store(place + 2 * h, tl.sum(of_bias, axis=0), mask=real)


def bias_dropout_add_norm(
    x: Tensor,
    branch: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    seeds: Tensor | None,
    dropped: int,
    location: int,
    first_position: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `_bias_dropout_add_norm` of `layer.py`."""
    x, branch = x.contiguous(), None if branch is None else branch.contiguous()
    s, b, h = x.shape
    out, shape = x.new_empty(0 if branch is None else x.shape), tile(h)
    rows = s * b if weight is not None else 0
    y = x.new_empty(x.shape if rows else 0)
    mean, rstd = (
        x.new_empty(rows, dtype=torch.float32) for _ in range(2)
    )  # An operator's results may not share memory.
    add_norm_kernel[(triton.cdiv(s * b, shape["ROWS"]),)](
        x, branch, bias, weight, norm_bias, seeds, out, y, mean, rstd,
        s * b, b, h, eps, first_position, *limit_and_scale(dropped),
        LOCATION=location, BRANCH=branch is not None, DROPOUT=seeds is not None, NORM=weight is not None, **shape,
    )  # fmt: skip
    return out, y, mean, rstd


def bias_dropout_add_norm_backward(
    grad: Tensor,
    dy: Tensor | None,
    x: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    seeds: Tensor | None,
    dropped: int,
    location: int,
    first_position: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `_bias_dropout_add_norm_backward` of `layer.py`."""
    grad, dy = grad.contiguous(), None if dy is None else dy.contiguous()
    s, b, h = grad.shape
    shape = tile(h)
    rows, blocks = share_of_rows(s * b, shape["ROWS"])
    dx = grad.new_empty(0 if weight is None else grad.shape)
    d_branch = grad.new_empty(0 if seeds is None else grad.shape)
    sums = grad.new_empty(blocks, 1 if weight is None else 3, h, dtype=torch.float32)
    add_norm_backward_kernel[(blocks,)](
        grad, dy, x, mean, rstd, weight, seeds, dx, d_branch, sums,
        s * b, b, h, rows, first_position, *limit_and_scale(dropped),
        LOCATION=location, DROPOUT=seeds is not None, NORM=weight is not None,
        STAGES=1 if grad.dtype == torch.float32 else LAYER_STAGES, **shape,  # Wide rows in float32 fill the registers.
    )  # fmt: skip
    return dx, d_branch, add_up(sums, grad.new_empty(sums.shape[1:]))


def tile(h: int) -> dict[str, int]:
    """Return the shape of a program's tile for rows of h elements, and its warps."""
    block = max(triton.next_power_of_2(h), 16)
    rows = max(LAYER_TILE.value // block, 1)
    return {"ROWS": rows, "BLOCK": block, "num_warps": max(rows * block // 512, 1)}


def share_of_rows(t: int, at_once: int) -> tuple[int, int]:
    """Return how many rows each program sums, a multiple of `at_once`, and the number of programs."""
    rows = triton.cdiv(triton.cdiv(t, LAYER_PROGRAMS), at_once) * at_once
    return rows, triton.cdiv(t, rows)


# --- the loss


@triton.jit
def cross_entropy_kernel(
    logits, stats, target, is_local, token_weight, tokens,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FIND_STATS: tl.constexpr, WRITE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Compute one row of logits [c, v/tp].

    stats: [3, c] float32, which the kernel writes if FIND_STATS, and else reads.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * WIDTH
    stats += row
    block = tl.arange(0, LOSS_COLUMNS)
    if FIND_STATS:
        largest = tl.full((), -3.4028234663852886e38, tl.float32)
        total = tl.full((), 0.0, tl.float32)
        for first in range(0, COLUMNS, LOSS_COLUMNS):
            at = first + block
            # The mask ends at a multiple of 16 bytes. Padding columns may begin before this end and are replaced below.
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
            tl.debug_barrier()  # After the barrier, every thread has read the target's logit.
        factor = tl.load(token_weight + row)
        of_target = tl.where(tl.load(is_local + row), tl.load(target + row), -1)
        scale = factor / total
        for first in range(0, WIDTH, LOSS_COLUMNS):
            at = first + block
            x = tl.load(logits + at, mask=at < WIDTH, other=0.0, eviction_policy="evict_first")
            exponent = tl.where(at < COLUMNS, x.to(tl.float32) - largest, float("-inf"))
            gradient = tl.exp(exponent) * scale - tl.where(at == of_target, factor, 0.0)
            tl.store(logits + at, gradient.to(x.dtype), mask=at < WIDTH)


def vocab_statistics(logits: Tensor, target: Tensor, is_local: Tensor, columns: int) -> Tensor:
    """See `_vocab_statistics` of `cross_entropy.py`."""
    stats = logits.new_empty(3, len(logits), dtype=torch.float32)
    cross_entropy_gradient_(logits, stats, target, is_local, columns, None, find_stats=True)
    return stats


def cross_entropy_gradient_(
    logits: Tensor,
    stats: Tensor,
    target: Tensor,
    is_local: Tensor,
    columns: int,
    weight: Tensor | None,
    find_stats: bool,
) -> None:
    """logits: [c, v/tp], contiguous. Without a weight no gradient is written."""
    tokens, width = logits.shape
    cross_entropy_kernel[(tokens,)](
        logits, stats, target, is_local, stats if weight is None else weight, tokens,
        COLUMNS=columns, WIDTH=width, FIND_STATS=find_stats, WRITE_GRADIENT=weight is not None, num_warps=LOSS_WARPS,
    )  # fmt: skip


# --- lists of tensors


def launch_on_lists(kernel, lists: Sequence[Sequence[Tensor]], *args: object, **constants: bool) -> bool:
    """Start a program for each chunk of the tensors in `lists`. Tensors with the same index have the same size in all
    lists. The kernel gets the first tensor of each list, the table, the number of tensors, and `args`. The table has
    sizes in units of UNIT elements if every size is a multiple of UNIT, else in elements.

    Return False, and start nothing, if a tensor is not contiguous, if the tensors of a list differ in dtype, or if a
    distance is not a multiple of UNIT.
    """
    sizes, distances = [x.numel() for x in lists[0]], []
    for first, *others in lists:
        unit = UNIT.value * first.element_size()
        bytes_after = [x.data_ptr() - first.data_ptr() for x in (first, *others)]
        is_supported = all(x.dtype == first.dtype and x.is_contiguous() for x in (first, *others))
        if not is_supported or any(distance % unit for distance in bytes_after):
            return False
        distances.append([distance // unit for distance in bytes_after])
    *first_chunks, chunks = itertools.accumulate((triton.cdiv(size, CHUNK.value) for size in sizes), initial=0)
    size_unit = UNIT.value if all(size % UNIT.value == 0 for size in sizes) else 1
    # The host does not wait for a copy from pinned memory.
    rows, device = [first_chunks, [size // size_unit for size in sizes], *distances], lists[0][0].device
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    kernel[(chunks,)](
        *(of[0] for of in lists), table, len(sizes), *args,
        TENSORS=triton.next_power_of_2(len(sizes)), SIZE_UNIT=size_unit, num_warps=LIST_WARPS, **constants,
    )  # fmt: skip
    return True


@triton.jit
def find_chunk(table, tensors, TENSORS: tl.constexpr, SIZE_UNIT: tl.constexpr):
    """Return the column of this program's tensor in the table, the first element of the program's chunk, and the size
    of the tensor."""
    chunk = tl.program_id(0)
    index = tl.arange(0, TENSORS)
    first_chunk = tl.load(table + index, mask=index < tensors, other=9223372036854775807)
    tensor = tl.sum((first_chunk <= chunk).to(tl.int32)) - 1
    start = (chunk - tl.load(table + tensor)) * CHUNK
    return table + tensor, start, tl.load(table + tensors + tensor) * SIZE_UNIT


@triton.jit
def squares_kernel(x, table, tensors, partial_sums, TENSORS: tl.constexpr, SIZE_UNIT: tl.constexpr):
    """Σ x² of each chunk, float32."""
    column, start, end = find_chunk(table, tensors, TENSORS, SIZE_UNIT)
    x += tl.load(column + 2 * tensors) * UNIT
    total = tl.zeros((LIST_BLOCK,), tl.float32)
    for first in range(0, CHUNK, LIST_BLOCK):
        at = start + first + tl.arange(0, LIST_BLOCK)
        value = load(x + at, at < end)
        total += value * value
    tl.store(partial_sums + tl.program_id(0), tl.sum(total))


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """See `_sum_of_squares` of `optimizer.py`. The order of summation is the same in each run."""
    chunks = sum(triton.cdiv(x.numel(), CHUNK.value) for x in tensors)
    partial_sums = torch.empty(chunks, dtype=torch.float32, device=tensors[0].device)
    return partial_sums.sum() if launch_on_lists(squares_kernel, [tensors], partial_sums) else NotImplemented


@triton.jit
def add_kernel(total, x, table, tensors, ADD: tl.constexpr, TENSORS: tl.constexpr, SIZE_UNIT: tl.constexpr):
    """total += x if ADD, else total = x."""
    column, start, end = find_chunk(table, tensors, TENSORS, SIZE_UNIT)
    total += tl.load(column + 2 * tensors) * UNIT
    x += tl.load(column + 3 * tensors) * UNIT
    for first in range(0, CHUNK, LIST_BLOCK):
        at = start + first + tl.arange(0, LIST_BLOCK)
        value = load(x + at, at < end)
        if ADD:
            value += load(total + at, at < end)
        tl.store(total + at, value, mask=at < end)


def add_grads_(totals: Sequence[Tensor], grads: Sequence[Tensor], add: bool) -> NotImplementedType | None:
    """See `_add_grads_` of `optimizer.py`."""
    return None if launch_on_lists(add_kernel, [totals, grads], ADD=add) else NotImplemented


@triton.jit
def adamw_kernel(
    master, grad, exp_avg, exp_avg_sq, param, table, tensors, step, rate, grad_scale, found_inf,
    new_share, new_share_sq, log2_beta1, log2_beta2, eps, weight_decay,
    HAS_PARAM: tl.constexpr, TENSORS: tl.constexpr, SIZE_UNIT: tl.constexpr,
):  # fmt: skip
    """`adamw_` of a chunk. new_share: 1 - β1, new_share_sq: 1 - β2, computed in float64 and rounded."""
    column, start, end = find_chunk(table, tensors, TENSORS, SIZE_UNIT)
    if tl.load(found_inf) == 0:
        master += tl.load(column + 2 * tensors) * UNIT
        grad += tl.load(column + 3 * tensors) * UNIT
        exp_avg += tl.load(column + 4 * tensors) * UNIT
        exp_avg_sq += tl.load(column + 5 * tensors) * UNIT
        if HAS_PARAM:
            param += tl.load(column + 6 * tensors) * UNIT
        # 1 - β^step in float64: β2 is near 1, so in float32 the first step would have 3 correct digits.
        update = (tl.load(step) + 1).to(tl.float64)
        correction = (1.0 - tl.exp2(update * log2_beta1)).to(tl.float32)
        correction_sq = tl.sqrt((1.0 - tl.exp2(update * log2_beta2)).to(tl.float32))
        lr = tl.load(rate)
        unscale = 1.0 / tl.load(grad_scale)
        for first in range(0, CHUNK, LIST_BLOCK):
            at = start + first + tl.arange(0, LIST_BLOCK)
            g = load(grad + at, at < end) * unscale
            m = load(exp_avg + at, at < end)
            v = load(exp_avg_sq + at, at < end)
            w = load(master + at, at < end)
            m += new_share * (g - m)
            v += new_share_sq * (g * g - v)
            w -= lr * weight_decay * w
            w -= lr / correction * m / (tl.sqrt(v) / correction_sq + eps)
            tl.store(exp_avg + at, m, mask=at < end)
            tl.store(exp_avg_sq + at, v, mask=at < end)
            tl.store(master + at, w, mask=at < end)
            if HAS_PARAM:
                tl.store(param + at, w.to(param.dtype.element_ty), mask=at < end)


def adamw_(
    masters: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    out_params: Sequence[Tensor],
    rate: Tensor,
    grad_scale: Tensor,
    found_inf: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """See `_adamw_` of `optimizer.py`."""
    lists = [masters, grads, exp_avgs, exp_avg_sqs, out_params or masters]
    shares, logarithms = (1 - beta1, 1 - beta2), (math.log2(beta1), math.log2(beta2))
    scalars = (steps[0], rate, grad_scale, found_inf, *shares, *logarithms, eps, weight_decay)
    launched = launch_on_lists(adamw_kernel, lists, *scalars, HAS_PARAM=bool(out_params))
    assert launched, "the optimizer's tensors begin at multiples of 64 elements of their buffers"
    # The increments are a list of tensors: for a single tensor the host would wait for its value.
    torch._foreach_add_(list(steps), [1 - found_inf] * len(steps))
