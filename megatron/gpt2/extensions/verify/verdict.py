"""What the ranks of a run found, put together: is it the same training?"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.gpt2.extensions.verify.differences import Difference
from megatron.gpt2.extensions.verify.parts import KINDS, Key
from megatron.gpt2.extensions.verify.rounding import Rounding
from megatron.gpt2.extensions.verify.trace import Row, Trace


@dataclass(frozen=True)
class Finding:
    """A tensor of which rounding does not explain the difference.

    ranks: where it differs; `found` is of the one where it differs most. bound: what rounding explains, in units.
    missing: elements that these ranks should have computed and did not.
    """

    row: Row
    ranks: tuple[int, ...]
    found: Difference
    bound: float
    missing: int = 0


@dataclass(frozen=True)
class Verdict:
    """The comparison of a run with a trace.

    by_kind: all differences of a kind of tensor. worst: for each tensor its difference over all ranks and its bound, in
    the order of the step. findings: what rounding does not explain, in the order in which a step makes it.
    left_out: tensors of the trace that this run does not have.
    """

    by_kind: Mapping[str, Difference]
    worst: Sequence[tuple[Row, Difference, float]]
    findings: Sequence[Finding]
    left_out: int

    @property
    def is_equal(self) -> bool:
        """Whether everything is equal to the bit."""
        return all(found.equal == found.count for found in self.by_kind.values())

    @property
    def computed(self) -> Difference:
        """The differences of activations and gradients. Moments have the error of the gradient norm as well, and
        parameters are moved by the learning rate where a gradient is nothing but noise."""
        total = Difference()
        for kind in ("activation", "loss", "activation gradient", "gradient"):
            total.add(self.by_kind.get(kind, Difference()))
        return total

    @property
    def word(self) -> str:
        """The verdict in words."""
        if self.findings:
            return "DIFFERS"
        return "equal to the bit" if self.is_equal else "within rounding"

    @property
    def is_same(self) -> bool:
        """Whether rounding explains every difference."""
        return not self.findings

    @property
    def share_of_bound(self) -> tuple[float, Row | None]:
        """The tensor that comes nearest to what rounding explains, and how near: 1 is at the bound."""
        shares = [(found.excess / bound, row) for row, found, bound in self.worst if 0 < bound < math.inf]
        return max(shares, key=lambda share: share[0], default=(0.0, None))


def read_verdict(folder: Path, world_size: int, trace: Trace, rounding: Rounding, stages: int = 1) -> Verdict:
    """The verdict of what `Comparer` has left in `folder` on each of `world_size` ranks, of a pipeline of `stages`."""
    found: dict[Key, dict[int, Difference]] = {}
    shares: dict[Key, int] = {}
    for rank in range(world_size):
        for name, difference, share in json.loads((folder / f"rank_{rank}.json").read_text(encoding="utf-8")):
            key = Key(*name)
            found.setdefault(key, {})[rank] = Difference(
                **{**difference, "at": tuple(difference["at"]), "squares": tuple(difference["squares"])}
            )
            shares[key] = share
    by_kind = {kind: Difference() for kind in KINDS}
    worst, findings = [], []
    for key in sorted(found, key=lambda key: key.order):
        row, of_ranks = trace.rows[key], found[key]
        together = Difference()
        for difference in of_ranks.values():
            together.add(difference)
        by_kind[key.kind].add(together)
        bound = rounding.bound(row)
        worst.append((row, together, bound))
        differing = [rank for rank, difference in of_ranks.items() if not rounding.explains(row, difference)]
        if differing:
            most = max(differing, key=lambda rank: of_ranks[rank].excess)
            findings.append(Finding(row, tuple(differing), of_ranks[most], bound))
        elif share := shares[key]:
            expected, of_a_stage = math.prod(row.shape) // share, world_size // stages
            holders = {rank // of_a_stage for rank in of_ranks}  # the stages that compute it
            if short := [
                rank
                for rank in range(world_size)
                if rank // of_a_stage in holders and (of_ranks[rank].count if rank in of_ranks else 0) != expected
            ]:
                first = of_ranks.get(short[0], Difference())
                findings.append(Finding(row, tuple(short), first, bound, missing=expected - first.count))
    return Verdict({kind: d for kind, d in by_kind.items() if d.count}, worst, findings, len(trace.rows) - len(found))
