"""The planner reads from a pipeline schedule which tensors a rank stores during each action, and the bubble.

Legend: p ranks of a pipeline, v chunks of the model per rank, m micro-batches.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.gpt2.config import Config
from megatron.gpt2.pipeline.analysis import timetable
from megatron.gpt2.pipeline.p2p_schedule import CommStep, StageCosts, build_p2p_schedule
from megatron.gpt2.pipeline.schedule import Kind, PipelineSchedule, build_schedule


class RankState(NamedTuple):
    """An action of a rank, and what the rank stores in addition. The tuples have one entry per chunk of the rank.

    kept: micro-batches that wait for their B.
    queued: micro-batches that wait for their W.
    begun: the gradients of the weights already exist.
    complete: they contain all micro-batches after the action.
    transfers: hidden states, or their gradients, that were received early or are being sent.
    """

    kind: Kind
    chunk: int
    kept: tuple[int, ...]
    queued: tuple[int, ...]
    begun: tuple[bool, ...]
    complete: tuple[bool, ...]
    transfers: int

    def covers(self, other: "RankState") -> bool:
        """Return True if `other` is the same action and stores at most as much of everything."""
        mine, theirs = ([*x.kept, *x.queued, *x.begun, *x.complete, x.transfers] for x in (self, other))
        return self[:2] == other[:2] and all(a >= b for a, b in zip(mine, theirs, strict=True))


def rank_states(config: Config, num_microbatches: int, stage: int) -> list[RankState]:
    """Return the largest states of rank `stage` of the pipeline in a step; they cover all other states."""
    schedule = config.pipeline_schedule(1)
    return _rank_states(
        schedule.name, schedule.num_ranks, schedule.num_chunks, _equivalent_micro_batches(schedule, num_microbatches)
    )[stage]


def bubble(config: Config, num_microbatches: int) -> float:
    """Return the fraction of time in which the ranks wait, if F, B and W of each layer take the same time."""
    schedule, layers = config.pipeline_schedule(1), tuple(len(layers) for layers in config.layers_of_stages())
    return _bubble(schedule.name, schedule.num_ranks, schedule.num_chunks, num_microbatches, layers)


def _equivalent_micro_batches(schedule: PipelineSchedule, m: int) -> int:
    """Return a smaller number of micro-batches with the same states: after about 2·p the schedule repeats every p."""
    return m if m <= 3 * schedule.num_ranks else 2 * schedule.num_ranks + m % schedule.num_ranks


@functools.lru_cache(maxsize=256)
def _bubble(name: str, p: int, v: int, m: int, layers: tuple[int, ...]) -> float:
    of_layer = p / sum(layers)  # a rank with the mean number of layers takes 1 for each of F, B and W
    costs = [StageCosts(*[number * of_layer] * 3) for number in layers]
    fewer = _equivalent_micro_batches(build_schedule(name, p, v, 1), m)
    slowest = 3 * of_layer * max(sum(layers[rank::p]) for rank in range(p))
    length = timetable(build_schedule(name, p, v, fewer), costs).length + (m - fewer) * slowest
    return 1 - 3 * m / length


@functools.lru_cache(maxsize=256)
def _rank_states(name: str, p: int, v: int, m: int) -> list[list[RankState]]:
    schedule = build_schedule(name, p, v, m)
    of_ranks = [
        list(dict.fromkeys(_states_of_rank(schedule, rank, steps, m)))
        for rank, steps in enumerate(build_p2p_schedule(schedule))
    ]
    return [
        [one for one in found if not any(one != other and other.covers(one) for other in found)] for found in of_ranks
    ]


def _states_of_rank(schedule: PipelineSchedule, rank: int, steps: Sequence[CommStep], m: int) -> Iterator[RankState]:
    """Yield the states of a rank in order."""
    splits, v = schedule.splits_backward, schedule.num_chunks
    kept, queued, done = [0] * v, [0] * v, [0] * v
    leaving = sent = arriving = 0
    for step in steps:
        if step.sends or step.receives:  # earlier messages have arrived
            leaving, sent, arriving = leaving - len(step.sends), len(step.sends), arriving + len(step.receives)
        if (action := step.action) is None:
            continue
        kind, chunk, stage = action.kind, action.chunk, schedule.stage(rank, action.chunk)
        ahead, behind = stage < schedule.num_stages - 1, stage > 0
        arriving -= (kind == "F" and behind) or (kind == "B" and ahead)
        kept[chunk] -= kind == "B"
        queued[chunk] -= kind == "W"
        begun = tuple(number > 0 for number in done)
        done[chunk] += kind == ("W" if splits else "B")  # the action that computes weight gradients
        complete = tuple(number == m for number in done)
        yield RankState(kind, chunk, tuple(kept), tuple(queued), begun, complete, leaving + sent + arriving)
        kept[chunk] += kind == "F"
        queued[chunk] += kind == "B" and splits
        leaving += (kind == "F" and ahead) or (kind == "B" and behind)
