"""What the planner reads from the schedule of a pipeline: what a rank holds beside the action that it does, and for
which share of a step the ranks wait.

Legend: p ranks of a pipeline, v chunks of the model per rank, m micro-batches.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from megatron.gpt2.config import Config
from megatron.gpt2.pipeline.analysis import timetable
from megatron.gpt2.pipeline.program import Costs, program
from megatron.gpt2.pipeline.schedule import Kind, Schedule, build_schedule


class Beside(NamedTuple):
    """What else a rank holds during an action. By chunk of the rank: kept, queued: micro-batches that wait for their B
    or their W; begun, complete: whether the gradients of its weights exist already, and whether those of all
    micro-batches are there when the action ends. transfers: hidden states, or gradients of some, that have come too
    early or are being sent."""

    kept: tuple[int, ...]
    queued: tuple[int, ...]
    begun: tuple[bool, ...]
    complete: tuple[bool, ...]
    transfers: int

    def covers(self, other: "Beside") -> bool:
        """Whether it is at least as much everywhere."""
        return (
            all(
                a >= b
                for mine, theirs in zip(self[:4], other[:4], strict=True)
                for a, b in zip(mine, theirs, strict=True)
            )
            and self.transfers >= other.transfers
        )


@dataclass(frozen=True)
class Situation:
    """An action of a rank, without its micro-batch, and what the rank holds beside it."""

    kind: Kind
    chunk: int
    beside: Beside


def situations(config: Config, micro_batches: int, stage: int) -> list[Situation]:
    """The fullest situations of rank `stage` of the pipeline in a step: each other one has less of everything."""
    schedule = config.schedule(1)
    return _situations(schedule.name, schedule.p, schedule.chunks, _fewer(schedule, micro_batches))[stage]


def bubble(config: Config, micro_batches: int) -> float:
    """The share of the ranks' time in which they wait, where F, B and W of each layer take the same time."""
    schedule = config.schedule(1)
    return _bubble(
        schedule.name,
        schedule.p,
        schedule.chunks,
        micro_batches,
        tuple(len(layers) for layers in config.layers_of_stages()),
    )


def _fewer(schedule: Schedule, m: int) -> int:
    """Micro-batches that show what m of them show: from about 2·p on a step only repeats, p at a time."""
    return m if m <= 3 * schedule.p else 2 * schedule.p + m % schedule.p


@functools.lru_cache(maxsize=256)
def _bubble(name: str, p: int, v: int, m: int, layers: tuple[int, ...]) -> float:
    schedule = build_schedule(name, p, v, 1)
    of_layer = p / sum(layers)  # so that a rank with as many layers as the mean takes 1 for each of F, B and W
    costs = [Costs(*[number * of_layer] * 3) for number in layers]
    fewer = _fewer(schedule, m)
    slowest = 3 * of_layer * max(sum(layers[rank::p]) for rank in range(p))
    length = timetable(build_schedule(name, p, v, fewer), costs).length + (m - fewer) * slowest
    return 1 - 3 * m / length


@functools.lru_cache(maxsize=256)
def _situations(name: str, p: int, v: int, m: int) -> list[list[Situation]]:
    schedule = build_schedule(name, p, v, m)
    last = "W" if schedule.splits_backward else "B"  # makes the gradients of weights
    found = []
    for rank, steps in enumerate(program(schedule)):
        kept, queued, done = [0] * v, [0] * v, [0] * v
        leaving = sent = arriving = 0
        of_rank: set[Situation] = set()
        for step in steps:
            if step.sends or step.receives:  # what was sent before has arrived
                leaving, sent, arriving = leaving - len(step.sends), len(step.sends), arriving + len(step.receives)
            if (action := step.action) is None:
                continue
            kind, chunk, stage = action.kind, action.chunk, schedule.stage(rank, action.chunk)
            ahead, behind = stage < schedule.stages - 1, stage > 0
            if (kind == "F" and behind) or (kind == "B" and ahead):
                arriving -= 1
            kept[chunk] -= kind == "B"
            queued[chunk] -= kind == "W"
            begun = tuple(number > 0 for number in done)
            done[chunk] += kind == last
            of_rank.add(
                Situation(
                    kind,
                    chunk,
                    Beside(
                        tuple(kept),
                        tuple(queued),
                        begun,
                        tuple(number == m for number in done),
                        leaving + sent + arriving,
                    ),
                )
            )
            kept[chunk] += kind == "F"
            queued[chunk] += kind == "B" and schedule.splits_backward
            if (kind == "F" and ahead) or (kind == "B" and behind):
                leaving += 1
        found.append(
            [
                one
                for one in of_rank
                if not any(
                    one != other
                    and (one.kind, one.chunk) == (other.kind, other.chunk)
                    and other.beside.covers(one.beside)
                    for other in of_rank
                )
            ]
        )
    return found
