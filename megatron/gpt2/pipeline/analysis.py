"""What can be said of a schedule without ranks: when each action runs, how much a rank keeps, whether its exchanges can
deadlock; and the schedule as text and as a drawing."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron.gpt2.pipeline.program import Costs, Message, Step, needs, program
from megatron.gpt2.pipeline.schedule import Action, Schedule


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


Posted = list[tuple[Message, float]]  # from one rank to another, with the time of posting
Result = tuple[str, int, int]  # kind, stage and micro-batch of the action that made it


def check(schedule: Schedule, steps: Sequence[Sequence[Step]] | None = None) -> None:
    """ValueError, which names rank and action, unless each rank does each of its actions once, micro-batch by
    micro-batch and after what it needs, and each message is sent and received, in one order, without a deadlock.

    steps: default, the schedule's program.
    """
    kinds = "F" + "B" * schedule.trains + "W" * schedule.splits_backward
    for rank, actions in enumerate(schedule.ranks):
        expected = {
            (kind, chunk): list(range(schedule.micro_batches)) for kind in kinds for chunk in range(schedule.chunks)
        }
        found: dict[tuple[str, int], list[int]] = defaultdict(list)
        for action in actions:
            found[action.kind, action.chunk].append(action.micro_batch)
        for kind, chunk in {**expected, **found}:
            if expected.get((kind, chunk)) != found.get((kind, chunk)):
                raise ValueError(
                    f"rank {rank} does {kind} in chunk {chunk} for the micro-batches "
                    f"{found.get((kind, chunk))}, and not for {expected.get((kind, chunk))}"
                )
    steps = program(schedule) if steps is None else steps
    for rank, actions in enumerate(schedule.ranks):
        if tuple(step.action for step in steps[rank] if step.action) != actions:
            raise ValueError(f"the steps of rank {rank} are not its actions")
    synchronous(schedule, steps, [Costs(1, 1, 1)] * schedule.stages)


def synchronous(
    schedule: Schedule, steps: Sequence[Sequence[Step]], costs: Sequence[Costs], transfer: float = 0.0
) -> Timetable:
    """When each action runs if a rank awaits all that it has posted, as NCCL does with what is posted together.

    costs: one per stage. transfer: time that an exchange takes. ValueError, which names rank and action, where ranks
    wait for each other forever, where two sides post different messages, and where an action lacks what it needs.
    """
    sent: dict[tuple[int, int], Posted] = defaultdict(list)
    received: dict[tuple[int, int], Posted] = defaultdict(list)
    awaited: list[list[tuple[Message, Posted, int]]] = [[] for _ in steps]  # where the other side posts it, as which
    results: list[set[Result]] = [set() for _ in steps]
    spans: list[list[Span]] = [[] for _ in steps]
    places, free = [-1] * len(steps), [0.0] * len(steps)
    going = True
    while going:
        going = False
        for rank, own in enumerate(steps):
            while places[rank] < len(own) and all(len(posted) > number for _, posted, number in awaited[rank]):
                going = True
                if places[rank] >= 0:
                    step = own[places[rank]]
                    free[rank] = max([free[rank], *(_met(rank, *one) for one in awaited[rank])])
                    free[rank] += transfer if awaited[rank] else 0
                    results[rank].update(result(message) for message in step.receives)
                    if step.action:
                        stage = schedule.stage(rank, step.action.chunk)
                        _require_needs(schedule, rank, step.action, results[rank])
                        end = free[rank] + costs[stage].of(step.action, schedule.splits_backward)
                        spans[rank].append(Span(free[rank], end))
                        free[rank] = end
                        results[rank].add((step.action.kind, stage, step.action.micro_batch))
                places[rank] += 1
                awaited[rank].clear()
                if places[rank] < len(own):
                    step = own[places[rank]]
                    for messages, mine, theirs in ((step.sends, sent, received), (step.receives, received, sent)):
                        for message in messages:
                            pair = (message.source, message.destination)
                            if messages is step.sends and result(message) not in results[rank]:
                                raise ValueError(f"rank {rank} sends {message} before it has made it")
                            awaited[rank].append((message, theirs[pair], len(mine[pair])))
                            mine[pair].append((message, free[rank]))
    for rank, own in enumerate(steps):
        if places[rank] < len(own):
            waits = ", ".join(str(message) for message, posted, number in awaited[rank] if len(posted) <= number)
            raise ValueError(
                f"rank {rank} waits forever before {own[places[rank]].action or 'its end'}: nobody posts "
                f"the other side of {waits}"
            )
    return Timetable(tuple(map(tuple, spans)))


def result(message: Message) -> Result:
    """What a message carries."""
    if message.kind == "activation":
        return "F", message.stage - 1, message.micro_batch
    return "B", message.stage + 1, message.micro_batch


def _met(rank: int, message: Message, posted: Posted, number: int) -> float:
    """When the other side has posted this message."""
    theirs, when = posted[number]
    if theirs != message:
        raise ValueError(f"rank {rank} posts {message}, and the other side posts {theirs}")
    return when


def _require_needs(schedule: Schedule, rank: int, action: Action, results: set[Result]) -> None:
    for kind, stage in needs(schedule, schedule.stage(rank, action.chunk), action):
        if (kind, stage, action.micro_batch) not in results:
            raise ValueError(f"rank {rank} begins {action} without {kind} of stage {stage}")


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
