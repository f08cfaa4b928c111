"""Dropout that decides with 16 random bits for each element. For a CPU.

torch draws a number of 64 bits for each element there, in one thread. Here one number serves four elements: 0.5 M
elements in bf16, forward and backward, take 1.3 ms instead of 3.4, with AVX2 as with AVX-512. It is used on every CPU,
since what a run draws must not depend on its processor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dropout_16_bits(x: Tensor, p: float) -> Tensor:
    """x with each element zeroed with probability p and the others raised by 1 / (1 - p). Any shape, any float dtype.

    p is taken to the nearest 1/65536 below 1, and the factor belongs to that number. It draws from the default
    generator.
    """
    if torch.compiler.is_compiling():  # it has a generator of its own
        return F.dropout(x, p)
    dropped = min(round(p * 65536), 65535)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None)
    kept = draws.view(torch.int16)[:x.numel()].view(x.shape) >= dropped - 32768  # [elements] -> the shape of x
    return x * kept.to(x.dtype).mul_(65536 / (65536 - dropped))
