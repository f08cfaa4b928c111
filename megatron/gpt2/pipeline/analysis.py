"""Computes the start and end of each action of a pipeline schedule, and the number of micro-batches in memory, without
running the schedule. The module also draws a schedule, as text and as a figure."""

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from megatron.gpt2.pipeline.p2p_schedule import ActionCosts, dependencies
from megatron.gpt2.pipeline.schedule import Kind, PipelineSchedule

ActionKey = tuple[Kind, int, int]  # an action: its kind, virtual stage and micro-batch


class Span(NamedTuple):
    """The start and the end of an action."""

    start: float
    end: float


@dataclass(frozen=True)
class Timetable:
    """The times of all actions: ranks[r][i] is the span of action i of rank r."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def length(self) -> float:
        """The time from the start of the first action to the end of the last one."""
        return max(span.end for spans in self.ranks for span in spans)

    @property
    def bubble(self) -> float:
        """The fraction of time in which ranks wait."""
        busy = sum(span.end - span.start for spans in self.ranks for span in spans)
        return 1 - busy / (len(self.ranks) * self.length)


def uniform_costs(schedule: PipelineSchedule, forward: float, backward: float, weight: float) -> list[ActionCosts]:
    """Return equal costs for all virtual stages. Each argument is the time of all chunks of a rank together."""
    vpp = schedule.num_model_chunks
    return [ActionCosts(forward / vpp, backward / vpp, weight / vpp)] * schedule.num_virtual_stages


def timetable(schedule: PipelineSchedule, costs: Sequence[ActionCosts]) -> Timetable:
    """Return the timetable in which each action starts as soon as its rank is free and its inputs are complete. Raises
    graphlib.CycleError if actions depend on each other in a cycle.

    costs: one per virtual stage.
    """
    before: dict[ActionKey, list[ActionKey]] = {}  # The keys of each rank are in the order of its actions.
    for rank, actions in enumerate(schedule.ranks):
        previous: list[ActionKey] = []
        for action in actions:
            virtual_stage, number = schedule.virtual_stage(rank, action.model_chunk), action.micro_batch
            needed = [(kind, other, number) for kind, other in dependencies(schedule, virtual_stage, action)]
            before[action.kind, virtual_stage, number] = needed + previous
            previous = [(action.kind, virtual_stage, number)]
    spans: dict[ActionKey, Span] = {}
    for key in TopologicalSorter(before).static_order():
        kind, virtual_stage, _ = key
        start = max((spans[other].end for other in before[key]), default=0.0)
        spans[key] = Span(start, start + costs[virtual_stage].duration(kind, schedule.splits_backward))
    return Timetable(
        tuple(
            tuple(spans[key] for key in before if key[1] % schedule.num_ranks == rank)
            for rank in range(schedule.num_ranks)
        )
    )


def max_in_flight(schedule: PipelineSchedule, queued: float = 1.0) -> list[float]:
    """Return for each rank the maximum number of micro-batches in flight, counted in micro-batches of one chunk.

    queued: the count of a micro-batch between its B and its W: at most 1, because W needs only a part of the
        activations. Between F and B the count is 1.
    """
    change = {"F": 1.0, "B": queued - 1 if schedule.splits_backward else -1.0, "W": -queued}
    return [max(accumulate(change[action.kind] for action in actions)) for actions in schedule.ranks]


def render_text(schedule: PipelineSchedule, table: Timetable) -> list[str]:
    """Return a line of text per rank. An action is drawn as its kind, its micro-batch and, with several chunks, the
    letter of its chunk, then `=` while it runs and `|` at its end. `.` means that the rank waits."""
    names = [
        [f"{action.kind}{action.micro_batch}{_letter(schedule, action.model_chunk)}" for action in actions]
        for actions in schedule.ranks
    ]
    shortest = min(span.end - span.start for spans in table.ranks for span in spans if span.end > span.start)
    # number of characters per unit of time
    wide = (1 + max(len(name) for of_rank in names for name in of_rank)) / shortest
    lines = []
    for rank, spans in enumerate(table.ranks):
        line = ""
        for name, span in zip(names[rank], spans, strict=True):
            line = line.ljust(round(span.start * wide), ".")
            if span.end > span.start:
                line += name.ljust(round(span.end * wide) - len(line) - 1, "=") + "|"
        lines.append(f"rank {rank:<3}{line.ljust(round(table.length * wide), '.')}")
    return lines


def draw_timetable(schedule: PipelineSchedule, table: Timetable, title: str, path: Path) -> None:
    """Write a figure of the timetable to `path` (.svg or .png), with a lane for each rank and time to the right."""
    import matplotlib
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    names = {"F": "forward", "B": "backward", "W": "gradients of the weights"}
    if schedule.splits_backward:
        names["B"] = "gradient of the input"
    grey = "#7d8793"  # This colour is readable on a light and on a dark page.
    style: Any = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), grey)
    with matplotlib.rc_context({**style, "svg.fonttype": "none", "svg.hashsalt": "schedule"}):
        figure = Figure(figsize=(11, 1.4 + 0.4 * schedule.num_ranks), layout="constrained")
        axes = figure.subplots()
        labels: set[str] = set()
        for rank, (actions, spans) in enumerate(zip(schedule.ranks, table.ranks, strict=True)):
            for action, span in zip(actions, spans, strict=True):
                lighter = 0.6 * action.model_chunk / max(schedule.num_model_chunks - 1, 1)  # Later chunks are lighter.
                base = to_rgb({"F": "#5fa0e1", "B": "#f09646", "W": "#6ebe6e"}[action.kind])
                colour = tuple(part + (1 - part) * lighter for part in base)
                label = names[action.kind] + (
                    f", chunk {_letter(schedule, action.model_chunk)}" if schedule.num_model_chunks > 1 else ""
                )
                wide = span.end - span.start
                axes.barh(
                    rank,
                    wide,
                    left=span.start,
                    color=colour,
                    edgecolor="white",
                    linewidth=0.8,
                    label=None if label in labels else label,
                )
                labels.add(label)
                if wide * 60 > table.length:
                    middle = span.start + wide / 2
                    axes.text(middle, rank, str(action.micro_batch), ha="center", va="center", color="#10161c")
        axes.set_yticks(range(schedule.num_ranks), [f"rank {rank}" for rank in range(schedule.num_ranks)])
        axes.invert_yaxis()
        axes.set_xlim(0, table.length)
        axes.set_xlabel("time")
        axes.set_title(title, fontsize=11)
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None)


def _letter(schedule: PipelineSchedule, chunk: int) -> str:
    """Return the letter of a chunk, or "" if a rank has only one chunk."""
    return "" if schedule.num_model_chunks == 1 else chr(ord("a") + chunk) if chunk < 26 else f"_{chunk}"
