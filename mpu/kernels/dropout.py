"""Dropout by `philox`, whose masks follow from keys and of which nothing is kept for backward; and dropout on a CPU that
draws from torch's generator.

Legend: b batch, s positions, h hidden.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.kernels.philox import ELEMENTS, factor, mask_streams, zero_dropped

_AT_ONCE = 1 << 18  # elements whose draws stay in a core's cache


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
        ctx.rest = p, site, first_position
        return _dropped(x, p, keys, site, first_position)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (keys,), (p, site, first_position) = ctx.saved_tensors, ctx.rest
        return _dropped(dy, p, keys, site, first_position), None, None, None, None


def _dropped(x: Tensor, p: float, keys: Tensor, site: int, first_position: int) -> Tensor:
    # To call the operator loads torch's compiler: 1 s and 70 MB.
    function = _operator if torch.compiler.is_compiling() or x.device.type == "cuda" else _by_device
    out: Tensor = function(x, p, keys, site, first_position)
    return out


def _by_device(x: Tensor, p: float, keys: Tensor, site: int, first_position: int) -> Tensor:
    x = x.contiguous()
    if x.device.type == "cuda":
        from mpu.kernels.dropout_triton import dropped_on_gpu

        return dropped_on_gpu(x, p, keys, site, first_position)
    s, _, h = x.shape
    blocks, rows = -(-h // ELEMENTS), max(_AT_ONCE // h, 1)  # blocks: of a position
    out = x * factor(p)
    for number, (philox, stream) in enumerate(mask_streams(keys, site)):
        for first in range(0, s, rows):
            part = out[first : first + rows, number]  # [rows, h]
            draws = philox.draws(stream, (first_position + first) * blocks, len(part) * blocks).view(len(part), -1)
            zero_dropped(part, draws[:, :h], p, out=part)
    return out


# An operator, so that torch.compile need not see inside.
_operator = torch.library.custom_op("mpu::keyed_dropout", _by_device, mutates_args=())


@_operator.register_fake
def _(x: Tensor, p: float, keys: Tensor, site: int, first_position: int) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def dropout_16_bits(x: Tensor, p: float) -> Tensor:
    """x with each element zeroed with probability p and the others raised by 1 / (1 - p), decided by 16 random bits for
    each element. Any shape, any float dtype.

    p is taken to the nearest 1/65536 below 1, and the factor belongs to that number. It draws from the default
    generator.

    torch draws a number of 64 bits for each element on a CPU, in one thread. Here one number serves four elements:
    0.5 M elements in bf16, forward and backward, take 1.3 ms instead of 3.4, with AVX2 as with AVX-512. It is used on
    every CPU, since what a run draws must not depend on its processor.
    """
    if torch.compiler.is_compiling():  # it has a generator of its own
        return F.dropout(x, p)
    dropped = min(round(p * 65536), 65535)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None)
    kept = draws.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - 32768  # [elements] -> the shape of x
    return x * kept.to(x.dtype).mul_(65536 / (65536 - dropped))
