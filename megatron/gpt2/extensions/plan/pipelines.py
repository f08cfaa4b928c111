"""What the planner reads from the schedule of a pipeline: what a rank holds beside the action that it does, and for
which share of a step the ranks wait.

Legend: p ranks of a pipeline, v chunks of the model per rank, m micro-batches.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.gpt2.config import Config
from megatron.gpt2.pipeline.analysis import timetable
from megatron.gpt2.pipeline.program import Costs, Step, program
from megatron.gpt2.pipeline.schedule import Kind, Schedule, build_schedule


class Situation(NamedTuple):
    """An action of a rank, without its micro-batch, and what else the rank holds then. By chunk of the rank: kept,
    queued: micro-batches that wait for their B or their W; begun, complete: whether the gradients of its weights exist
    already, and whether those of all micro-batches are there when the action ends. transfers: hidden states, or
    gradients of some, that have come too early or are being sent."""

    kind: Kind
    chunk: int
    kept: tuple[int, ...]
    queued: tuple[int, ...]
    begun: tuple[bool, ...]
    complete: tuple[bool, ...]
    transfers: int

    def covers(self, other: "Situation") -> bool:
        """Whether another one is the same action with at most as much of everything."""
        mine, theirs = ([*x.kept, *x.queued, *x.begun, *x.complete, x.transfers] for x in (self, other))
        return self[:2] == other[:2] and all(a >= b for a, b in zip(mine, theirs, strict=True))


def situations(config: Config, micro_batches: int, stage: int) -> list[Situation]:
    """The fullest situations of rank `stage` of the pipeline in a step: each other one has less of everything."""
    schedule = config.schedule(1)
    return _situations(schedule.name, schedule.p, schedule.chunks, _fewer(schedule, micro_batches))[stage]


def bubble(config: Config, micro_batches: int) -> float:
    """The share of the ranks' time in which they wait, where F, B and W of each layer take the same time."""
    schedule, layers = config.schedule(1), tuple(len(layers) for layers in config.layers_of_stages())
    return _bubble(schedule.name, schedule.p, schedule.chunks, micro_batches, layers)


def _fewer(schedule: Schedule, m: int) -> int:
    """Micro-batches that show what m of them show: from about 2·p on a step only repeats, p at a time."""
    return m if m <= 3 * schedule.p else 2 * schedule.p + m % schedule.p


@functools.lru_cache(maxsize=256)
def _bubble(name: str, p: int, v: int, m: int, layers: tuple[int, ...]) -> float:
    of_layer = p / sum(layers)  # so that a rank with as many layers as the mean takes 1 for each of F, B and W
    costs = [Costs(*[number * of_layer] * 3) for number in layers]
    fewer = _fewer(build_schedule(name, p, v, 1), m)
    slowest = 3 * of_layer * max(sum(layers[rank::p]) for rank in range(p))
    length = timetable(build_schedule(name, p, v, fewer), costs).length + (m - fewer) * slowest
    return 1 - 3 * m / length


@functools.lru_cache(maxsize=256)
def _situations(name: str, p: int, v: int, m: int) -> list[list[Situation]]:
    schedule = build_schedule(name, p, v, m)
    of_ranks = [list(dict.fromkeys(_of_rank(schedule, rank, steps, m))) for rank, steps in enumerate(program(schedule))]
    return [
        [one for one in found if not any(one != other and other.covers(one) for other in found)] for found in of_ranks
    ]


def _of_rank(schedule: Schedule, rank: int, steps: Sequence[Step], m: int) -> Iterator[Situation]:
    """The situations of a rank, in order."""
    splits, v = schedule.splits_backward, schedule.chunks
    kept, queued, done = [0] * v, [0] * v, [0] * v
    leaving = sent = arriving = 0
    for step in steps:
        if step.sends or step.receives:  # what was sent before has arrived
            leaving, sent, arriving = leaving - len(step.sends), len(step.sends), arriving + len(step.receives)
        if (action := step.action) is None:
            continue
        kind, chunk, stage = action.kind, action.chunk, schedule.stage(rank, action.chunk)
        ahead, behind = stage < schedule.stages - 1, stage > 0
        arriving -= (kind == "F" and behind) or (kind == "B" and ahead)
        kept[chunk] -= kind == "B"
        queued[chunk] -= kind == "W"
        begun = tuple(number > 0 for number in done)
        done[chunk] += kind == ("W" if splits else "B")  # which makes the gradients of weights
        complete = tuple(number == m for number in done)
        yield Situation(kind, chunk, tuple(kept), tuple(queued), begun, complete, leaving + sent + arriving)
        kept[chunk] += kind == "F"
        queued[chunk] += kind == "B" and splits
        leaving += (kind == "F" and ahead) or (kind == "B" and behind)
