"""The norm of gradients to the bit, whatever part of them each rank holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from mpu.initialize import get_parallel_state

_DIGITS = 27  # binary digits of a square that each of two sums of integers holds; 2^35 of them do not overflow
_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 24}  # elements, which stay in a CPU's cache


def exact_squared_norm(split: Iterable[Tensor], replicated: Iterable[Tensor], device: torch.device, *,
                       sharded: bool = False) -> Tensor:
    """`mpu.squared_norm` as a float64 scalar, with sums of integers, whose order decides nothing.

    Each gradient is divided by a power of two above the greatest of all. Its square in float32 is rounded as any other
    product, whichever rank has it; its first 54 binary digits after the point are added up. Infinite where a gradient
    is not finite.
    """
    state = get_parallel_state()
    counted = [*split, *(replicated if state.tensor_model_parallel_rank == 0 else [])]
    ends = [end for grad in counted if grad.numel() for end in grad.aminmax()]
    greatest = torch.stack([torch.zeros((), device=device), *ends]).abs().max()
    greatest = greatest.nan_to_num(torch.inf).clamp_min(torch.finfo(torch.float32).tiny)
    if sharded and state.world_size > 1:
        group, alone = None, False
    else:
        group, alone = state.model_parallel_group, state.model_parallel_size == 1
    if not alone:
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=group)
    shift = torch.frexp(greatest).mantissa / greatest  # a power of two, which divides without rounding
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    at_once = _AT_ONCE[device.type]
    for part in itertools.chain.from_iterable(grad.reshape(-1).split(at_once) for grad in counted):
        square = (part * shift).square_().mul_(1 << _DIGITS)
        whole = square.trunc()
        sums[0] += whole.sum(dtype=torch.int64)
        sums[1] += square.sub_(whole).mul_(1 << _DIGITS).sum(dtype=torch.int64)
    if not alone:
        dist.all_reduce(sums, group=group)
    fraction = (sums[0].double() + sums[1].double() * 2.0 ** -_DIGITS) * 2.0 ** -_DIGITS
    return torch.where(greatest.isfinite(), fraction / shift.double() ** 2, torch.inf)
