"""Who this process is among the ranks of a run, and what the ranks share once they have met."""

import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron.gpt2.config import require
from megatron.gpt2.dist.elastic import MORE_RANKS, Newcomers
from megatron.gpt2.dist.heartbeat import BEAT, PATIENCE, SILENCE, Heartbeat
from megatron.gpt2.monitor.incidents import Incidents

POLL = 0.05  # seconds between two looks into the store
FAREWELL = 5.0  # seconds that the server of the store waits for the others to leave it


class MissingRanks(ValueError):
    """Ranks that did not come; exit code 2."""

    cause = "missing ranks"  # for incidents


class EarlierRound(Exception):
    """The store is of the round before: ranks that were started again have come before those have gone."""


class LeftRanks(MissingRanks):
    """Ranks that came and left before the training; exit code 1, as where they are lost later."""


@dataclass(frozen=True)
class Peer:
    """Where a rank is, as it says itself."""

    host: str
    address: str  # of its machine on the way to the store

    def as_text(self) -> str:
        """What the store keeps of it: the fields in JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Meeting:
    """What the ranks share once they have met: a store, who is where, and their signs of life."""

    store: Store
    server: Store | None  # that of the store, where this process runs it
    peers: Sequence[Peer]  # of all ranks
    heartbeat: Heartbeat
    newcomers: Newcomers | None = None  # with --elastic, on rank 0

    @property
    def hosts(self) -> dict[int, str]:
        """The host name of each rank."""
        return {rank: peer.host for rank, peer in enumerate(self.peers)}

    def gather(self, name: str, rank: int, value: str) -> list[str]:
        """The `value` of each rank, by rank, once every rank has called this. Each `name` serves once.

        It has no time limit, unlike a collective or the store's own `wait`: tokenising can take hours. LeftRanks
        where a rank has left or given no sign of life.
        """
        self.store.set(f"{name}/{rank}", value)
        if self.store.add(name, 1) == len(self.peers):
            self.store.set(f"{name}/all", "")
        with self.heartbeat.watching_all():
            while not self.store.check([f"{name}/all"]):
                if gone := self.heartbeat.silent(SILENCE):
                    raise LeftRanks(f"{named(gone, self.hosts)} left before the training began")
                time.sleep(POLL)
        return [text.decode() for text in self.store.multi_get(keys(name, len(self.peers)))]

    def lost(self) -> dict[int, float | None]:
        """The ranks that are gone, after a collective has failed; none where all ranks give signs of life.

        Each comes with the seconds since its last sign of life, or None where it has left by itself. The first rank
        that knows publishes it: when that rank leaves as well, the others do not take it for the lost one.
        """
        heartbeat = self.heartbeat
        with heartbeat.watching_all():
            # A rank that died just now has been silent for PATIENCE at the end of this. One that is silent already is
            # what has failed, and those that fell silent within the same beat are known as well: no need to wait.
            end = time.monotonic() + PATIENCE + BEAT
            while time.monotonic() < end and heartbeat.published is None and not heartbeat.silent(PATIENCE + BEAT):
                time.sleep(POLL)
            gone = {
                rank: None if heartbeat.has_left(rank) else heartbeat.silence(rank)
                for rank in heartbeat.silent(PATIENCE)
            }
        published = heartbeat.published
        if published is None and gone and heartbeat.is_answered(PATIENCE):
            published = self.store.compare_set("lost", "", json.dumps(gone)).decode()
        if published is None:
            return gone
        # Another machine may have heard a rank later than this one did.
        return {
            int(rank): seconds if seconds is None else max(seconds, heartbeat.silence(int(rank)))
            for rank, seconds in json.loads(published).items()
        }

    def leave(self, gone: int = 0) -> None:
        """Leave the store. Whoever serves it waits for the others, but for the `gone` ones, or for FAREWELL seconds."""
        if self.heartbeat.is_stopped:
            return
        self.heartbeat.stop()
        if not self.heartbeat.is_alive():  # else it waits for a store that does not answer
            with contextlib.suppress(dist.DistError):
                standing_by = self.newcomers.dismiss(self.store) if self.newcomers is not None else 0
                wait_for_others(self.store, "left", len(self.peers) - gone + standing_by if self.server else 0)


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

    @property
    def newcomers(self) -> str:
        """Why to stop, where the run could use ranks that have come since it began (--elastic), as far as rank 0 knows;
        else empty."""
        newcomers = self.meeting.newcomers if self.meeting is not None else None
        return MORE_RANKS if newcomers is not None and newcomers.are_needed else ""

    def end(self, code: int) -> None:
        """Say with which exit code the run ends, on rank 0, to ranks that took no part in it."""
        if self.meeting is not None and self.rank == 0 and not self.meeting.heartbeat.is_stopped:
            self.meeting.store.set("over", str(code))

    def leave(self, gone: int = 0) -> None:
        """Leave the meeting, if there is one, as `Meeting.leave` does."""
        if self.meeting is not None:
            self.meeting.leave(gone)


def keys(name: str, count: int) -> list[str]:
    """The keys "NAME/0", "NAME/1" … of `count` ranks."""
    return [f"{name}/{rank}" for rank in range(count)]


def wait_for_others(store: Store, key: str, count: int) -> None:
    """Count this process under `key`, and wait until `count` are counted, for FAREWELL seconds at most. 0: for
    nobody, since the store may be gone as soon as this process is counted."""
    end = time.monotonic() + FAREWELL
    store.add(key, 1)
    while count and store.add(key, 0) < count and time.monotonic() < end:
        time.sleep(POLL)


def named(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Ranks in words, with their hosts as far as `hosts` has them: "ranks 2-3 (node004) and 5 (node007)"."""
    runs: list[tuple[int, int, str]] = []
    for rank in sorted(ranks):
        host = hosts.get(rank, "")
        if runs and runs[-1][1:] == (rank - 1, host):
            runs[-1] = runs[-1][0], rank, host
        else:
            runs.append((rank, rank, host))
    words = [
        (f"{first}-{last}" if first < last else f"{first}") + (f" ({host})" if host else "")
        for first, last, host in runs
    ]
    several = len(runs) > 1 or runs[0][0] < runs[0][1]
    return f"rank{'s' * several} " + " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
