"""What can be said of a schedule without ranks: when each action runs and how much a rank keeps; and the schedule as text
and as a drawing."""

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from megatron.gpt2.pipeline.program import Costs, needs
from megatron.gpt2.pipeline.schedule import Kind, Schedule

Done = tuple[Kind, int, int]  # an action, by its kind, stage and micro-batch


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
    """Costs of each stage if the chunks of a rank take these times together and all ranks are alike."""
    v = schedule.chunks
    return [Costs(forward / v, backward / v, weight / v)] * schedule.stages


def published_length(schedule: Schedule, forward: float, backward: float, weight: float) -> float:
    """The published length of a step, with the times of a whole rank.

    1F1B and interleaved: (m + (p − 1)/v)·(F + B + W), where m is a multiple of p if chunks are interleaved.
    ZB-H1: m·(F + B + W) + (p − 1)·(F + B − W), where m >= p, and no W takes longer than an F or a B.
    """
    p, v, m, whole = schedule.p, schedule.chunks, schedule.micro_batches, forward + backward + weight
    return m * whole + (p - 1) * ((forward + backward - weight) if schedule.splits_backward else whole / v)


def timetable(schedule: Schedule, costs: Sequence[Costs]) -> Timetable:
    """When each action runs if it starts as soon as its rank is free and what it needs is there.

    costs: one per stage. graphlib.CycleError if actions need each other.
    """
    before: dict[Done, list[Done]] = {}  # in the order of each rank
    for rank, actions in enumerate(schedule.ranks):
        previous: list[Done] = []
        for action in actions:
            stage, number = schedule.stage(rank, action.chunk), action.micro_batch
            needed = [(kind, other, number) for kind, other in needs(schedule, stage, action)]
            before[action.kind, stage, number] = needed + previous
            previous = [(action.kind, stage, number)]
    spans: dict[Done, Span] = {}
    for done in TopologicalSorter(before).static_order():
        kind, stage, _ = done
        start = max((spans[other].end for other in before[done]), default=0.0)
        spans[done] = Span(start, start + costs[stage].of(kind, schedule.splits_backward))
    return Timetable(
        tuple(tuple(spans[done] for done in before if done[1] % schedule.p == rank) for rank in range(schedule.p))
    )


def kept(schedule: Schedule, queued: float = 1.0) -> list[float]:
    """Of each rank the most that it keeps at any moment, in micro-batches of one chunk.

    A micro-batch counts 1 from the end of its forward until the end of its backward, and `queued` from then until the
    end of its W: what the W needs is a part of what the B needed.
    """
    change = {"F": 1.0, "B": queued - 1 if schedule.splits_backward else -1.0, "W": -queued}
    return [max(accumulate(change[action.kind] for action in actions)) for actions in schedule.ranks]


def as_text(schedule: Schedule, table: Timetable) -> list[str]:
    """A line per rank: each action is its letter and its micro-batch, and the letter of its chunk where there are
    several, `=` while it goes on and `|` at its end; a rank that waits is `.`."""
    names = [
        [f"{action.kind}{action.micro_batch}{_letter(schedule, action.chunk)}" for action in actions]
        for actions in schedule.ranks
    ]
    shortest = min(span.end - span.start for spans in table.ranks for span in spans if span.end > span.start)
    wide = (1 + max(len(name) for own in names for name in own)) / shortest  # characters per unit of time
    lines = []
    for rank, spans in enumerate(table.ranks):
        line = ""
        for name, span in zip(names[rank], spans, strict=True):
            line = line.ljust(round(span.start * wide), ".")
            if span.end > span.start:
                line += name.ljust(round(span.end * wide) - len(line) - 1, "=") + "|"
        lines.append(f"rank {rank:<3}{line.ljust(round(table.length * wide), '.')}")
    return lines


def draw(schedule: Schedule, table: Timetable, title: str, path: Path) -> None:
    """Write a drawing of the timetable to `path` (.svg or .png): a lane for each rank, time to the right."""
    import matplotlib
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = {"F": "forward", "B": "backward", "W": "gradients of the weights"}
    if schedule.splits_backward:
        names["B"] = "gradient of the input"
    grey = "#7d8793"  # readable on a light and on a dark page
    style: Any = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), grey)
    with matplotlib.rc_context({**style, "svg.fonttype": "none", "svg.hashsalt": "schedule"}):
        figure = Figure(figsize=(11, 1.4 + 0.4 * schedule.p), layout="constrained")
        axes = figure.subplots()
        colours: dict[str, Any] = {}
        for rank, (actions, spans) in enumerate(zip(schedule.ranks, table.ranks, strict=True)):
            for action, span in zip(actions, spans, strict=True):
                lighter = 0.6 * action.chunk / max(schedule.chunks - 1, 1)  # later chunks are lighter
                base = to_rgb({"F": "#5fa0e1", "B": "#f09646", "W": "#6ebe6e"}[action.kind])
                colour = tuple(part + (1 - part) * lighter for part in base)
                label = names[action.kind] + (
                    f", chunk {_letter(schedule, action.chunk)}" if schedule.chunks > 1 else ""
                )
                colours.setdefault(label, colour)
                wide = span.end - span.start
                axes.barh(rank, wide, left=span.start, color=colour, edgecolor="white", linewidth=0.8)
                if wide * 60 > table.length:
                    middle = span.start + wide / 2
                    axes.text(middle, rank, str(action.micro_batch), ha="center", va="center", color="#10161c")
        axes.set_yticks(range(schedule.p), [f"rank {rank}" for rank in range(schedule.p)])
        axes.invert_yaxis()
        axes.set_xlim(0, table.length)
        axes.set_xlabel("time")
        axes.set_title(title, fontsize=11)
        handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None)


def _letter(schedule: Schedule, chunk: int) -> str:
    """a, b, ... where a rank has several chunks."""
    return "" if schedule.chunks == 1 else chr(ord("a") + chunk) if chunk < 26 else f"_{chunk}"
