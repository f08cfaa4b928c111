"""What the ranks of a pipeline exchange between their actions, and in which order: derived from a schedule.

NCCL knows no tags: the messages from one rank to another arrive in the order in which both have posted them. And a rank
awaits together what it posts together (`torch.distributed.batch_isend_irecv`). So the place where a rank posts a
receive decides whether the sender waits, and whether all wait for each other.

The places are found by going through the schedule in ticks. A rank that can begin its next action begins. A message is
exchanged at the first tick at which both ranks are between two actions, and each posts it in that place. The receiver
keeps it until an action needs it. So there is an order in which all that is posted together can be met together, which
is that of the ticks: no rank waits forever.
"""

from dataclasses import dataclass
from typing import Literal

from megatron.gpt2.pipeline.schedule import Action, Schedule
from megatron.gpt2.pipeline.timetable import Costs

# With these lengths 1F1B and ZB-H1 wait for no partner that is still busy if no W takes longer than an F, and
# interleaved 1F1B if a backward takes twice as long as a forward (tests/megatron/gpt2/pipeline/test_program.py).
TICKS, TICKS_OF_SPLIT = Costs(1, 1, 1), Costs(2, 2, 1)


@dataclass(frozen=True)
class Message:
    """Hidden states or their gradient for `stage`, from one rank of the pipeline to another one."""

    kind: Literal["activation", "gradient"]
    stage: int
    micro_batch: int
    source: int
    destination: int

    def __str__(self) -> str:
        return (f"the {self.kind} of micro-batch {self.micro_batch} for stage {self.stage} from rank {self.source} to "
                f"rank {self.destination}")


@dataclass(frozen=True)
class Step:
    """What a rank posts together, and what it does then. action: None where it only sends what it made last."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    action: Action | None


def program(schedule: Schedule) -> list[list[Step]]:
    """The steps of each rank. The messages from one rank to another stand in the same order with both.

    ValueError, which names rank and action, where an action never gets what it needs.
    """
    ticks = TICKS_OF_SPLIT if schedule.splits_backward else TICKS
    # Of each rank, by place: what it sends and receives before the action there. The last place is the present one.
    sends: list[list[list[Message]]] = [[[]] for _ in schedule.ranks]
    receives: list[list[list[Message]]] = [[[]] for _ in schedule.ranks]
    free = [0.0] * schedule.p
    under_way: list[Message] = []
    here: set[Message] = set()
    now = 0.0
    while True:
        for message in [one for one in under_way if max(free[one.source], free[one.destination]) <= now]:
            sends[message.source][-1].append(message)
            receives[message.destination][-1].append(message)
            under_way.remove(message)
            here.add(message)
        begun = []
        for rank, actions in enumerate(schedule.ranks):
            place = len(sends[rank]) - 1
            if free[rank] <= now and place < len(actions):
                need = needed_by(schedule, rank, actions[place])
                if need is None or need in here:
                    free[rank] = now + ticks.of(actions[place], schedule.splits_backward)
                    sends[rank].append([])
                    receives[rank].append([])
                    begun.append(made_by(schedule, rank, actions[place]))
        under_way += filter(None, begun)
        if max(free) <= now:
            break
        now = min(time for time in free if time > now)
    for rank, actions in enumerate(schedule.ranks):
        if len(sends[rank]) <= len(actions):
            stuck = actions[len(sends[rank]) - 1]
            raise ValueError(f"rank {rank} of the pipeline never gets what it needs for {stuck}")
    steps = [[Step(tuple(sent), tuple(received), action)
              for sent, received, action in zip(sends[rank], receives[rank], (*actions, None), strict=True)]
             for rank, actions in enumerate(schedule.ranks)]
    return [of if of[-1].sends else of[:-1] for of in steps]


def made_by(schedule: Schedule, rank: int, action: Action) -> Message | None:
    """What `action` makes for another rank."""
    if action.kind == "W":
        return None
    stage = schedule.stage(rank, action.chunk)
    to = stage + 1 if action.kind == "F" else stage - 1
    return _message(schedule, action, stage=to, source=stage, destination=to)


def needed_by(schedule: Schedule, rank: int, action: Action) -> Message | None:
    """What `action` needs from another rank."""
    if action.kind == "W":
        return None
    stage = schedule.stage(rank, action.chunk)
    source = stage - 1 if action.kind == "F" else stage + 1
    return _message(schedule, action, stage=stage, source=source, destination=stage)


def _message(schedule: Schedule, action: Action, *, stage: int, source: int, destination: int) -> Message | None:
    """source, destination: stages. None where one of them is outside of the model, or where one rank has both."""
    ranks = source % schedule.p, destination % schedule.p
    if not (0 <= source < schedule.stages and 0 <= destination < schedule.stages) or ranks[0] == ranks[1]:
        return None
    return Message("activation" if action.kind == "F" else "gradient", stage, action.micro_batch, *ranks)
