"""A run is compared with a trace while it runs: each rank compares what it has, and keeps numbers alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from megatron.gpt2.extensions.verify.differences import Difference, difference
from megatron.gpt2.extensions.verify.parts import SQUARED, Key, Part, measured
from megatron.gpt2.extensions.verify.rounding import Rounding
from megatron.gpt2.extensions.verify.trace import Row, Trace
from mpu.partition import Box


class Comparer:
    """Compares the parts of this rank with `trace`; `finish` leaves a file that `verdict.read_findings` reads.

    rounding: what decides the unit of each kind, and what is allowed of parameters beyond it.
    """

    def __init__(self, trace: Trace, rounding: Rounding, folder: Path, rank: int) -> None:
        self._trace, self._rounding = trace, rounding
        self._path = folder / f"rank_{rank}.json"
        folder.mkdir(parents=True, exist_ok=True)
        self._found: dict[Key, tuple[Difference, int]] = {}

    def __call__(self, part: Part) -> None:
        """Compare the part. One that the trace does not have is left out."""
        row = self._trace.find(part.key.step, part.key.name)
        if row is None:
            return
        found, _ = self._found.setdefault(row.key, (Difference(), part.share))
        if row.shape != part.global_shape:
            found.add(Difference(part.values.numel(), 0, greatest=math.inf, excess=math.inf, at=part.box.offset))
            return
        unit, bound = self._rounding.unit(row), self._rounding.bound(row)
        moments = self._second_moments(row, part.box)
        for rows, reference in self._trace.chunks(row, part.box):
            own = part.values[rows].detach().cpu()
            allowed = self._rounding.allowed(row, [(step, next(chunks)[1]) for step, chunks in moments])
            offset = (part.box.offset[0] + rows.start, *part.box.offset[1:])
            found.add(
                difference(
                    measured(row.key, reference),
                    measured(row.key, own),
                    offset,
                    allowed=allowed,
                    roundoff=unit,
                    rms=row.rms,
                    bound=bound,
                )
            )

    def _second_moments(self, row: Row, box: Box) -> list[tuple[int, Iterator[tuple[slice, Tensor]]]]:
        """Of a parameter or master: the chunks of its second moment in the trace after each step so far."""
        if row.key.kind not in ("parameter", "master"):
            return []
        name = SQUARED + row.key.name.removeprefix("master of ")
        squares = [(step, self._trace.find(step, name)) for step in range(1, row.key.step + 1)]
        return [(step, self._trace.chunks(square, box)) for step, square in squares if square]

    def finish(self) -> None:
        """After the last step."""
        found = [[key, difference.as_dict(), share] for key, (difference, share) in self._found.items()]
        self._path.write_text(json.dumps(found), encoding="utf-8")
