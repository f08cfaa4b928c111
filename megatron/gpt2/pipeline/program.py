"""What the ranks of a pipeline exchange between their actions, and in which order: derived from a schedule.

NCCL knows no tags: the messages from one rank to another arrive in the order in which both have posted them. And a rank
awaits together what it posts together (`torch.distributed.batch_isend_irecv`). So the place where a rank posts a
receive decides whether the sender waits, and whether all wait for each other.

The places are found by going through the schedule in ticks. A message is exchanged at the first tick at which both
ranks are between two actions, and each posts it in that place. The receiver keeps it until an action needs it. A rank
that can begin its next action begins, unless a partner that is busy needs a message of it next: then the one of the two
waits that waits less. So there is an order in which all that is posted together can be met together, which is that of
the ticks: no rank waits forever.
"""

from dataclasses import dataclass, field
from typing import Literal

from megatron.gpt2.pipeline.schedule import Action, Kind, Schedule


@dataclass(frozen=True)
class Costs:
    """How long one stage takes for one micro-batch, in any unit of time."""

    forward: float
    backward: float  # of the input
    weight: float  # of the weights

    def of(self, kind: Kind, splits_backward: bool) -> float:
        """How long an action takes; a backward that is not split does both."""
        backward = self.backward if splits_backward else self.backward + self.weight
        return {"F": self.forward, "B": backward, "W": self.weight}[kind]


# With these ticks a step takes no longer than the schedule alone: 1F1B whatever the true times are, ZB-H1 if no W takes
# longer than an F or a B, and interleaved 1F1B if a backward takes twice as long as a forward, or three times with the
# ticks for recomputed layers (tests/megatron/gpt2/pipeline/test_analysis.py). With another ratio, and where a group of
# micro-batches is not whole, an interleaved step is some percent longer. The odd tick keeps apart what would meet by
# chance.
TICKS, TICKS_OF_RECOMPUTE, TICKS_OF_SPLIT = Costs(10, 10, 11), Costs(1, 2, 1), Costs(2, 2, 1)


@dataclass(frozen=True)
class Message:
    """Hidden states or their gradient for `stage`, from one rank of the pipeline to another one."""

    kind: Literal["activation", "gradient"]
    stage: int
    micro_batch: int
    source: int
    destination: int

    def __str__(self) -> str:
        return (
            f"the {self.kind} of micro-batch {self.micro_batch} for stage {self.stage} from rank {self.source} to "
            f"rank {self.destination}"
        )


@dataclass
class Step:
    """What a rank does, and what it posts together before. action: None if it only sends what it made last."""

    action: Action | None
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)


def program(schedule: Schedule, ticks: Costs | None = None) -> list[list[Step]]:
    """The steps of each rank. The messages from one rank to another stand in the same order with both.

    ticks: how long F, B and W take relative to each other, in whole numbers, the same on all ranks; by default TICKS or
    TICKS_OF_SPLIT. They decide who waits for whom, and never whether a rank waits forever.
    """
    ticks = ticks or (TICKS_OF_SPLIT if schedule.splits_backward else TICKS)
    steps = [[Step(action) for action in (*actions, None)] for actions in schedule.ranks]
    place, free, now = [0] * schedule.p, [0.0] * schedule.p, 0.0  # of each rank: its next step, and when it is free
    under_way: list[Message] = []
    here: set[Message | None] = {None}

    def waits_for_partner(rank: int, end: float) -> bool:
        """Whether a partner would wait longer for this rank, busy until `end`, than this rank for the partner."""
        return any(
            now < free[partner := one.destination] < (now + end) / 2
            and (action := steps[partner][place[partner]].action)
            and needed_by(schedule, partner, action) == one
            for one in under_way
            if one.source == rank
        )

    while True:
        for message in [one for one in under_way if max(free[one.source], free[one.destination]) <= now]:
            steps[message.source][place[message.source]].sends.append(message)
            steps[message.destination][place[message.destination]].receives.append(message)
            under_way.remove(message)
            here.add(message)
        begun = []
        for rank in range(schedule.p):
            action = steps[rank][place[rank]].action
            if action is None or free[rank] > now or needed_by(schedule, rank, action) not in here:
                continue
            end = now + ticks.of(action.kind, schedule.splits_backward)
            if not waits_for_partner(rank, end):
                free[rank] = end
                place[rank] += 1
                begun.append(made_by(schedule, rank, action))
        under_way += filter(None, begun)
        if max(free) <= now:
            return [own if own[-1].sends else own[:-1] for own in steps]
        now = min(time for time in free if time > now)


def made_by(schedule: Schedule, rank: int, action: Action) -> Message | None:
    """What `action` makes for another rank."""
    to = schedule.stage(rank, action.chunk) + {"F": 1, "B": -1, "W": 0}[action.kind]
    if not 0 <= to < schedule.stages:
        return None
    return needed_by(schedule, to % schedule.p, Action(action.kind, to // schedule.p, action.micro_batch))


def needed_by(schedule: Schedule, rank: int, action: Action) -> Message | None:
    """What `action` needs from another rank."""
    stage = schedule.stage(rank, action.chunk)
    for kind, source in needs(schedule, stage, action):
        if source % schedule.p != rank:
            return Message(
                "activation" if kind == "F" else "gradient", stage, action.micro_batch, source % schedule.p, rank
            )
    return None


def needs(schedule: Schedule, stage: int, action: Action) -> list[tuple[Kind, int]]:
    """Which actions on the same micro-batch must be over, as their kinds and stages."""
    if action.kind == "F":
        return [("F", stage - 1)] if stage else []
    if action.kind == "W":
        return [("B", stage)]
    needed: list[tuple[Kind, int]] = [("F", stage), ("B", stage + 1)]
    return needed if stage + 1 < schedule.stages else needed[:1]
