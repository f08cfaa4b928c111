"""How far rounding alone takes two runs apart, in units of roundoff of their own scale.

    unit of an element   u · max(|a|, root mean square of the whole tensor a)

u is the unit roundoff of a precision, half the distance from 1 to the next number: 2^-24 in fp32, 2^-11 in fp16, 2^-8
in bf16. An element that is much smaller than the others of its tensor is a sum whose terms have nearly cancelled; the
terms, and so the rounding, are of the size of the others. So the scale has the root mean square as its least value.

    bound = PEAK · √d · (√n + a)        the greatest difference of an element that rounding explains

d   how many layers lie behind the tensor: 1 for the embeddings, 2 L + 1 for their gradient.
n   the length of the longest sum that another order of adding may change: max(f, s) in forward; in backward the
    vocabulary and the tokens of the step as well. In 16 bits products are summed in fp32, and only their results are
    rounded: SUMS_OF_16_BITS. The gradient of a bias or a layer norm is a sum over all tokens whose terms nearly cancel,
    and the terms have been rounded.
a   from the second step on, what AdamW has made of the first. It divides a gradient by its own size: where noise
    decides the sign of an element, rounding moves it by the whole learning rate. Of gradients with relative noise e
    that happens to the fraction e, so that the weights (root mean square σ) differ by Σ rate · √e / σ of their size.

The gradient norm is one sum over N parameters, so n = N for it, and clipping brings its error into the moments.

Of a parameter or master each element is judged by itself: Σ 2 · rate · min(1, bound of the gradient / √v) is allowed
beyond the bound, where v is the element's second moment of each step, corrected for its start at 0. To the bias of a
key, whose true gradient is 0, this allows all that the optimizer can do. Before the first step they are equal.

The gradients of a step that was skipped have overflowed, each run's where its sums did: any difference is explained.

A difference of many elements is judged more strictly: the 99 % quantile of a tensor of BULK elements or more, and of
parameters the median, must be below a quarter of the bound. PEAK covers the greatest of very many elements; in
benchmarks/verify.py the greatest difference of clean comparisons is below half of the bound.

Legend: L layers, f width inside the MLP, s sequence.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.gpt2.device import DTYPES
from megatron.gpt2.extensions.verify.trace import Row, Trace

PEAK = 8.0
SUMS_OF_16_BITS = 64
NOISE = 32.0  # relative noise of a gradient, in units
BULK = 1000  # elements
ONE_ROUNDING = 2.0  # of weights that are in two precisions
EXACT = 4.0  # units of fp32: a number that no sum over ranks makes
PARAMETERS = ("parameter", "master")
# Upper edges of the bins of a histogram, in units: nothing, then two for each factor of two.
EDGES = [0.0, *(2.0 ** (half / 2 - 8) for half in range(96)), math.inf]


def roundoff(dtype: torch.dtype) -> float:
    """u of a floating-point dtype: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


FP32 = roundoff(torch.float32)


@dataclass
class Difference:
    """What was found of a tensor, or of a part of it.

    histogram: how many elements differ by so many units, see EDGES. greatest: the largest difference in units. excess:
    the largest, less what is allowed for this element only; infinite where one of both is not a number. at, reference,
    own: where that is, and both values. squares: of the reference a and of the own b, aa, ab and bb, summed over the
    parts in which rounding does not explain the excess.
    """

    histogram: Sequence[int] = (0,) * len(EDGES)
    greatest: float = 0.0
    excess: float = 0.0
    at: Sequence[int] = ()
    reference: float = 0.0
    own: float = 0.0
    squares: Sequence[float] = (0.0, 0.0, 0.0)

    @staticmethod
    def of(
        reference: Tensor,
        own: Tensor,
        offset: Sequence[int],
        *,
        unit: float,
        rms: float,
        bound: float = math.inf,
        allowed: Tensor | float = 0.0,
    ) -> Difference:
        """How far `own` is from `reference`, of the same shape, which begins at `offset` of the whole tensor.

        unit: the unit roundoff. rms: of the whole reference. bound: the excess that rounding explains. allowed: a
        difference in the tensor's own size that needs no explanation, for all elements or each. Whole numbers differ
        infinitely or not at all.
        """
        a, b = reference.float().contiguous(), own.float().contiguous()
        apart = (a - b).abs_() if own.is_floating_point() else torch.where(reference == own, 0.0, math.inf)
        # Where nothing is: a subnormal scale in the place of 0, so that 0 / 0 is no case of its own.
        scale = a.abs().clamp_min_(max(rms, 1e-30)).mul_(unit).clamp_min_(1e-38)
        if not math.isfinite(float(apart.sum())):  # infinities of one sign are equal, and so are two that are no number
            apart = apart.masked_fill((reference == own) | (a.isnan() & b.isnan()), 0.0).nan_to_num(math.inf, math.inf)
            scale.nan_to_num_(1.0, posinf=1.0)
        units, excess = (apart / scale).view(-1), (apart - allowed).clamp_min_(0.0).div_(scale).view(-1)
        most = float(excess.max())
        place = int((excess if most > 0 else units).argmax())
        a, b = a.view(-1), b.view(-1)
        return Difference(
            torch.bincount(torch.bucketize(units, torch.tensor(EDGES)), minlength=len(EDGES)).tolist(),
            float(units.max()),
            most,
            [int(i) + first for i, first in zip(np.unravel_index(place, own.shape), offset, strict=True)],
            float(a[place]),
            float(b[place]),
            [float(x.dot(y)) for x, y in ((a, a), (a, b), (b, b))] if most > bound else (0.0, 0.0, 0.0),
        )

    def add(self, other: Difference) -> None:
        """Take in what was found of another part of the same tensor."""
        if not self.at or other.excess > self.excess:
            self.excess, self.at, self.reference, self.own = other.excess, other.at, other.reference, other.own
        self.greatest = max(self.greatest, other.greatest)
        self.histogram = [a + b for a, b in zip(self.histogram, other.histogram, strict=True)]
        self.squares = [a + b for a, b in zip(self.squares, other.squares, strict=True)]

    @property
    def count(self) -> int:
        """Elements that were compared."""
        return sum(self.histogram)

    @property
    def equal(self) -> int:
        """Elements that are equal to the bit."""
        return self.histogram[0]

    def quantile(self, fraction: float) -> float:
        """The difference, in units, that this fraction of all elements does not exceed: the upper edge of its bin."""
        wanted = fraction * self.count
        edges = zip(itertools.accumulate(self.histogram), EDGES, strict=True)
        return min(next(edge for below, edge in edges if below >= wanted), self.greatest)

    @property
    def factor(self) -> float | None:
        """c where the own tensor is c times the reference, but for a thousandth; None where it is not."""
        aa, ab, bb = self.squares
        if not (math.isfinite(aa + ab + bb) and aa > 0 and bb > 0):
            return None
        return ab / aa if bb - ab * ab / aa < 1e-6 * bb else None


class Rounding:
    """What is expected of the comparison of a run with `trace`. facts: of that run, as a trace has them.

    Of both precisions the coarser one counts, and bf16 for gradients where one of both runs sends them so.
    """

    def __init__(self, trace: Trace, facts: Mapping[str, Any]) -> None:
        self._trace, both = trace, (trace.facts, facts)
        self._u = max(roundoff(DTYPES[of["precision"]]) for of in both)
        in_bf16 = any(of["config"]["parallel"]["grad_reduce_in_bf16"] for of in both)
        self._of_gradients = roundoff(torch.bfloat16) if in_bf16 else self._u
        config, model = trace.facts["config"], trace.facts["config"]["model"]
        self._layers, h, v, s = (
            model["num_layers"],
            model["hidden_size"],
            model["vocab_size"],
            config["data"]["seq_length"],
        )
        self._forward = max(model["ffn_hidden_size"] or 4 * h, s)
        self._backward = max(self._forward, s * trace.facts["global_batch_size"], v)
        self._of_norm = PEAK * math.sqrt(12 * self._layers * h**2 + v * h) * FP32 / self._of_gradients
        self._beta2 = config["optimizer"]["adam_beta2"]

    def unit(self, row: Row) -> float:
        """The unit roundoff by which a tensor is measured."""
        kind = row.key.kind
        if kind == "master" or self._is_exact(row):
            return FP32
        if kind == "parameter":
            return max(roundoff(row.dtype), self._u)
        return self._of_gradients if kind in ("gradient", "scalar", "moment") else self._u

    def bound(self, row: Row) -> float:
        """The greatest difference of an element, in units, that rounding explains; beyond `allowed`."""
        step, kind, _, name = row.key
        if kind == "input":
            return 0.0
        if kind in PARAMETERS:
            return PEAK * math.sqrt(step) if step else ONE_ROUNDING
        if self._is_exact(row):
            return EXACT
        forward, of_norm = kind in ("activation", "loss"), name == "gradient norm"
        if (kind in ("activation gradient", "gradient") or of_norm) and self._trace.number(step, "skipped", 0.0):
            return math.inf
        layer = re.search(r"layers\.(\d+)", name)
        before = int(layer[1]) + 1 if layer else 0 if "embeddings" in name else self._layers
        depth = before + 1 if forward else 2 * self._layers + 1 - before
        longest = self._forward if forward else self._backward
        if self._u > FP32 and (forward or len(row.shape) > 1):
            longest = SUMS_OF_16_BITS
        bound = PEAK * math.sqrt(depth) * (math.sqrt(longest) + self._by_adam(step))
        return bound + self._of_norm if kind == "moment" or of_norm else bound

    def explains(self, row: Row, found: Difference) -> bool:
        """Whether rounding alone can have made these differences."""
        bound, quantile, moved = self.bound(row), 0.99, 0.0
        if row.key.kind in PARAMETERS:
            quantile, moved = 0.5, self._rates(row.key.step) / (self.unit(row) * row.rms) if row.rms else math.inf
        return found.excess <= bound and (found.count < BULK or found.quantile(quantile) <= (bound + moved) / 4)

    def allowed(self, row: Row, variances: Iterable[tuple[int, Tensor]]) -> Tensor | float:
        """What AdamW can have made of noise, for each element of a parameter.

        variances: the second moment of the same elements after each step up to that of `row`, with its step.
        """
        allowed: Tensor | float = 0.0
        for step, variance in variances:
            gradient = self._trace.find(step, f"gradient of {row.key.name.removeprefix('master of ')}")
            noise = self.bound(gradient) * self.unit(gradient) * gradient.rms if gradient else math.inf
            updates = max(self._trace.number(step, "steps of the optimizer", 1.0), 1.0)
            size = (variance / (1 - self._beta2**updates)).sqrt_()
            rate = self._trace.number(step, "learning rate", 0.0)
            allowed = allowed + (noise / size).clamp_(max=1.0).nan_to_num_(1.0).mul_(2 * rate)
        return allowed

    def _rates(self, step: int) -> float:
        """The sum of the learning rates of the steps up to this one."""
        return sum(self._trace.number(done, "learning rate", 0.0) for done in range(1, step + 1))

    @functools.cache  # noqa: B019  # an instance serves one comparison
    def _by_adam(self, step: int) -> float:
        """a of the formula above."""
        if step == 1:
            return 0.0
        weights = [
            row.rms
            for row in self._trace.rows.values()
            if row.key.kind == "parameter" and row.key.step == 0 and len(row.shape) == 2 and row.rms
        ]
        noise = min(NOISE * self._of_gradients, 1.0)
        return self._rates(step - 1) / min(weights, default=math.inf) * math.sqrt(noise) / self._u

    @staticmethod
    def _is_exact(row: Row) -> bool:
        return row.key.kind == "scalar" and row.key.name != "gradient norm"
