"""Random bits as a function of a key and a counter: Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011).

Nothing is drawn one after the other, so any rank can make any part of a mask, as often as it is needed. On a CPU this
is numpy's generator of that name, whose numbers numpy promises never to change. `dropout_triton.py` is the same for a
GPU; a test compares the two.

    key        the seed, 0
    counter    the number of a block, from 1 on, then three words that name a stream

Each block decides about 16 elements, with 16 bits for each.
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

ELEMENTS = 16  # of a block
_of_thread = threading.local()
WORD = 1 << 64
_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def dropped_draws(p: float) -> int:
    """How many of the 65,536 draws drop an element: p to the nearest 1/65536 below 1."""
    return min(round(p * 65536), 65535)


def factor(p: float) -> float:
    """What the other elements are multiplied by: 1 / (1 - p), of the p that `dropped_draws` takes."""
    return 65536 / (65536 - dropped_draws(p))


class Philox:
    """The streams of a seed, on the host."""

    @classmethod
    def of(cls, seed: int) -> "Philox":
        """This thread's, made once: 16 µs."""
        if getattr(_of_thread, "seed", None) != seed:
            _of_thread.seed, _of_thread.philox = seed, cls(seed)
        philox: Philox = _of_thread.philox
        return philox

    def __init__(self, seed: int) -> None:
        import numpy as np  # torch has no such generator for a CPU

        self._generator = np.random.Philox(key=np.array([seed % WORD, 0], dtype=np.uint64))
        self._state = self._generator.state

    def draws(self, stream: Sequence[int], first_block: int, blocks: int) -> Tensor:
        """int16 [16 · blocks]: the numbers that decide about the elements. stream: three words. first_block: from 0."""
        self._state["state"]["counter"][:] = (first_block, *stream)
        self._generator.state = self._state
        return torch.from_numpy(self._generator.random_raw(4 * blocks)).view(torch.int16)


def mask_streams(keys: Tensor, site: int, first_position: int = 0) -> list[tuple[Philox, tuple[int, int, int]]]:
    """Of each sample the streams of its seed, and the three words of the counter that name its mask. keys: int64
    [b, 3], see `mpu.dropout_keys`."""
    return [(Philox.of(seed), (sample, layer << 8 | site, first_position)) for seed, sample, layer in keys.tolist()]


def zero_dropped(x: Tensor, draws: Tensor, p: float, out: Tensor) -> None:
    """out = x, and 0 where the draw drops it. draws: int16, of x's shape. out may be x.

    ReLU's backward does this in one pass, with the bits of x as its gradient. A comparison and a product of the bits
    are two passes: 4 % more time of the whole dropout in bf16."""
    bits = _OF_SIZE[x.element_size()]
    if highest := dropped_draws(p):  # else nothing is dropped
        torch.ops.aten.threshold_backward.grad_input(
            x.view(bits), draws.to(bits), highest - 32769, grad_input=out.view(bits)
        )
    else:
        out.copy_(x)
