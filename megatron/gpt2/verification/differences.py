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

import torch
from torch import Tensor

# Of the histogram: two bins for each factor of two, the first below 2^LOWEST units.
LOWEST, PER_OCTAVE, BINS = -8, 2, 96


def roundoff(dtype: torch.dtype) -> float:
    """u of a floating-point dtype."""
    return torch.finfo(dtype).eps / 2


@dataclass
class Difference:
    """What was found of a tensor, or of a part of it.

    count, equal: elements, and those that are equal to the bit. histogram: of the differences of the others, in units.
    greatest: the largest difference in units. excess: the largest, less what is allowed for this element alone;
    infinite where one of both is no number. at, reference, own: where that is, and both values. squares: of the
    reference a and of the own b, aa, ab and bb, summed where they differ.
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
                return min(2.0 ** (LOWEST + number / PER_OCTAVE), self.greatest)
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


def difference(reference: Tensor, own: Tensor, offset: tuple[int, ...], *, roundoff: float, rms: float,
               allowed: Tensor | float = 0.0) -> Difference:
    """Compare `own` with `reference`, of the same shape, which begins at `offset` of the whole tensor.

    rms: of the whole reference. allowed: a difference in the tensor's own size that needs no explanation, for all
    elements or each. Whole numbers differ infinitely or not at all.
    """
    count = own.numel()
    if reference.dtype == own.dtype and torch.equal(reference, own):
        return Difference(count, count, at=offset, reference=_first(reference), own=_first(own))
    if not own.is_floating_point():
        units = excess = torch.where(reference == own, 0.0, math.inf)
        a, b = reference.double(), own.double()
    else:
        a, b = reference.float(), own.float()
        apart = (a - b).abs_().masked_fill_(a == b, 0.0)  # infinities of one sign are equal
        apart.masked_fill_(a.isnan() & b.isnan(), 0.0)
        scale = a.abs().clamp_min_(rms).mul_(roundoff)
        excess = ((apart - allowed).clamp_min_(0.0) / scale).masked_fill_(apart == 0, 0.0)
        excess = excess.nan_to_num_(math.inf, posinf=math.inf)
        units = (apart / scale).masked_fill_(apart == 0, 0.0).nan_to_num_(math.inf, posinf=math.inf)
    differing = units[units > 0]
    bins = differing.log2().sub_(LOWEST).mul_(PER_OCTAVE).ceil_().clamp_(0, BINS - 1).long()
    place = int(excess.argmax()) if bool((excess > 0).any()) else int(units.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), own.shape))
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    return Difference(
        count, count - len(differing), torch.bincount(bins, minlength=BINS).tolist(), float(units.max()),
        float(excess.max()), tuple(i + j for i, j in zip(at, offset, strict=True)), float(flat_a[place]),
        float(flat_b[place]),
        (float(flat_a.dot(flat_a)), float(flat_a.dot(flat_b)), float(flat_b.dot(flat_b))))


def _first(tensor: Tensor) -> float:
    return float(tensor.reshape(-1)[0]) if tensor.numel() else 0.0
