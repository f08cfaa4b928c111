"""Dropout whose masks follow from keys, so that nothing is kept for backward; and dropout on a CPU that draws from
torch's generator.

The bits of a keyed mask are a function of a key and a counter: Philox4x64-10 (Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", SC 2011). Nothing is drawn one after the other, so any rank can make any part of a mask, as often
as it is needed. On a CPU this is numpy's generator of that name, whose numbers numpy promises never to change.
`dropout_triton.py` is the same for a GPU; a test compares the two.

    key        the seed, 0
    counter    the number of a block, from 1 on, then three words that name a mask

Each block decides about 16 elements, with 16 bits for each.

Legend: b batch, s positions, h hidden.
"""

import functools
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ELEMENTS = 16  # of a block
WORD = 1 << 64
_AT_ONCE = 1 << 18  # elements whose draws stay in a core's cache
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Mask = tuple[int, int, int, int]  # the seed, and the three words of the counter


def dropped_draws(p: float) -> int:
    """How many of the 65,536 draws drop an element: p to the nearest 1/65536 below 1."""
    return min(round(p * 65536), 65535)


def factor(p: float) -> float:
    """What the other elements are multiplied by: 1 / (1 - p), for the p that `dropped_draws` takes."""
    return 65536 / (65536 - dropped_draws(p))


def masks_of_samples(keys: Tensor, site: int, first_position: int = 0) -> list[Mask]:
    """The mask of each sample. keys: int64 [b, 3], see `mpu.dropout_keys`."""
    return [(seed, sample, layer << 8 | site, first_position) for seed, sample, layer in keys.tolist()]


@functools.lru_cache(maxsize=8)
def _generator(seed: int, thread: int) -> tuple[Any, Any]:
    """A generator and its state. To make one takes 16 µs, so each thread has its own."""
    import numpy as np  # torch has no such generator for a CPU

    generator = np.random.Philox(key=np.array([seed % WORD, 0], dtype=np.uint64))
    return generator, generator.state


def draws(mask: Mask, first_block: int, blocks: int) -> Tensor:
    """The numbers that decide about the elements, int16 [16 · blocks], from block `first_block` on."""
    seed, *words = mask
    generator, state = _generator(seed, threading.get_ident())
    state["state"]["counter"][:] = (first_block, *words)
    generator.state = state
    return torch.from_numpy(generator.random_raw(4 * blocks)).view(torch.int16)


def zero_dropped(x: Tensor, drawn: Tensor, p: float, out: Tensor) -> None:
    """out = x, and 0 where the draw drops it. drawn: int16, of x's shape. out may be x.

    ReLU's backward does this in one pass, with the bits of x as its gradient. A comparison and a product of the bits
    are two passes: 4 % more time of the whole dropout in bf16."""
    bits = _INTEGERS[x.element_size()]
    if highest := dropped_draws(p):  # else nothing is dropped
        torch.ops.aten.threshold_backward.grad_input(
            x.view(bits), drawn.to(bits), highest - 32769, grad_input=out.view(bits)
        )
    else:
        out.copy_(x)


def keyed_dropout(x: Tensor, p: float, keys: Tensor, site: int, first_position: int = 0) -> Tensor:
    """x [s, b, h] with each element zeroed with probability p and the others raised by 1 / (1 - p).

    keys: int64 [b, 3], the seed, the sample's number and the layer's, on the device of x. site: which dropout of the
    layer. first_position: of x in its samples.

    One thread with AMX, bf16, 1.6 M elements, ns of CPU time an element: forward 1.8 to 2.1, with backward 4.8 to 5.1.
    16 bits of torch's generator, with a mask that is kept, take 3.6 and 4.7.
    """
    out: Tensor = _KeyedDropout.apply(x, p, keys, site, first_position)  # type: ignore[no-untyped-call]
    return out


class _KeyedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, keys: Tensor, site: int, first_position: int) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.mask = p, site, first_position
        return _dropped(x, keys, *ctx.mask)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _dropped(dy, *ctx.saved_tensors, *ctx.mask), None, None, None, None


def _dropped(x: Tensor, keys: Tensor, p: float, site: int, first_position: int) -> Tensor:
    # To call the operator loads torch's compiler: 1 s and 70 MB.
    function = _operator if torch.compiler.is_compiling() or x.device.type == "cuda" else _by_device
    out: Tensor = function(x, p, keys, site, first_position)
    return out


def _by_device(x: Tensor, p: float, keys: Tensor, site: int, first_position: int) -> Tensor:
    x = x.contiguous()
    if x.device.type == "cuda":
        from mpu.kernels.dropout_triton import dropped_on_gpu

        return dropped_on_gpu(x, keys, site, first_position, dropped_draws(p), factor(p))
    s, _, h = x.shape
    blocks, rows = -(-h // ELEMENTS), max(_AT_ONCE // h, 1)  # blocks: of a position
    out = x * factor(p)
    for number, mask in enumerate(masks_of_samples(keys, site)):
        for first in range(0, s, rows):
            part = out[first : first + rows, number]  # [rows, h]
            drawn = draws(mask, (first_position + first) * blocks, len(part) * blocks).view(len(part), -1)
            zero_dropped(part, drawn[:, :h], p, out=part)
    return out


# An operator, so that torch.compile need not see inside.
_operator = torch.library.custom_op("mpu::keyed_dropout", _by_device, mutates_args=())


@_operator.register_fake
def _(x: Tensor, p: float, keys: Tensor, site: int, first_position: int) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def dropout_16_bits(x: Tensor, p: float) -> Tensor:
    """x with each element zeroed with probability p and the others raised by 1 / (1 - p), decided by 16 random bits for
    each element, of the default generator. Any shape, any float dtype. p is rounded as in `dropped_draws`.

    torch draws a number of 64 bits for each element on a CPU, in one thread. Here one number serves four elements:
    0.5 M elements in bf16, forward and backward, take 1.3 ms instead of 3.4, with AVX2 as with AVX-512. It is used on
    every CPU, since what a run draws must not depend on its processor.
    """
    if torch.compiler.is_compiling():  # it has a generator of its own
        return F.dropout(x, p)
    drawn = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None)
    kept = drawn.view(torch.int16)[: x.numel()].view(x.shape) >= dropped_draws(p) - 32768  # [elements] -> x's shape
    return x * kept.to(x.dtype).mul_(factor(p))
