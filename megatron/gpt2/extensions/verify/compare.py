"""A run is compared with a trace while it runs: each rank compares what it has, and keeps numbers only. Then `judge`
puts together what the ranks found: is it the same training? It is if rounding explains every difference.

Differences are in units of roundoff of the tensor's own scale:

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
parameters the median, must be below a quarter of the bound. PEAK covers the greatest of very many elements: the
greatest difference of clean comparisons is below half of the bound (docs/reference/measured.md).

Legend: L layers, f width inside the MLP, s sequence.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.gpt2.config import require
from megatron.gpt2.device import DTYPES
from megatron.gpt2.extensions.verify.trace import SQUARED, Key, Part, Row, Trace, measured

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

    histogram: np.ndarray = field(default_factory=lambda: np.zeros(len(EDGES), dtype=np.int64))
    greatest: float = 0.0
    excess: float = 0.0
    at: Sequence[int] = ()
    reference: float = 0.0
    own: float = 0.0
    squares: np.ndarray = field(default_factory=lambda: np.zeros(3))

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
        apart = (a - b).abs() if own.is_floating_point() else math.inf
        is_equal = (reference == own) | (a.isnan() & b.isnan())  # also infinities of one sign
        apart = torch.where(is_equal, 0.0, apart).nan_to_num_(math.inf, math.inf)
        # The least scale is subnormal, so that 0 / 0 is no case of its own.
        scale = a.abs().clamp_min_(max(rms, 1e-30)).mul_(unit).clamp_min_(1e-38).nan_to_num_(1.0, posinf=1.0)
        units, excess = (apart / scale).view(-1), (apart - allowed).clamp_min_(0.0).div_(scale).view(-1)
        most = float(excess.max())
        place = int((excess if most > 0 else units).argmax())
        a, b = a.view(-1), b.view(-1)
        return Difference(
            torch.bincount(torch.bucketize(units, torch.tensor(EDGES)), minlength=len(EDGES)).numpy(),
            float(units.max()),
            most,
            [int(i) + first for i, first in zip(np.unravel_index(place, own.shape), offset, strict=True)],
            float(a[place]),
            float(b[place]),
            np.array([float(x.dot(y)) for x, y in ((a, a), (a, b), (b, b))]) if most > bound else np.zeros(3),
        )

    def add(self, other: Difference) -> None:
        """Take in what was found of another part of the same tensor."""
        if not self.at or other.excess > self.excess:
            self.excess, self.at, self.reference, self.own = other.excess, other.at, other.reference, other.own
        self.greatest = max(self.greatest, other.greatest)
        self.histogram = np.add(self.histogram, other.histogram)
        self.squares = np.add(self.squares, other.squares)

    @property
    def count(self) -> int:
        """Elements that were compared."""
        return int(self.histogram.sum())

    @property
    def equal(self) -> int:
        """Elements that are equal to the bit."""
        return int(self.histogram[0])

    def quantile(self, fraction: float) -> float:
        """The difference, in units, that this fraction of all elements does not exceed: the upper edge of its bin."""
        return min(EDGES[np.searchsorted(self.histogram.cumsum(), fraction * self.count)], self.greatest)

    @property
    def factor(self) -> float | None:
        """c where the own tensor is c times the reference, but for a thousandth; None where it is not."""
        aa, ab, bb = self.squares
        if not (math.isfinite(aa + ab + bb) and aa > 0 and bb > 0):
            return None
        return ab / aa if bb - ab * ab / aa < 1e-6 * bb else None


@dataclass
class Judged:
    """A tensor of the trace compared with what the ranks of a run have of it. bound: what rounding explains, in units.
    ranks: those on which rounding does not explain the difference. made: its numbers, as often as they were computed.
    """

    row: Row
    bound: float
    difference: Difference = field(default_factory=Difference)
    ranks: list[int] = field(default_factory=list)
    made: int = 0

    @property
    def is_explained(self) -> bool:
        """Whether each number was computed once, and rounding explains every difference."""
        return not self.ranks and self.made == math.prod(self.row.shape)

    @property
    def share(self) -> float:
        """The difference as a share of what rounding explains: 1 is at the bound."""
        return self.difference.excess / self.bound if 0 < self.bound < math.inf else 0.0


class Comparer:
    """Compares the parts of rank `rank` with `trace` while they are computed. facts: of its run, as a trace has them.

    The coarser one of both precisions counts, and bf16 for gradients if one of both runs sends them so.
    """

    def __init__(self, trace: Trace, facts: Mapping[str, Any], rank: int) -> None:
        self._trace, self._rank, both, config = trace, rank, (trace.facts, facts), trace.facts["config"]
        self._found: dict[Key, Judged] = {}
        model, s = config["model"], config["data"]["seq_length"]
        h, v = model["hidden_size"], model["vocab_size"]
        self._u = max(roundoff(DTYPES[of["precision"]]) for of in both)
        in_bf16 = any(of["config"]["parallel"]["grad_reduce_in_bf16"] for of in both)
        self._of_gradients = roundoff(torch.bfloat16) if in_bf16 else self._u
        self._layers, self._beta2 = model["num_layers"], config["optimizer"]["adam_beta2"]
        self._forward = max(model["ffn_hidden_size"] or 4 * h, s)
        self._backward = max(self._forward, s * trace.facts["global_batch_size"], v)
        self._of_norm = PEAK * math.sqrt(12 * self._layers * h**2 + v * h) * FP32 / self._of_gradients
        rates = (trace.number(step, "learning rate", 0.0) for step in range(1, trace.facts["steps"] + 1))
        self._moved = [0.0, *itertools.accumulate(rates)]  # after each step: the sum of the learning rates
        # `a` of the formula above, in units of that sum.
        weights = [row.rms for row in trace.rows.values() if row.key[:2] == (0, "parameter") and len(row.shape) == 2]
        noise = math.sqrt(min(NOISE * self._of_gradients, 1.0))
        self._by_adam = noise / self._u / min(filter(None, weights), default=math.inf)

    def __call__(self, part: Part) -> None:
        """Compare the part. One that the trace does not have is left out."""
        key = part.key
        row = self._trace.rows.get((key.step, key.name))
        if row is None:
            return
        shapes = f"has shape {row.shape} there and {part.shape} here"
        require(row.shape == part.shape, f"the trace is of another run: {key.name} {shapes}")
        unit, bound = self.unit_and_bound(row)
        judged = self._found.setdefault(row.key, Judged(row, bound))
        judged.made += part.writes * part.values.numel()
        for chunk in part.chunks():
            judged.difference.add(
                Difference.of(
                    measured(key, self._trace.read(row, chunk.slices)),
                    measured(key, chunk.values.detach().cpu()),
                    chunk.offset,
                    unit=unit,
                    rms=row.rms,
                    bound=bound,
                    allowed=self.allowed(row, chunk.slices),
                )
            )

    @property
    def found(self) -> list[Any]:
        """What this rank has of each tensor, for `judge`: the fields of `Judged`, with the tensor's key."""
        return [
            (key, judged.bound, vars(judged.difference), [] if self.explains(judged) else [self._rank], judged.made)
            for key, judged in self._found.items()
        ]

    def unit_and_bound(self, row: Row) -> tuple[float, float]:
        """The unit roundoff by which a tensor is measured, and the greatest difference of an element, in units, that
        rounding explains beyond `allowed`."""
        step, kind, _, name = row.key
        if kind == "input":
            return self._u, 0.0
        if kind in PARAMETERS:
            unit = FP32 if kind == "master" else max(roundoff(row.dtype), self._u)
            return unit, PEAK * math.sqrt(step) if step else ONE_ROUNDING
        if kind == "scalar" and name != "gradient norm":
            return FP32, EXACT
        is_forward = kind in ("activation", "loss")
        unit = self._u if is_forward or kind == "activation gradient" else self._of_gradients
        if not is_forward and kind != "moment" and self._trace.number(step, "skipped", 0.0):
            return unit, math.inf
        layer = re.search(r"layers\.(\d+)", name)
        before = int(layer[1]) + 1 if layer else 0 if "embeddings" in name else self._layers
        depth = before + 1 if is_forward else 2 * self._layers + 1 - before
        longest = self._forward if is_forward else self._backward
        if self._u > FP32 and (is_forward or len(row.shape) > 1):
            longest = SUMS_OF_16_BITS
        bound = PEAK * math.sqrt(depth) * (math.sqrt(longest) + self._moved[step - 1] * self._by_adam)
        return unit, bound + self._of_norm if kind in ("moment", "scalar") else bound

    def explains(self, judged: Judged) -> bool:
        """Whether rounding alone can have made these differences."""
        row, found, bound, quantile, moved = judged.row, judged.difference, judged.bound, 0.99, 0.0
        unit = self.unit_and_bound(row)[0]
        if row.key.kind in PARAMETERS:
            quantile, moved = 0.5, self._moved[row.key.step] / (unit * row.rms) if row.rms else math.inf
        return found.excess <= bound and (found.count < BULK or found.quantile(quantile) <= (bound + moved) / 4)

    def allowed(self, row: Row, slices: tuple[slice, ...]) -> Tensor | float:
        """How far AdamW can have moved each element of a part of a parameter by noise."""
        allowed: Tensor | float = 0.0
        if row.key.kind not in PARAMETERS:
            return allowed
        number, name = self._trace.number, row.key.name.removeprefix("master of ")
        for step in range(1, row.key.step + 1):
            moment = self._trace.rows.get((step, SQUARED + name))
            if moment is None:
                continue
            updates = max(number(step, "steps of the optimizer", 1.0), 1.0)
            size = (self._trace.read(moment, slices) / (1 - self._beta2**updates)).sqrt_()
            noise = math.inf
            if gradient := self._trace.rows.get((step, f"gradient of {name}")):
                noise = math.prod(self.unit_and_bound(gradient)) * gradient.rms
            rate = number(step, "learning rate", 0.0)
            allowed = allowed + (noise / size).clamp_(max=1.0).nan_to_num_(1.0).mul_(2 * rate)
        return allowed


@dataclass(frozen=True)
class Verdict:
    """The comparison of a run with a trace. tensors: in the order of the step. left_out: how many tensors of the trace
    this run does not have."""

    tensors: Sequence[Judged]
    left_out: int

    @cached_property
    def findings(self) -> list[Judged]:
        """The tensors whose differences rounding does not explain, in the order in which a step makes them."""
        return [each for each in self.tensors if not each.is_explained]

    @cached_property
    def computed(self) -> Difference:
        """The differences of activations and gradients. Moments have the error of the gradient norm as well, and
        parameters are moved by the learning rate where a gradient is nothing but noise."""
        total = Difference()
        for each in self.tensors:
            if each.row.key.kind in ("activation", "loss", "activation gradient", "gradient"):
                total.add(each.difference)
        return total

    @property
    def word(self) -> str:
        """The verdict in words."""
        if self.findings:
            return "DIFFERS"
        is_equal = all(each.difference.equal == each.difference.count for each in self.tensors)
        return "equal to the bit" if is_equal else "within rounding"

    @property
    def nearest(self) -> Judged:
        """The tensor that comes nearest to what rounding explains."""
        return max(self.tensors, key=lambda each: each.share)


def judge(found: Sequence[Sequence[Any]], trace: Trace) -> Verdict:
    """The verdict of what the `Comparer` of each rank of a run has found, also after a trip through JSON."""
    tensors: dict[Row, Judged] = {}
    for (step, _, _, name), bound, difference, ranks, made in itertools.chain(*found):
        row = trace.rows[step, name]
        judged = tensors.setdefault(row, Judged(row, bound))
        judged.difference.add(Difference(**difference))
        judged.ranks += ranks
        judged.made += made
    in_order = sorted(tensors.values(), key=lambda each: each.row.key.order)
    return Verdict(in_order, len(trace.rows) - len(in_order))
