"""How far rounding alone takes two runs apart, in the units of `differences.py`.

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
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.device import DTYPES
from megatron.gpt2.extensions.verify.differences import Difference, roundoff
from megatron.gpt2.extensions.verify.trace import Row, Trace

PEAK = 8.0
SUMS_OF_16_BITS = 64
NOISE = 32.0  # relative noise of a gradient, in units
BULK = 1000  # elements
ONE_ROUNDING = 2.0  # of weights that are in two precisions
EXACT = 4.0  # units of fp32: a number that no sum over ranks makes


class Rounding:
    """What is expected of the comparison of a run with `trace`. facts: of that run, as a trace has them.

    Of both precisions the coarser one counts, and bf16 for gradients where one of both runs sends them so.
    """

    def __init__(self, trace: Trace, facts: Mapping[str, Any]) -> None:
        self._trace = trace
        self._dtype = max((DTYPES[of["precision"]] for of in (trace.facts, facts)), key=roundoff)
        in_bf16 = any(of["config"]["parallel"]["grad_reduce_in_bf16"] for of in (trace.facts, facts))
        self._of_gradients = torch.bfloat16 if in_bf16 else self._dtype
        config = trace.facts["config"]
        model, self._s = config["model"], config["data"]["seq_length"]
        self._layers, self._h = model["num_layers"], model["hidden_size"]
        self._f = model["ffn_hidden_size"] or 4 * self._h
        self._tokens = self._s * trace.facts["global_batch_size"]
        self._vocabulary = model["vocab_size"]
        self._beta2 = config["optimizer"]["adam_beta2"]
        self._clips = config["optimizer"]["clip_grad"] > 0

    def unit(self, row: Row) -> float:
        """The unit roundoff by which a tensor is measured."""
        if row.key.kind == "master" or self._is_exact(row):
            return roundoff(torch.float32)
        if row.key.kind == "parameter":
            return max(roundoff(row.dtype), roundoff(self._dtype))
        after = row.key.kind in ("gradient", "scalar", "moment")
        return roundoff(self._of_gradients if after else self._dtype)

    def bound(self, row: Row) -> float:
        """The greatest difference of an element, in units, that rounding explains; beyond `allowed`."""
        key, kind = row.key, row.key.kind
        if kind == "input":
            return 0.0
        of_gradients = kind in ("activation gradient", "gradient") or key.name == "gradient norm"
        if of_gradients and self._number(key.step, "skipped", 0.0):
            return math.inf
        if self._is_exact(row):
            return EXACT
        if kind in ("parameter", "master"):
            return PEAK * math.sqrt(key.step) if key.step else ONE_ROUNDING
        bound = (
            PEAK
            * math.sqrt(self._depth(key.name, kind))
            * (math.sqrt(self._longest_sum(row)) + self._by_adam(key.step))
        )
        if kind == "moment" or key.name == "gradient norm":
            bound += self._of_norm()
        return bound

    def bulk_bound(self, row: Row) -> tuple[float, float]:
        """A quantile, and the difference in units that it must not exceed."""
        if row.key.kind not in ("parameter", "master"):
            return 0.99, self.bound(row) / 4
        moved = self._rates(row.key.step) / (self.unit(row) * row.rms) if row.rms else math.inf
        return 0.5, (self.bound(row) + moved) / 4

    def explains(self, row: Row, found: Difference) -> bool:
        """Whether rounding alone can have made these differences."""
        quantile, bound = self.bulk_bound(row)
        bulk = found.count < BULK or found.quantile(quantile) <= bound
        return found.excess <= self.bound(row) and bulk

    def allowed(self, row: Row, variances: Iterable[tuple[int, Tensor]]) -> Tensor | float:
        """What AdamW can have made of noise, for each element of a parameter.

        variances: the second moment of the same elements after each step up to that of `row`, with its step.
        """
        allowed: Tensor | float = 0.0
        for step, variance in variances:
            noise, updates = self._noise(row.key.name.removeprefix("master of "), step), self._updates(step)
            size = (variance / (1 - self._beta2 ** max(updates, 1.0))).sqrt_()
            allowed = allowed + (noise / size).clamp_(max=1.0).nan_to_num_(1.0).mul_(2 * self._rate(step))
        return allowed

    @functools.cache  # noqa: B019  # an instance serves one comparison
    def _noise(self, name: str, step: int) -> float:
        """The bound of the gradient of a parameter, in its own size."""
        row = self._trace.find(step, f"gradient of {name}")
        return self.bound(row) * self.unit(row) * row.rms if row else math.inf

    def _rate(self, step: int) -> float:
        return self._number(step, "learning rate", 0.0)

    def _updates(self, step: int) -> float:
        return self._number(step, "steps of the optimizer", 1.0)

    @functools.cache  # noqa: B019
    def _rates(self, step: int) -> float:
        """The sum of the learning rates of the steps up to this one."""
        return sum(self._rate(done) for done in range(1, step + 1))

    @functools.cache  # noqa: B019
    def _by_adam(self, step: int) -> float:
        if step == 1:
            return 0.0
        weights = [
            row.rms
            for row in self._trace.rows.values()
            if row.key.kind == "parameter" and row.key.step == 0 and len(row.shape) == 2 and row.rms
        ]
        noise = min(NOISE * roundoff(self._of_gradients), 1.0)
        return self._rates(step - 1) / min(weights, default=math.inf) * math.sqrt(noise) / roundoff(self._dtype)

    def _of_norm(self) -> float:
        parameters = 12 * self._layers * self._h**2 + self._vocabulary * self._h
        return PEAK * math.sqrt(parameters) * roundoff(torch.float32) / roundoff(self._of_gradients)

    def _longest_sum(self, row: Row) -> int:
        backward = row.key.kind not in ("activation", "loss")
        if backward and (len(row.shape) == 1 or self._dtype == torch.float32):
            return max(self._f, self._tokens, self._vocabulary)
        return max(self._f, self._s) if self._dtype == torch.float32 else SUMS_OF_16_BITS

    def _depth(self, name: str, kind: str) -> int:
        """Layers that lie behind a tensor."""
        layer = re.search(r"layers\.(\d+)", name)
        before = int(layer[1]) + 1 if layer else 0 if "embeddings" in name else self._layers
        return (
            before + 1
            if kind == "activation"
            else self._layers + 1
            if kind == "loss"
            else 2 * self._layers + 1 - min(before, self._layers)
        )

    def _number(self, step: int, name: str, otherwise: float) -> float:
        row = self._trace.find(step, name)
        return row.rms if row else otherwise

    @staticmethod
    def _is_exact(row: Row) -> bool:
        return row.key.kind == "scalar" and row.key.name != "gradient norm"
