"""Who this process is among the ranks of a run, and what the ranks share once they have met."""

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron.gpt2.config import require
from megatron.gpt2.dist.heartbeat import POLL, SILENCE, Heartbeat
from megatron.gpt2.dist.heartbeat import named as named  # for whoever has `Ranks`
from megatron.gpt2.monitor.incidents import Incidents

FAREWELL = 5.0  # seconds that the server of the store waits for the others to leave it


class MissingRanks(ValueError):
    """Ranks that did not come; exit code 2."""

    cause = "missing ranks"  # for incidents


class LeftRanks(MissingRanks):
    """Ranks that came and left before the training; exit code 1, as where they are lost later."""


@dataclass(frozen=True)
class Meeting:
    """What the ranks share once they have met: a store, who is where, and their signs of life."""

    store: Store
    server: Store | None  # that of the store, where this process runs it
    hosts: dict[int, str]  # the host name of each rank
    heartbeat: Heartbeat

    def gather(self, name: str, rank: int, value: str) -> list[str]:
        """The `value` of each rank, by rank, once every rank has called this. Each `name` serves once.

        It has no time limit, unlike a collective or the store's own `wait`: tokenising can take hours. LeftRanks
        where a rank has left or given no sign of life.
        """
        self.store.set(f"{name}/{rank}", value)
        if self.store.add(name, 1) == len(self.hosts):
            self.store.set(f"{name}/all", "")
        with self.heartbeat.watching_all():
            while not self.store.check([f"{name}/all"]):
                if gone := self.heartbeat.silent(SILENCE):
                    raise LeftRanks(f"{named(gone, self.hosts)} left before the training began")
                time.sleep(POLL)
        return [text.decode() for text in self.store.multi_get([f"{name}/{other}" for other in self.hosts])]


@dataclass(frozen=True)
class Ranks:
    """This process among all (`rank` of `world_size`) and on its machine (`local_rank` of `local_world_size`)."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    meeting: Meeting | None = field(default=None, compare=False, repr=False)  # once the ranks have met
    incidents: Incidents | None = field(default=None, compare=False, repr=False)  # of a program that trains

    def __post_init__(self) -> None:
        require(
            0 <= self.rank < self.world_size and 0 <= self.local_rank < self.local_world_size <= self.world_size,
            f"the launcher's variables contradict each other: rank {self.rank} of {self.world_size}, "
            f"local rank {self.local_rank} of {self.local_world_size}",
        )

    def note(self, kind: str, text: str = "", **details: Any) -> None:
        """Note an incident of this rank, if it keeps them, as `Incidents.note` does."""
        if self.incidents is not None:
            self.incidents.note(kind, text, **details)

    def end(self, code: int) -> None:
        """Say with which exit code the run ends, on rank 0, to ranks that took no part in it (--elastic)."""
        if self.meeting is not None and self.rank == 0 and not self.meeting.heartbeat.is_stopped:
            self.meeting.store.set("over", str(code))

    def leave(self, gone: int = 0) -> None:
        """Leave the meeting, if there is one. Whoever serves its store waits for the others, but for the `gone` ones, or
        for FAREWELL seconds."""
        meeting = self.meeting
        if meeting is None or meeting.heartbeat.is_stopped:
            return
        meeting.heartbeat.stop()
        if not meeting.heartbeat.is_alive():  # else it waits for a store that does not answer
            with contextlib.suppress(dist.DistError):
                stand_by = int(meeting.store.add("standing by", 0))
                wait_for_others(meeting.store, "left", self.world_size - gone + stand_by if meeting.server else 0)


def wait_for_others(store: Store, key: str, count: int) -> None:
    """Count this process under `key`, and wait until `count` are counted, for FAREWELL seconds at most. 0: for
    nobody, since the store may be gone as soon as this process is counted."""
    end = time.monotonic() + FAREWELL
    store.add(key, 1)
    while count and store.add(key, 0) < count and time.monotonic() < end:
        time.sleep(POLL)
