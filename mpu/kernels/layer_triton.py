"""The parts of a transformer layer between its matrix products, in Triton. See `layer.py`.

Each kernel that has a tensor's values at hand also sums them for the gradient of a bias. A program sums its rows in
float32, in an order that does not depend on the GPU, and torch adds up the programs' sums.

Legend: b batch, s sequence, t tokens, h hidden, n heads, d head size, f width of a linear layer's output.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpu.kernels.dropout import drop_threshold, keep_scale
from mpu.kernels.dropout_triton import random_draws

PROGRAMS = 256  # These share the rows of a sum: two for each multiprocessor of an H100.
GELU_COLUMNS = 256  # elements of a row that a program of GELU's backward has at once
TILE = 2048  # elements that a program has at once
WARPS = TILE // 512  # 16 elements for each thread, which are one block of random draws


@triton.jit
def gelu_backward_kernel(dy, x, dx, sums, t, f, rows, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """dx = dy · gelu'(x) [t, f]; sums [programs, f]. program_id is (block of `rows` rows, block of COLUMNS columns)."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        row = tl.program_id(0) * rows + start + tl.arange(0, ROWS)
        inside = (row < t)[:, None] & (column < f)[None, :]
        at = row.to(tl.int64)[:, None] * f + column[None, :]
        z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if TANH:  # ½(1 + tanh(u)) = sigmoid(2u)
            gate = tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
            slope = gate + z * gate * (1 - gate) * 1.5957691216057308 * (1 + 0.134145 * z * z)
        else:
            slope = 0.5 * (1 + tl.erf(z * 0.7071067811865476)) + z * tl.exp(-0.5 * z * z) * 0.3989422804014327
        grad = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32) * slope
        tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=inside)
        total += grad
    tl.store(sums + tl.program_id(0) * f + column, tl.sum(total, axis=0), mask=column < f)


def gelu_backward(dy: Tensor, x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """[..., f], [..., f] -> the gradient of x, and its sum [f]."""
    dy, x = dy.contiguous(), x.contiguous()
    f = x.size(-1)
    t = x.numel() // f
    dx, at_once = torch.empty_like(x), TILE // GELU_COLUMNS
    rows, blocks = _share_of_rows(t, at_once)
    sums = x.new_empty(blocks, f, dtype=torch.float32)
    gelu_backward_kernel[blocks, triton.cdiv(f, GELU_COLUMNS)](
        dy, x, dx, sums, t, f, rows, TANH=approximate == "tanh", ROWS=at_once, COLUMNS=GELU_COLUMNS, num_warps=WARPS
    )
    return dx, sums.sum(dim=0).to(x.dtype)


@triton.jit
def stack_qkv_kernel(
    dq, dk, dv, out, sums, t, b, n, d, stride_s, stride_b, stride_n, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """out [t, n, 3, d] and sums [programs, n, 3, d] from dq, dk and dv [s, b, n, d], which have the same strides.
    program_id is (block of `rows` rows, head)."""
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
    """Three of [s, b, n, d] -> [s, b, n, 3, d], and its sum [n·3·d]."""
    s, b, n, d = dq.shape
    if dq.stride(-1) != 1 or not dq.stride() == dk.stride() == dv.stride():
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    columns = triton.next_power_of_2(d)
    at_once = max(TILE // columns, 1)
    rows, blocks = _share_of_rows(s * b, at_once)
    out = dq.new_empty(s, b, n, 3, d)
    sums = dq.new_empty(blocks, n * 3 * d, dtype=torch.float32)
    stack_qkv_kernel[blocks, n](
        dq,
        dk,
        dv,
        out,
        sums,
        s * b,
        b,
        n,
        d,
        *dq.stride()[:3],
        rows,
        ROWS=at_once,
        COLUMNS=columns,
        num_warps=WARPS,
    )
    return out, sums.sum(dim=0).to(dq.dtype)


@triton.jit
def add_norm_kernel(
    x, branch, bias, weight, norm_bias, seeds, out, y, mean, rstd,
    t, b, h, eps, first_position, dropped, keep_scale,
    LOCATION: tl.constexpr, DROPOUT: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = x + dropout(branch + bias) [t, h] and, with NORM, y = norm(out) with its statistics [t]. program_id is the
    number of a block of ROWS rows."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    real = column < h
    inside = (row < t)[:, None] & real[None, :]
    at = row.to(tl.int64)[:, None] * h + column[None, :]
    value = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
    if DROPOUT:
        block = tl.arange(0, BLOCK // 16)
        draw = random_draws(seeds, row, block, b, h, first_position, LOCATION, ROWS, BLOCK // 16)
        value = tl.where(draw >= dropped, value * keep_scale, 0.0)
    value = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + value).to(out.dtype.element_ty)
    tl.store(out + at, value, mask=inside)
    if NORM:
        value = value.to(tl.float32)
        centre = tl.sum(tl.where(real[None, :], value, 0.0), axis=1) / h
        value = tl.where(real[None, :], value - centre[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(value * value, axis=1) / h + eps)
        tl.store(mean + row, centre, mask=row < t)
        tl.store(rstd + row, scale, mask=row < t)
        value *= scale[:, None] * tl.load(weight + column, mask=real, other=0.0).to(tl.float32)[None, :]
        value += tl.load(norm_bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
        tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_backward_kernel(
    grad, dy, x, mean, rstd, weight, seeds, dx, d_branch, sums,
    t, b, h, rows, first_position, dropped, keep_scale,
    LOCATION: tl.constexpr, DROPOUT: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = grad + the gradient of norm(x); d_branch = dropout(dx); sums [programs, 3 or 1, h] of d_branch and, with
    NORM, for the gradients of the norm's weight and bias. Without NORM dx is grad, and is not written. Without
    DROPOUT d_branch is dx, and is not written. program_id is the number of a block of `rows` rows."""
    column = tl.arange(0, BLOCK)
    real = column < h
    if NORM:
        scale = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
        of_weight, of_bias = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    of_branch = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, rows, ROWS):
        row = tl.program_id(0) * rows + start + tl.arange(0, ROWS)
        inside = (row < t)[:, None] & real[None, :]
        at = row.to(tl.int64)[:, None] * h + column[None, :]
        value = tl.load(grad + at, mask=inside, other=0.0)
        if NORM:
            of_y = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
            inverse = tl.load(rstd + row, mask=row < t, other=0.0)[:, None]
            centre = tl.load(mean + row, mask=row < t, other=0.0)[:, None]
            normed = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - centre) * inverse
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


def add_norm(
    x: Tensor,
    branch: Tensor,
    bias: Tensor,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    seeds: Tensor | None,
    p: float,
    location: int,
    first_position: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_add_norm` of `layer.py`."""
    x, branch = x.contiguous(), branch.contiguous()
    s, b, h = x.shape
    out, shape = torch.empty_like(x), tile(h)
    rows = s * b if weight is not None else 0
    y, (mean, rstd) = x.new_empty(x.shape if rows else 0), x.new_empty(2, rows, dtype=torch.float32)
    add_norm_kernel[(triton.cdiv(s * b, shape["ROWS"]),)](
        x, branch, bias, weight, norm_bias, seeds, out, y, mean, rstd,
        s * b, b, h, eps, first_position, drop_threshold(p) - 32768, keep_scale(p),
        LOCATION=location, DROPOUT=seeds is not None, NORM=weight is not None, **shape,
    )  # fmt: skip
    return out, y, mean, rstd


def add_norm_backward(
    grad: Tensor,
    dy: Tensor | None,
    x: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    seeds: Tensor | None,
    p: float,
    location: int,
    first_position: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_add_norm_backward` of `layer.py`."""
    grad, dy = grad.contiguous(), None if dy is None else dy.contiguous()
    s, b, h = grad.shape
    shape = tile(h)
    rows, blocks = _share_of_rows(s * b, shape["ROWS"])
    dx = grad.new_empty(0 if weight is None else grad.shape)
    d_branch = grad.new_empty(0 if seeds is None else grad.shape)
    sums = grad.new_empty(blocks, 1 if weight is None else 3, h, dtype=torch.float32)
    add_norm_backward_kernel[(blocks,)](
        grad, dy, x, mean, rstd, weight, seeds, dx, d_branch, sums,
        s * b, b, h, rows, first_position, drop_threshold(p) - 32768, keep_scale(p),
        LOCATION=location, DROPOUT=seeds is not None, NORM=weight is not None, **shape,
    )  # fmt: skip
    return dx, d_branch, sums.sum(dim=0).to(grad.dtype)


def tile(h: int) -> dict[str, int]:
    """Return the shape of a program's tile for rows of h elements, and its warps."""
    block = max(triton.next_power_of_2(h), 16)
    rows = max(TILE // block, 1)
    return {"ROWS": rows, "BLOCK": block, "num_warps": max(rows * block // 512, 1)}


def _share_of_rows(t: int, at_once: int) -> tuple[int, int]:
    """Return how many rows each program sums, a multiple of `at_once`, and the number of programs."""
    rows = triton.cdiv(triton.cdiv(t, PROGRAMS), at_once) * at_once
    return rows, triton.cdiv(t, rows)
