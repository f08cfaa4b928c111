"""The point-to-point messages of a pipeline schedule: which messages each rank sends and receives before each action.

NCCL has no tags: two ranks must post their messages to each other in the same order. A rank also waits for all messages
that it posts in one batch (`torch.distributed.batch_isend_irecv`). A receive at the wrong position would make the
sender wait, or cause a deadlock.

The positions are found by a simulation of the schedule with the relative times of actions (`ActionCosts`). A message is
exchanged at the first time at which both of its ranks are between two actions, and both ranks post the message there.
The receiver keeps the tensor until an action needs it. A rank starts its next action as soon as the input of the action
is there. There is one exception: if the next action of a busy partner needs a message from the rank, the rank compares
two waits: its own until the partner is free, and that of the partner if the rank starts its action first. If its own
wait is shorter, the rank waits. In the interleaved schedule of 3 ranks with 2 chunks and 6 micro-batches, for example,
rank 2 could start a backward of 21 units of time. Rank 0 is busy for 1 more and then needs a message from rank 2, so
rank 2 waits 1, and rank 0 need not wait 20. All messages are exchanged in the order of simulated time, so no deadlock
is possible.

For example, 1F1B with two ranks and two micro-batches gives these steps (F0: forward of micro-batch 0, > send its
result, < receive it):

    rank 0   F0     | >F0 F1 | >F1 <B0 B0 | <B1 B1
    rank 1   <F0 F0 | <F1 B0 | >B0 F1     | B1     | >B1
"""

from dataclasses import dataclass, field
from typing import Literal

from megatron.gpt2.pipeline.schedule import Action, Kind, PipelineSchedule


@dataclass(frozen=True)
class ActionCosts:
    """The times of the actions of one virtual stage for one micro-batch, in any unit."""

    forward: float
    backward: float  # the time of the input's gradient
    weight: float  # the time of the weights' gradients

    def duration(self, kind: Kind, splits_backward: bool) -> float:
        """Return the time of an action. A backward that is not split computes both gradients."""
        backward = self.backward if splits_backward else self.backward + self.weight
        return {"F": self.forward, "B": backward, "W": self.weight}[kind]


# The times of F, B and W in the simulation. A step takes as long as the schedule without communication
# (tests/megatron/gpt2/pipeline/test_analysis.py) if the real times of a chunk are
#
#     1F1B               any times
#     zero-bubble        W no longer than F, and no longer than B
#     interleaved 1F1B   B and W together twice as long as F
#
# With other times, or if m is not a multiple of pp, an interleaved step takes a few percent longer. 11 is odd, so that
# two ranks rarely end an action at the same time.
SIMULATED_COSTS, SIMULATED_COSTS_WITH_W = ActionCosts(10, 10, 11), ActionCosts(2, 2, 1)


@dataclass(frozen=True)
class P2PMessage:
    """Hidden states, or their gradient, that one rank of the pipeline sends to another rank for `virtual_stage`."""

    kind: Literal["activation", "gradient"]
    virtual_stage: int
    micro_batch: int
    source: int
    destination: int

    def __str__(self) -> str:
        return (
            f"the {self.kind} of micro-batch {self.micro_batch} for virtual stage {self.virtual_stage} from rank "
            f"{self.source} to rank {self.destination}"
        )


@dataclass
class CommStep:
    """An action of a rank, and the messages that the rank posts in one batch before the action.

    action: None for the final send.
    """

    action: Action | None
    sends: list[P2PMessage] = field(default_factory=list)
    receives: list[P2PMessage] = field(default_factory=list)


def build_p2p_schedule(schedule: PipelineSchedule) -> list[list[CommStep]]:
    """Return the `CommStep`s of each rank. Any two ranks post the messages between them in the same order."""
    costs = SIMULATED_COSTS_WITH_W if schedule.splits_backward else SIMULATED_COSTS
    steps = [[CommStep(action) for action in (*actions, None)] for actions in schedule.ranks]
    # Each list has a value for each rank.
    next_step, free_at, now = [0] * schedule.num_ranks, [0.0] * schedule.num_ranks, 0.0
    pending: list[P2PMessage] = []
    exchanged: set[P2PMessage | None] = {None}

    def exchange_messages() -> None:
        """Post each pending message whose two ranks are between two actions."""
        for message in [m for m in pending if max(free_at[m.source], free_at[m.destination]) <= now]:
            steps[message.source][next_step[message.source]].sends.append(message)
            steps[message.destination][next_step[message.destination]].receives.append(message)
            pending.remove(message)
            exchanged.add(message)

    def start_actions() -> None:
        """Start the next action of each free rank that has the action's input, and add the result to `pending`."""
        results = []
        for rank in range(schedule.num_ranks):
            action = steps[rank][next_step[rank]].action
            if action is None or free_at[rank] > now or input_message(schedule, rank, action) not in exchanged:
                continue
            end = now + costs.duration(action.kind, schedule.splits_backward)
            if not waits_for_partner(rank, end):
                free_at[rank] = end
                next_step[rank] += 1
                results.append(output_message(schedule, rank, action))
        pending.extend(filter(None, results))

    def waits_for_partner(rank: int, end: float) -> bool:
        """Return True if the next action of a busy partner needs a message from `rank`, and the partner would wait
        longer for `rank`, whose next action would last until `end`, than `rank` would wait for the partner."""
        for message in pending:
            partner = message.destination
            action = steps[partner][next_step[partner]].action
            is_needed_next = action is not None and input_message(schedule, partner, action) == message
            wait, partner_wait = free_at[partner] - now, end - free_at[partner]
            if message.source == rank and is_needed_next and 0 < wait < partner_wait:
                return True
        return False

    while True:
        exchange_messages()
        start_actions()
        if max(free_at) <= now:
            return [of_rank if of_rank[-1].sends else of_rank[:-1] for of_rank in steps]
        now = min(time for time in free_at if time > now)


def output_message(schedule: PipelineSchedule, rank: int, action: Action) -> P2PMessage | None:
    """Return the message with the result of `action`, or None if no other rank needs it."""
    receiver = schedule.virtual_stage(rank, action.model_chunk) + {"F": 1, "B": -1, "W": 0}[action.kind]
    if not 0 <= receiver < schedule.num_virtual_stages:
        return None
    model_chunk, rank = divmod(receiver, schedule.num_ranks)
    return input_message(schedule, rank, Action(action.kind, model_chunk, action.micro_batch))


def input_message(schedule: PipelineSchedule, rank: int, action: Action) -> P2PMessage | None:
    """Return the message that `action` needs, or None if it needs no message."""
    virtual_stage = schedule.virtual_stage(rank, action.model_chunk)
    for kind, source in dependencies(schedule, virtual_stage, action):
        if source % schedule.num_ranks != rank:
            return P2PMessage(
                "activation" if kind == "F" else "gradient",
                virtual_stage,
                action.micro_batch,
                source % schedule.num_ranks,
                rank,
            )
    return None


def dependencies(schedule: PipelineSchedule, virtual_stage: int, action: Action) -> list[tuple[Kind, int]]:
    """Return the actions on the same micro-batch that must end before `action`, as (kind, virtual stage)."""
    if action.kind == "F":
        return [("F", virtual_stage - 1)] if virtual_stage else []
    if action.kind == "W":
        return [("B", virtual_stage)]
    needed: list[tuple[Kind, int]] = [("F", virtual_stage), ("B", virtual_stage + 1)]
    return needed if virtual_stage + 1 < schedule.num_virtual_stages else needed[:1]
