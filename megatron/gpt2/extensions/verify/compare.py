"""A run is compared with a trace while it runs: each rank compares what it has, and keeps numbers only. Then `judge`
puts together what the ranks found: is it the same training?
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron.gpt2.config import require
from megatron.gpt2.extensions.verify.rounding import PARAMETERS, Difference, Rounding
from megatron.gpt2.extensions.verify.trace import SQUARED, Key, Part, Row, Trace, measured


class Comparer:
    """Compares the parts of this rank with `trace`. facts: of its run."""

    def __init__(self, trace: Trace, facts: Mapping[str, Any]) -> None:
        self._trace, self._rounding = trace, Rounding(trace, facts)
        self._found: dict[Key, Difference] = {}
        self._made: Counter[Key] = Counter()

    def __call__(self, part: Part) -> None:
        """Compare the part. One that the trace does not have is left out."""
        row = self._trace.find(part.key.step, part.key.name)
        if row is None:
            return
        shapes = f"has shape {row.shape} there and {part.global_shape} here"
        require(row.shape == part.global_shape, f"the trace is of another run: {part.key.name} {shapes}")
        self._made[row.key] += part.writes * part.values.numel()
        moments = []  # of a parameter or master: its second moment in the trace after each step so far
        if row.key.kind in PARAMETERS:
            name = SQUARED + row.key.name.removeprefix("master of ")
            squares = [(step, self._trace.find(step, name)) for step in range(1, row.key.step + 1)]
            moments = [(step, self._trace.chunks(square, part.box)) for step, square in squares if square]
        for rows, reference in self._trace.chunks(row, part.box):
            found = Difference.of(
                measured(row.key, reference),
                measured(row.key, part.values[rows].detach().cpu()),
                (part.box.offset[0] + rows.start, *part.box.offset[1:]),
                unit=self._rounding.unit(row),
                rms=row.rms,
                bound=self._rounding.bound(row),
                allowed=self._rounding.allowed(row, [(step, next(chunks)[1]) for step, chunks in moments]),
            )
            self._found.setdefault(row.key, Difference()).add(found)

    @property
    def found(self) -> list[Any]:
        """For `judge`, as JSON: (tensor, its difference, the numbers of it that this rank makes for all others)."""
        return [(key, vars(difference), self._made[key]) for key, difference in self._found.items()]


@dataclass
class Judged:
    """A tensor of the trace beside what all ranks of a run have of it. bound: what rounding explains, in units. ranks:
    those on which rounding does not explain the difference. made: its numbers, as often as they were computed."""

    row: Row
    difference: Difference
    bound: float
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


@dataclass(frozen=True)
class Verdict:
    """The comparison of a run with a trace. tensors: in the order of the step. left_out: tensors of the trace that this
    run does not have."""

    tensors: Sequence[Judged]
    left_out: int

    @cached_property
    def findings(self) -> list[Judged]:
        """What rounding does not explain, in the order in which a step makes it."""
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


def judge(reports: Sequence[dict[str, Any]], trace: Trace) -> Verdict:
    """The verdict of the reports of all ranks of a run, each with what its `Comparer` found."""
    rounding = Rounding(trace, reports[0]["facts"])
    found: dict[Key, Judged] = {}
    for rank, report in enumerate(reports):
        for name, values, made in report["found"]:
            row, of_rank = trace.rows[Key(*name)], Difference(**values)
            judged = found.setdefault(row.key, Judged(row, Difference(), rounding.bound(row)))
            judged.difference.add(of_rank)
            judged.made += made
            if not rounding.explains(row, of_rank):
                judged.ranks.append(rank)
    return Verdict(sorted(found.values(), key=lambda each: each.row.key.order), len(trace.rows) - len(found))
