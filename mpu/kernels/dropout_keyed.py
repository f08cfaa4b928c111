"""Dropout of hidden states whose mask follows from keys alone, by `philox`. Nothing of it is kept for backward.

One thread with AMX, bf16, 1.6 M elements, ns of CPU time an element: forward 1.8 to 2.1, with backward 4.8 to 5.1,
where 16 bits of torch's generator take 3.6 and 4.7, with a mask that is kept.

Legend: b batch, s positions, h hidden.
"""

from typing import Any

import torch
from torch import Tensor

from mpu.kernels.philox import ELEMENTS, factor, mask_streams, zero_dropped

_AT_ONCE = 1 << 18  # elements whose draws stay in a core's cache


def keyed_dropout(x: Tensor, p: float, keys: Tensor, site: int, first_position: int = 0) -> Tensor:
    """x [s, b, h] with each element zeroed with probability p and the others raised by 1 / (1 - p).

    keys: int64 [b, 3], the seed, the sample's number and the layer's, on the device of x. site: which dropout of the
    layer. first_position: of x in its samples.
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
        from mpu.kernels.philox_triton import dropped_on_gpu

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
