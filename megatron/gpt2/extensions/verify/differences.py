"""How far two tensors are from each other, in units of roundoff of their own scale.

    unit of an element   u · max(|a|, root mean square of the whole tensor a)

u is the unit roundoff of a precision, half the distance from 1 to the next number: 2^-24 in fp32, 2^-11 in fp16, 2^-8
in bf16. An element that is much smaller than the others of its tensor is a sum whose terms have nearly cancelled; the
terms, and so the rounding, are of the size of the others. So the scale has the root mean square as its least value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Of the histogram: two bins for each factor of two, [1, 1.5) and [1.5, 2) times a power of it, from 2^LOWEST on. A bin
# is the exponent of a float32 and the first bit of its fraction, which cost no logarithm.
LOWEST, BINS = -8, 96
_SHIFT, _ZERO = 22, (127 + LOWEST) << 1


def roundoff(dtype: torch.dtype) -> float:
    """u of a floating-point dtype."""
    return torch.finfo(dtype).eps / 2


@dataclass
class Difference:
    """What was found of a tensor, or of a part of it.

    count, equal: elements, and those that are equal to the bit. histogram: of the differences of the others, in units.
    greatest: the largest difference in units. excess: the largest, less what is allowed for this element alone;
    infinite where one of both is no number. at, reference, own: where that is, and both values. squares: of the
    reference a and of the own b, aa, ab and bb, summed over the parts in which rounding does not explain the excess.
    """

    count: int = 0
    equal: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * BINS)
    greatest: float = 0.0
    excess: float = 0.0
    at: tuple[int, ...] = ()
    reference: float = 0.0
    own: float = 0.0
    squares: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def add(self, other: Difference) -> None:
        """Take in what was found of another part of the same tensor."""
        if not self.at or other.excess > self.excess:
            self.excess, self.at, self.reference, self.own = other.excess, other.at, other.reference, other.own
        self.count += other.count
        self.equal += other.equal
        self.greatest = max(self.greatest, other.greatest)
        self.histogram = [a + b for a, b in zip(self.histogram, other.histogram, strict=True)]
        a, b, c = (x + y for x, y in zip(self.squares, other.squares, strict=True))
        self.squares = a, b, c

    def quantile(self, fraction: float) -> float:
        """The difference, in units, that this fraction of all elements does not exceed: the upper edge of its bin."""
        below = self.equal
        if below >= fraction * self.count:
            return 0.0
        for number, found in enumerate(self.histogram):
            below += found
            if below >= fraction * self.count:
                edge = math.ldexp(2.0 if number % 2 else 1.5, LOWEST + number // 2)
                return min(edge, self.greatest)
        return self.greatest

    @property
    def factor(self) -> float | None:
        """c where the own tensor is c times the reference, but for a thousandth; None where it is not."""
        aa, ab, bb = self.squares
        if not (math.isfinite(aa + ab + bb) and aa > 0 and bb > 0):
            return None
        return ab / aa if bb - ab * ab / aa < 1e-6 * bb else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `Difference(**values)` is the inverse."""
        return dict(vars(self))


def difference(
    reference: Tensor,
    own: Tensor,
    offset: tuple[int, ...],
    *,
    roundoff: float,
    rms: float,
    bound: float,
    allowed: Tensor | float = 0.0,
) -> Difference:
    """Compare `own` with `reference`, of the same shape, which begins at `offset` of the whole tensor.

    rms: of the whole reference. bound: the excess that rounding explains. allowed: a difference in the tensor's own
    size that needs no explanation, for all elements or each. Whole numbers differ infinitely or not at all.
    """
    count = own.numel()
    if reference.dtype == own.dtype and torch.equal(reference, own):
        first = float(own.reshape(-1)[0])
        return Difference(count, count, at=offset, reference=first, own=first)
    if own.is_floating_point():
        a, b = reference.float().contiguous(), own.float().contiguous()
        apart = (a - b).abs_()
        # Where nothing is: a subnormal scale in the place of 0, so that 0 / 0 is no case of its own.
        scale = a.abs().clamp_min_(max(rms, 1e-30)).mul_(roundoff).clamp_min_(1e-38)
        if not math.isfinite(float(apart.sum())):  # infinities of one sign are equal, and so are two that are no number
            apart.masked_fill_((a == b) | (a.isnan() & b.isnan()), 0.0).nan_to_num_(math.inf, posinf=math.inf)
            scale.nan_to_num_(1.0, posinf=1.0)
        units = apart / scale
        excess = units if isinstance(allowed, float) and allowed == 0 else (apart - allowed).clamp_min_(0.0).div_(scale)
    else:
        a, b = reference.double(), own.double()
        units = excess = torch.where(reference == own, 0.0, math.inf)
    found = torch.bincount(units.reshape(-1).view(torch.int32).bitwise_right_shift(_SHIFT), minlength=512).tolist()
    histogram = [sum(found[1 : _ZERO + 1]), *found[_ZERO + 1 : _ZERO + BINS - 1], sum(found[_ZERO + BINS - 1 :])]
    greatest, most = float(units.max()), float(excess.max())
    place = int((excess if most > 0 else units).argmax())
    at = tuple(int(i) for i in np.unravel_index(place, own.shape))
    a, b = a.view(-1), b.view(-1)
    squares = (float(a.dot(a)), float(a.dot(b)), float(b.dot(b))) if most > bound else (0.0, 0.0, 0.0)
    return Difference(
        count,
        found[0],
        histogram,
        greatest,
        most,
        tuple(i + j for i, j in zip(at, offset, strict=True)),
        float(a[place]),
        float(b[place]),
        squares,
    )
