"""Prove that recorded ranks cannot wait for each other forever, and that their calls match.

`Playback` repeats the calls of all ranks together. A rank issues its calls in order, and stops at a wait until the call
is complete. A channel is a group of ranks, or the messages from one rank to another. Its calls are numbered. A call is
complete when each member of its channel has started the call with the same number.

With NCCL, the calls of a rank start one after the other, even those of different groups, because a call occupies the
device until the other ranks start the same call. The sends and receives of a batch start together. NCCL has no tags.
With gloo, only the calls of one group start one after the other. Sends and receives start at once. A send counts as
complete when the receiver has started its receive, because gloo may not buffer the message.

A complete call only allows more calls to start, and each call can match only one call of each other rank. Therefore one
playback covers all orders in which the calls may happen in time.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import Any

from data_utils.command_line import require
from megatron.gpt2.extensions.order.recording import RankRecord, RecordedCall

BACKENDS = ("nccl", "gloo")


def prove(records: Sequence[RankRecord], backends: Sequence[str] = BACKENDS) -> list[str]:
    """Return the lines that explain a fault in the shortest way, or an empty list if nothing is wrong. Raises
    ValueError if a rank is missing.

    backends: the rules to apply to groups for which the program names no backend.
    """
    ranks = [record.rank for record in records]
    require(ranks == [*range(len(ranks))] == [*range(records[0].world_size)], "prove needs each rank, in their order")
    stories = [story for record in records for story in record.faults]
    stories += [story for backend in backends if not stories and (story := Playback(records, backend).run())]
    return min(stories, key=len, default=[])


class Playback:
    """Plays the records of all ranks back under the rules of a backend."""

    def __init__(self, records: Sequence[RankRecord], backend: str) -> None:
        self._records, self._backend = records, backend
        self._next = [0] * len(records)  # the next event of each rank
        self._queues: list[defaultdict[Any, deque[list[RecordedCall]]]] = [defaultdict(deque) for _ in records]
        # the calls that have started, by their key in `_meeting` and by rank
        self._started: dict[Any, dict[int, RecordedCall]] = defaultdict(dict)
        self._meeting: dict[RecordedCall, Any] = {}
        self._complete: set[RecordedCall] = set()
        self._counts: list[Counter[Any]] = [Counter() for _ in records]
        self._ready = set(range(len(records)))

    def run(self) -> list[str]:
        """Return the lines that describe the first fault, or an empty list."""
        while self._ready:
            if story := self._advance(self._ready.pop()):
                return story
        return self._explain()

    def _advance(self, rank: int) -> list[str]:
        """Play the events of `rank` until the rank must wait."""
        events, queues = self._records[rank].events, self._queues[rank]
        while True:
            progress = False
            while self._next[rank] < len(events):
                is_call, call = events[self._next[rank]]
                if not is_call and call not in self._complete:
                    break
                self._next[rank] += 1
                if is_call:
                    self._issue(rank, call)
            for key, queue in list(queues.items()):
                while queue:
                    for call in queue[0]:
                        if story := self._start(rank, call):
                            return story
                    if not self._complete.issuperset(queue[0]):
                        break
                    queue.popleft()
                    progress = True
                if not queue:
                    del queues[key]
            if not progress:
                return []

    def _issue(self, rank: int, call: RecordedCall) -> None:
        is_nccl = "nccl" in (call.backend or self._backend)
        channel = call.channel[:4] if is_nccl else call.channel  # NCCL ignores the tag.
        self._meeting[call] = *channel, self._counts[rank][channel]
        self._counts[rank][channel] += 1
        queue = self._queues[rank]["nccl" if is_nccl else call if "message" in channel else channel]
        if queue and is_nccl and call.batch and queue[-1][0].batch == call.batch:
            queue[-1].append(call)
        else:
            queue.append([call])

    def _start(self, rank: int, call: RecordedCall) -> list[str]:
        started = self._started[self._meeting[call]]
        if rank in started:
            return []
        started[rank] = call
        if len(started) < len(call.members):
            return []
        if story := self._compare([(member, started[member]) for member in call.members]):
            return story
        self._complete.update(started.values())
        self._ready.update(started)
        return []

    def _compare(self, met: list[tuple[int, RecordedCall]]) -> list[str]:
        """Return the lines that describe calls which meet but do not match."""
        rank, call = met[0]
        for other, its in met[1:]:
            is_message = (call.name, its.name) == ("send", "recv")
            if call.arguments != its.arguments or call.name != its.name and not is_message:
                lines = [f"rank {rank} calls {call}", f"rank {other} calls {its}", "they meet and are not the same"]
                return lines + self._first_difference(rank, other, call)
        return []

    def _first_difference(self, rank: int, other: int, call: RecordedCall) -> list[str]:
        """Return a line about the first call of a group that two ranks make from different lines of the program."""
        if call.name in ("send", "recv"):
            return []
        both = [
            [c for is_call, c in self._records[r].events if is_call and c.channel == call.channel]
            for r in (rank, other)
        ]
        for number, (own, its) in enumerate(zip_longest(*both), 1):
            if own is None or its is None or own.place != its.place:
                lines = [f"rank {r}: {one or 'none'}" for r, one in ((rank, own), (other, its))]
                return [f"call {number} of this group is the first from different lines: {'; '.join(lines)}"]
        return []

    def _explain(self) -> list[str]:
        """Return the lines about the shortest chain of ranks that wait, or an empty list if all calls are complete."""
        waits = {rank: call for rank in range(len(self._records)) if (call := self._waits_in(rank))}
        absent = {
            rank: [m for m in call.members if m not in self._started[self._meeting[call]]]
            for rank, call in waits.items()
        }
        paths = deque([rank] for rank in waits)
        while paths:  # The first path found is a shortest one, because the search is breadth-first.
            path = paths.popleft()
            for rank in absent[path[-1]]:
                if rank == path[0] or rank not in waits:
                    lines = [
                        f"rank {a} waits in {waits[a]}: rank {b} does not come" for a, b in pairwise([*path, rank])
                    ]
                    if rank not in waits:
                        error = self._records[rank].error
                        lines.append(f"rank {rank} has ended{f' with {error!r}' if error else ''}")
                    return lines + self._first_difference(path[0], [*path, rank][1], waits[path[0]])
                if rank not in path:
                    paths.append([*path, rank])
        return []

    def _waits_in(self, rank: int) -> RecordedCall | None:
        """Return the incomplete call that a rank waits for, or None if the rank has ended."""
        events = self._records[rank].events
        wanted = events[self._next[rank]][1] if self._next[rank] < len(events) else None
        for queue in self._queues[rank].values():
            if wanted is None or any(wanted in together for together in queue):
                started = [call for call in queue[0] if call not in self._complete]
                return wanted if wanted in started else started[0]
        return None
