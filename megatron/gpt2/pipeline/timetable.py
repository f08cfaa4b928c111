"""When each action of a schedule starts and ends, given how long a stage's F, B and W take; and what a rank keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.gpt2.pipeline.schedule import Action, Schedule


@dataclass(frozen=True)
class Costs:
    """How long one stage takes for one micro-batch, in any unit of time."""

    forward: float
    backward: float  # of the input
    weight: float  # of the weights

    def of(self, action: Action, splits_backward: bool) -> float:
        """How long `action` takes; a backward that is not split does both."""
        if action.kind == "F":
            return self.forward
        return self.weight if action.kind == "W" else self.backward + (0 if splits_backward else self.weight)


class Span(NamedTuple):
    """When an action runs."""

    start: float
    end: float


@dataclass(frozen=True)
class Timetable:
    """ranks[r][i] is when action i of rank r runs."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def length(self) -> float:
        """From the start of the first action to the end of the last one."""
        return max(span.end for spans in self.ranks for span in spans)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they wait."""
        busy = sum(span.end - span.start for spans in self.ranks for span in spans)
        return 1 - busy / (len(self.ranks) * self.length)


def equal_costs(schedule: Schedule, forward: float, backward: float, weight: float) -> list[Costs]:
    """Costs of each stage, where the chunks of a rank take these times together and all ranks are alike."""
    v = schedule.chunks
    return [Costs(forward / v, backward / v, weight / v)] * schedule.stages


def published_length(schedule: Schedule, forward: float, backward: float, weight: float) -> float:
    """The published length of a step, with the times of a whole rank.

    1F1B and interleaved: (m + (p − 1)/v)·(F + B + W), where m is a multiple of p if chunks are interleaved.
    ZB-H1: m·(F + B + W) + (p − 1)·(F + B − W), where m >= p, and no W takes longer than an F or a B.
    """
    p, v, m, whole = schedule.p, schedule.chunks, schedule.micro_batches, forward + backward + weight
    return m * whole + (p - 1) * ((forward + backward - weight) if schedule.splits_backward else whole / v)


def timetable(schedule: Schedule, costs: Sequence[Costs], transfer: float = 0.0) -> Timetable:
    """When each action runs if it starts as soon as its rank is free and what it needs is there.

    costs: one per stage. transfer: time from the end of an action until another rank has what it made. ValueError,
    which names rank and action, where an action never gets what it needs.
    """
    ends: dict[tuple[str, int, int], float] = {}  # by kind, stage and micro-batch
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    free = [0.0] * schedule.p
    going = True
    while going:
        going = False
        for rank, actions in enumerate(schedule.ranks):
            while len(spans[rank]) < len(actions):
                action = actions[len(spans[rank])]
                stage = schedule.stage(rank, action.chunk)
                start = free[rank]
                for kind, other in needs(schedule, stage, action):
                    end = ends.get((kind, other, action.micro_batch), float("inf"))
                    start = max(start, end if other % schedule.p == rank else end + transfer)
                if start == float("inf"):
                    break
                free[rank] = start + costs[stage].of(action, schedule.splits_backward)
                ends[action.kind, stage, action.micro_batch] = free[rank]
                spans[rank].append(Span(start, free[rank]))
                going = True
    for rank, actions in enumerate(schedule.ranks):
        if len(spans[rank]) < len(actions):
            raise ValueError(f"rank {rank} of the pipeline never gets what it needs for {actions[len(spans[rank])]}")
    return Timetable(tuple(map(tuple, spans)))


def needs(schedule: Schedule, stage: int, action: Action) -> list[tuple[str, int]]:
    """Which actions on the same micro-batch must be over, as their kinds and stages."""
    if action.kind == "F":
        return [("F", stage - 1)] if stage else []
    if action.kind == "W":
        return [("B", stage)]
    return [("F", stage), *([("B", stage + 1)] if stage + 1 < schedule.stages else [])]


def kept(schedule: Schedule, queued: float = 1.0) -> list[float]:
    """Of each rank the most that it keeps at any moment, in micro-batches of one chunk.

    A micro-batch counts 1 from the end of its forward until the end of its backward, and `queued` from then until the
    end of its W: what the W needs is a part of what the B needed. Without backwards nothing is kept.
    """
    if not schedule.trains:
        return [0.0] * schedule.p
    after = {"F": 1.0, "B": queued - 1 if schedule.splits_backward else -1.0, "W": -queued}
    most = []
    for actions in schedule.ranks:
        now = [0.0]
        for action in actions:
            now.append(now[-1] + after[action.kind])
        most.append(max(now))
    return most
