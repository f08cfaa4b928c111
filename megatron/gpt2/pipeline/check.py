"""A schedule and its exchanges are checked without ranks, by going through them in the strictest way: a rank goes on
only when its partners have posted their side of everything that it has posted, sends too."""

from collections import defaultdict
from collections.abc import Sequence

from megatron.gpt2.pipeline.program import Message, Step, program
from megatron.gpt2.pipeline.schedule import Action, Schedule
from megatron.gpt2.pipeline.timetable import Costs, Span, Timetable, needs

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
