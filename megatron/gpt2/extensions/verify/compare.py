"""Compare a run with a trace while the run computes. The run is the same training if rounding explains every
difference.

Each rank compares its own shards and stores only statistics. `Comparison` combines the statistics of all ranks.
Differences are measured in units of roundoff at the scale of the tensor:

    unit of an element   u · max(|a|, root mean square of the whole tensor a)

u is the unit roundoff, half the distance from 1 to the next number: 2^-24 in fp32, 2^-11 in fp16, 2^-8 in bf16. An
element much smaller than the root mean square is a sum whose terms nearly cancel. The rounding error of such a sum has
the size of the terms, so the scale is never below the root mean square.

    bound = MAX_ROUNDINGS · √d · (√n + a)        the largest difference of an element that rounding explains

d   The number of layers before the tensor: 1 for the embeddings, 2 L + 1 for their gradient.
n   The length of the longest sum whose order may change: max(f, s) in forward, and in backward also the vocabulary and
    the tokens of the step. In 16 bits, products are summed in fp32 and only the results are rounded. The length of
    the sum then hardly matters, and n is a constant, LONGEST_16_BIT_SUM. Gradients of biases and layer norms are sums
    of rounded terms that nearly cancel, so for them n stays the length of the sum.
a   From the second step on, the error that AdamW adds. AdamW divides a gradient by its own size: if noise decides the
    sign of an element, rounding changes the update by the whole learning rate. With relative noise e, noise decides the
    sign of a fraction e of the elements, so the weights (root mean square σ) differ by Σ rate · √e / σ of their size.

The gradient norm is one sum over N parameters, so n = N. Clipping passes the error of the norm on to the moments.

Parameters may differ by Σ 2 · rate · min(1, bound of the gradient / √v) more, where v is the bias-corrected second
moment of the element in each step. For a matrix [m, n] that Muon updates, √v is r · √min(m, n) / (c · g^k): r is the
root mean square of the gradient, c the extra scale factor, and g^k the growth of the smallest singular values, which
hold most of the noise, in k Newton-Schulz steps. The bias of a key has the true gradient 0, so it may differ by all
updates together. Before the first step, parameters must be equal.

In a skipped step the gradients have overflowed, possibly at different elements, so any difference is accepted.

Many elements together must meet a stricter bound. For tensors of MIN_BULK elements or more, the 99 % quantile (for
parameters the median) must be below a quarter of the bound. MAX_ROUNDINGS covers the extreme values of large tensors:
in correct runs the largest difference is below half of the bound (docs/reference/measured.md).

Legend: L layers, f width inside the MLP, s sequence.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_utils.command_line import require
from megatron.gpt2.config import Config
from megatron.gpt2.device import PRECISION_DTYPES
from megatron.gpt2.extensions.verify.trace import (
    SECOND_MOMENT,
    TensorKey,
    TensorShard,
    TensorTrace,
    TraceEntry,
    measured,
)
from megatron.gpt2.optimizer.muon import NEWTON_SCHULZ

MAX_ROUNDINGS = 8.0
LONGEST_16_BIT_SUM = 64
GRADIENT_NOISE = 32.0  # the relative noise of a gradient, in units of roundoff
MIN_BULK = 1000  # number of elements
ONE_ROUNDING = 2.0  # a bound for weights that the two runs have in different precisions
SCALAR_BOUND = 4.0  # a bound for scalars that are not sums over ranks, in units of fp32
# the upper edges of the histogram's bins, in units of roundoff: 0, then two edges for each factor of two
EDGES = [0.0, *(2.0 ** (half / 2 - 8) for half in range(96)), math.inf]


def roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff of a floating-point dtype: half of the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


FP32_ROUNDOFF = roundoff(torch.float32)


@dataclass
class Difference:
    """The difference of a tensor, or of its shards, from the reference.

    histogram: the number of elements per bin of differences, see EDGES.
    greatest: the largest difference in units of roundoff.
    excess: the largest difference beyond what is allowed for each element; infinite if only one value is NaN.
    at, reference, own: the index of the element with the largest excess, and its two values.
    squares: for reference a and own b the sums aa, ab and bb over all chunks whose excess is above the bound.

    bound: the largest `excess` that rounding explains.
    elements: the number of elements that the ranks have computed. An element that several ranks hold counts once.
    ranks: the ranks whose difference rounding does not explain.
    """

    histogram: np.ndarray = field(default_factory=lambda: np.zeros(len(EDGES), dtype=np.int64))
    greatest: float = 0.0
    excess: float = 0.0
    at: Sequence[int] = ()
    reference: float = 0.0
    own: float = 0.0
    squares: np.ndarray = field(default_factory=lambda: np.zeros(3))
    bound: float = math.inf
    elements: int = 0
    ranks: list[int] = field(default_factory=list)

    def add(self, other: Difference) -> None:
        """Add the difference of another shard of the same tensor."""
        if not self.at or other.excess > self.excess:
            self.excess, self.at, self.reference, self.own = other.excess, other.at, other.reference, other.own
        self.greatest, self.bound = max(self.greatest, other.greatest), other.bound
        self.histogram = np.add(self.histogram, other.histogram)
        self.squares = np.add(self.squares, other.squares)
        self.elements += other.elements
        self.ranks = [*self.ranks, *other.ranks]

    @property
    def count(self) -> int:
        """The number of elements that were compared."""
        return int(self.histogram.sum())

    @property
    def equal(self) -> int:
        """The number of elements with equal bits."""
        return int(self.histogram[0])

    def quantile(self, fraction: float) -> float:
        """Return a quantile of the differences, in units, rounded up to the edge of its bin."""
        return min(EDGES[np.searchsorted(self.histogram.cumsum(), fraction * self.count)], self.greatest)

    @property
    def factor(self) -> float | None:
        """The number c if this run's tensor is c times the reference (within a thousandth), else None."""
        aa, ab, bb = self.squares
        if not (math.isfinite(aa + ab + bb) and aa > 0 and bb > 0):
            return None
        return ab / aa if bb - ab * ab / aa < 1e-6 * bb else None

    @property
    def bound_fraction(self) -> float:
        """The excess as a fraction of the bound."""
        return self.excess / self.bound if 0 < self.bound < math.inf else 0.0


class TraceComparer:
    """Compares the shards of rank `rank` with `trace` while they are computed.

    If the two runs have different precisions, the bounds are those of the lower one. The bounds of gradients are those
    of bf16 if either run reduces gradients in bf16.

    metadata: the metadata of the run with these shards, see `run_metadata`.
    """

    def __init__(self, trace: TensorTrace, metadata: Mapping[str, Any], rank: int) -> None:
        self._trace, self._rank, both, config = trace, rank, (trace.metadata, metadata), trace.metadata["config"]
        self._found: defaultdict[TensorKey, Difference] = defaultdict(Difference)
        model, s = config["model"], config["data"]["seq_length"]
        h, v = model["hidden_size"], model["vocab_size"]
        self._roundoff = max(roundoff(PRECISION_DTYPES[of["precision"]]) for of in both)
        in_bf16 = any(of["config"]["parallel"]["grad_reduce_in_bf16"] for of in both)
        self._gradient_roundoff = roundoff(torch.bfloat16) if in_bf16 else self._roundoff
        self._layers, self._optimizer = model["num_layers"], Config.from_dict(config).optimizer
        self._forward = max(model["ffn_hidden_size"] or 4 * h, s)
        self._backward = max(self._forward, s * trace.metadata["global_batch_size"], v)
        self._norm_bound = (
            MAX_ROUNDINGS * math.sqrt(12 * self._layers * h**2 + v * h) * FP32_ROUNDOFF / self._gradient_roundoff
        )
        rates = (trace.scalar(step, "learning rate", 0.0) for step in range(1, trace.metadata["steps"] + 1))
        self._rate_sums = [0.0, *itertools.accumulate(rates)]  # the sum of the learning rates up to each step
        # `_adam_growth` is the term a of the module's formula, divided by the sum of the learning rates.
        weights = [
            entry.rms for entry in trace.entries.values() if entry.key[:2] == (0, "parameter") and len(entry.shape) == 2
        ]
        noise = math.sqrt(min(GRADIENT_NOISE * self._gradient_roundoff, 1.0))
        self._adam_growth = noise / self._roundoff / min(filter(None, weights), default=math.inf)

    def __call__(self, shard: TensorShard) -> None:
        """Compare the shard. If the trace does not have the tensor, ignore the shard."""
        key = shard.key
        entry = self._trace.entries.get((key.step, key.name))
        if entry is None:
            return
        shapes = f"has shape {entry.shape} in the trace and {shard.shape} here"
        require(entry.shape == shard.shape, f"the trace is of a different run: {key.name} {shapes}")
        found = self._found[entry.key]
        found.elements += shard.writes * shard.values.numel()
        for chunk in shard.chunks():
            found.add(self._compare(entry, chunk))

    def _compare(self, entry: TraceEntry, shard: TensorShard) -> Difference:
        """Compare a shard with the same slice of the reference. Different integers have an infinite difference."""
        unit, bound = self.unit_and_bound(entry)
        reference = measured(entry.key, self._trace.read(entry, shard.slices))
        own = measured(entry.key, shard.values.detach().cpu())
        a, b = reference.float().contiguous(), own.float().contiguous()
        apart = (a - b).abs() if own.is_floating_point() else math.inf
        is_equal = (reference == own) | (a.isnan() & b.isnan())  # Equal infinities count as equal, too.
        apart = torch.where(is_equal, 0.0, apart).nan_to_num_(math.inf, math.inf)
        # The minimum scale, a subnormal number, avoids 0 / 0.
        scale = a.abs().clamp_min_(max(entry.rms, 1e-30)).mul_(unit).clamp_min_(1e-38).nan_to_num_(1.0, posinf=1.0)
        allowed = self.allowed_by_update(entry, shard.slices)
        units, excess = (apart / scale).view(-1), (apart - allowed).clamp_min_(0.0).div_(scale).view(-1)
        most = float(excess.max())
        index = int((excess if most > 0 else units).argmax())
        a, b = a.view(-1), b.view(-1)
        return Difference(
            torch.bincount(torch.bucketize(units, torch.tensor(EDGES)), minlength=len(EDGES)).numpy(),
            float(units.max()),
            most,
            [int(i) + first for i, first in zip(np.unravel_index(index, own.shape), shard.offset, strict=True)],
            float(a[index]),
            float(b[index]),
            np.array([float(x.dot(y)) for x, y in ((a, a), (a, b), (b, b))]) if most > bound else np.zeros(3),
            bound,
        )

    @property
    def findings(self) -> list[Any]:
        """Return what `Comparison` needs: the step and the name of each tensor, and the fields of its `Difference`."""
        for key, found in self._found.items():
            if not self.is_within_rounding(self._trace.entries[key.step, key.name], found):
                found.ranks = [self._rank]
        return [(key.step, key.name, vars(found)) for key, found in self._found.items()]

    def unit_and_bound(self, entry: TraceEntry) -> tuple[float, float]:
        """Return the unit roundoff of a tensor, and the bound of its differences in units, without
        `allowed_by_update`."""
        step, kind, _, name = entry.key
        if kind == "input":
            return self._roundoff, 0.0
        if kind == "parameter":
            return max(roundoff(entry.dtype), self._roundoff), MAX_ROUNDINGS * math.sqrt(step) if step else ONE_ROUNDING
        if kind == "scalar" and name != "gradient norm":
            return FP32_ROUNDOFF, SCALAR_BOUND
        is_forward = kind in ("activation", "loss")
        unit = self._roundoff if is_forward or kind == "activation gradient" else self._gradient_roundoff
        if not is_forward and kind != "moment" and self._trace.scalar(step, "skipped", 0.0):
            return unit, math.inf
        layer = re.search(r"layers\.(\d+)", name)
        before = int(layer[1]) + 1 if layer else 0 if "embeddings" in name else self._layers
        depth = before + 1 if is_forward else 2 * self._layers + 1 - before
        longest = self._forward if is_forward else self._backward
        if self._roundoff > FP32_ROUNDOFF and (is_forward or len(entry.shape) > 1):
            longest = LONGEST_16_BIT_SUM
        bound = MAX_ROUNDINGS * math.sqrt(depth) * (math.sqrt(longest) + self._rate_sums[step - 1] * self._adam_growth)
        return unit, bound + self._norm_bound if kind in ("moment", "scalar") else bound

    def is_within_rounding(self, entry: TraceEntry, found: Difference) -> bool:
        """Return True if rounding explains these differences."""
        bound, quantile, moved = found.bound, 0.99, 0.0
        if entry.key.kind == "parameter":
            unit = self.unit_and_bound(entry)[0]
            quantile, moved = 0.5, self._rate_sums[entry.key.step] / (unit * entry.rms) if entry.rms else math.inf
        return found.excess <= bound and (found.count < MIN_BULK or found.quantile(quantile) <= (bound + moved) / 4)

    def allowed_by_update(self, entry: TraceEntry, slices: tuple[slice, ...]) -> Tensor | float:
        """Return how far an update can move each element of a parameter's slice because of gradient noise."""
        allowed: Tensor | float = 0.0
        if entry.key.kind != "parameter":
            return allowed
        scalar, name = self._trace.scalar, entry.key.name
        for step in range(1, entry.key.step + 1):
            moment = self._trace.entries.get((step, SECOND_MOMENT + name))
            gradient = self._trace.entries.get((step, f"gradient of {name}"))
            noise = math.prod(self.unit_and_bound(gradient)) * gradient.rms if gradient else math.inf
            if moment:
                updates = max(scalar(step, "steps of the optimizer", 1.0), 1.0)
                size = (self._trace.read(moment, slices) / (1 - self._optimizer.adam_beta2**updates)).sqrt_()
            elif gradient and self._optimizer.optimizer == "muon":
                growth = NEWTON_SCHULZ[0] ** self._optimizer.muon_num_ns_steps
                scale = growth * self._optimizer.muon_extra_scale_factor / math.sqrt(min(entry.shape))
                size = torch.tensor(gradient.rms / scale)
            else:
                continue
            rate = scalar(step, "learning rate", 0.0)
            allowed = allowed + (noise / size).clamp_(max=1.0).nan_to_num_(1.0).mul_(2 * rate)
        return allowed


class Comparison:
    """The comparison of a run with a trace.

    tensors: the difference of each tensor, in the order of the step.
    mismatches: the tensors whose difference rounding does not explain, or of which not every element was computed once.
    total: the differences of all activations and gradients. Moments are left out because they also have the error of
        the gradient norm, and parameters because noise can change them by the learning rate.
    found: `TraceComparer.findings` of each rank, as lists if they were read from JSON.
    """

    def __init__(self, found: Sequence[Sequence[Any]], trace: TensorTrace) -> None:
        merged: defaultdict[TraceEntry, Difference] = defaultdict(Difference)
        for step, name, difference in itertools.chain(*found):
            merged[trace.entries[step, name]].add(Difference(**difference))
        self.tensors = sorted(merged.items(), key=lambda item: item[0].key.order)
        self.mismatches = [
            (entry, each) for entry, each in self.tensors if each.ranks or each.elements != math.prod(entry.shape)
        ]
        self.total = Difference()
        for entry, each in self.tensors:
            if entry.key.kind in ("activation", "loss", "activation gradient", "gradient"):
                self.total.add(each)

    @property
    def verdict(self) -> str:
        """The verdict in the table."""
        if self.mismatches:
            return "DIFFERS"
        is_equal = all(each.equal == each.count for _, each in self.tensors)
        return "equal to the bit" if is_equal else "within rounding"

    @property
    def bound_fraction(self) -> float:
        """The largest difference as a fraction of its bound."""
        return max(each.bound_fraction for _, each in self.tensors)
