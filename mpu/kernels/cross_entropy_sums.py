"""Σ aᵀb over the chunks of a loss, in few passes over a matrix of the vocabulary's size.

float32 adds in the product itself. So do 16 bits on a CPU, up to 4 products at a time: their sum is rounded with each,
by which its relative error rises from 2.4e-3 to 2.7e-3 in bf16, and as many passes over the matrix are saved. Anything
more is added in float32.

Legend: t tokens of a chunk, m rows and n columns of the sum.
"""

import torch
from torch import Tensor


def products_at_once(dtype: torch.dtype, device: str) -> int | None:
    """How many products are added before their sum goes into float32; None: all of them. device: "cpu" or "cuda"."""
    if dtype == torch.float32:
        return None
    return 4 if device == "cpu" else 1


class SumOfProducts:
    """Σ aᵀb of [t, m] and [t, n]: [m, n]."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._part: Tensor | None = None
        self._products = 0

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add aᵀb. a: [t, m], b: [t, n], of one dtype."""
        if self._part is not None and self._products == products_at_once(a.dtype, a.device.type):
            self._sum = self.total().float()
            self._part, self._products = None, 0
        self._part = a.t() @ b if self._part is None else self._part.addmm_(a.t(), b)
        self._products += 1

    def total(self) -> Tensor:
        """The sum [m, n], in float32 or in the products' own dtype."""
        assert self._part is not None
        return self._part if self._sum is None else self._sum.add_(self._part)
