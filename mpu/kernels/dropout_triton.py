"""`seeded_dropout` on a GPU: the Philox generator of `dropout.py` in Triton, which is part of torch's GPU builds. One
kernel reads and writes each element once.

Legend: b batch, s positions, h hidden.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = 64  # One Triton program computes this number of counter blocks: 1,024 elements.
WARPS = 2  # Each thread computes one block.


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
    """The random draws of some blocks of some rows, int16 [ROWS, 16 * SIZE]. A row is one position of one sample.

    row: [ROWS]. block: [SIZE], the numbers of the blocks in each row.
    """
    key = seeds + row % b * 3
    seed, sample, layer = tl.load(key), tl.load(key + 1), tl.load(key + 2)
    position = (first_position + row // b).to(tl.int64)
    number = (position[:, None] * tl.cdiv(h, 16) + block[None, :] + 1).to(tl.uint64)
    same = tl.zeros_like(number)
    w0, w1, w2, w3 = philox_4x64(
        number,
        same + sample.to(tl.uint64)[:, None],
        same + (layer << 8 | LOCATION).to(tl.uint64)[:, None],
        same,
        same + seed.to(tl.uint64)[:, None],
        same,
    )
    # Each block has the words w0, w1, w2, w3.
    word = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(ROWS, SIZE * 4)
    return tl.join(
        tl.join(word.to(tl.int16), (word >> 32).to(tl.int16)),
        tl.join((word >> 16).to(tl.int16), (word >> 48).to(tl.int16)),
    ).reshape(ROWS, SIZE * 16)


@triton.jit
def dropout_kernel(
    x, out, seeds, b, h, first_position, dropped, keep_scale, LOCATION: tl.constexpr, BLOCKS: tl.constexpr
):
    """program_id is (row, part of the row)."""
    row = tl.program_id(0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    draw = random_draws(seeds, row + tl.arange(0, 1), block, b, h, first_position, LOCATION, 1, BLOCKS)
    column = tl.program_id(1) * BLOCKS * 16 + tl.arange(0, BLOCKS * 16)
    at = row.to(tl.int64) * h + column
    value = tl.load(x + at, mask=column < h)
    raised = (value.to(tl.float32) * keep_scale).to(value.dtype)
    kept = draw.reshape(BLOCKS * 16) >= dropped
    tl.store(out + at, tl.where(kept, raised, tl.zeros_like(raised)), mask=column < h)


def dropout_on_gpu(
    x: Tensor, seeds: Tensor, location: int, first_position: int, dropped: int, keep_scale: float
) -> Tensor:
    """x [s, b, h], contiguous: `dropped` of 65,536 elements become 0, the other elements are multiplied by
    `keep_scale`. The other arguments are those of `seeded_dropout`."""
    s, b, h = x.shape
    out = torch.empty_like(x)
    grid = s * b, triton.cdiv(h, 16 * BLOCKS)
    dropout_kernel[grid](
        x,
        out,
        seeds,
        b,
        h,
        first_position,
        dropped - 32768,
        keep_scale,
        LOCATION=location,
        BLOCKS=BLOCKS,
        num_warps=WARPS,
    )
    return out
