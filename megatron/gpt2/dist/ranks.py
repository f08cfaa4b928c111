"""Who this process is among the ranks of a run, and what the ranks share once they have met: a store, and a sign of life
of each rank.

Each rank writes its sign every second, so that whoever loses a rank can say which. torch does not: if a rank is killed,
gloo reports a closed connection to a neighbour, which may have left because of a third rank; `monitored_barrier`, called
after that, names a rank that hangs, on rank 0 only, and none that was killed.
"""

import contextlib
import itertools
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron.gpt2.config import require
from megatron.gpt2.monitor.incidents import Incidents

POLL = 0.05  # seconds between two looks into the store
BEAT = 1.0  # seconds between two signs
PATIENCE = 3.0  # seconds without a sign after which a rank is gone, if something has failed
SILENCE = 30.0  # seconds without a sign that are worth a warning while nothing has failed
FAREWELL = 5.0  # seconds that the server of the store waits for the others to leave it
LEFT = b"left"

Gone = Mapping[int, float | None]  # ranks that are gone, with the seconds since the last sign of life; None: it left


class MissingRanks(ValueError):
    """Ranks that did not come; exit code 2."""

    cause = "missing ranks"  # for incidents


class LeftRanks(MissingRanks):
    """Ranks that came and left before the training; exit code 1, the same as for ranks that are lost later."""


class Heartbeat(threading.Thread):
    """A thread that writes this rank's sign of life into the store every BEAT seconds and reads those of others.

    store: on a connection of its own, since the training thread's may be waiting for an answer. hosts: of all ranks.
    is_first: of its machine. It reads all signs and warns of a rank that is silent for SILENCE seconds. The others read
    them only while `watches_all` is set: if all did all the time, the store would answer the square of their number.
    """

    def __init__(self, store: Store, rank: int, hosts: Mapping[int, str], *, is_first: bool) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.store, self.watches_all = store, False
        self.published: Gone | None = None  # the ranks that another rank has found to be gone
        self.at_each_beat: Callable[[Store], None] = lambda store: None  # called in this thread
        self._hosts, self._key, self._is_first, self._beats = hosts, f"beat/{rank}", is_first, 0
        self._heard: dict[int, tuple[bytes, float]] = {}  # the last sign of each rank, and when it was new
        self._looked = -math.inf  # when this process looked last
        self._asked = math.inf  # since when the store owes an answer
        self._warned: set[int] = set()
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        """Write signs until `stop`."""
        try:
            while not self._stopped.wait(BEAT):
                self.beat()
            self.store.set(self._key, LEFT.decode())
        except dist.DistError:
            pass  # nobody serves the store any more: `gone` sees that it does not answer

    def beat(self) -> None:
        """Write this rank's sign and read those of others."""
        self._beats += 1
        self._asked = time.monotonic()
        self.store.set(self._key, str(self._beats))
        ranks = list(self._hosts) if self._is_first or self.watches_all else []
        signs = self.store.multi_get([f"beat/{rank}" for rank in ranks]) if ranks else []
        # Read after the signs and used before them: a rank that publishes and leaves is not itself taken for lost.
        if self.store.check(["lost"]):
            self.published = dict(json.loads(self.store.get("lost")))
        self._asked, self._looked = math.inf, time.monotonic()
        for rank, sign in zip(ranks, signs, strict=True):
            if rank not in self._heard or self._heard[rank][0] != sign:
                self._heard[rank] = sign, self._looked
        silent = {rank for rank, seconds in self.gone(SILENCE).items() if seconds is not None} - self._warned
        if self._is_first and silent:
            self._warned |= silent
            print(f"WARNING: no sign of life for {SILENCE:.0f} s from {named(silent, self._hosts)}", file=sys.stderr)
        self.at_each_beat(self.store)

    def gone(self, seconds: float) -> Gone:
        """The ranks that have left or given no sign for `seconds`, as far as this rank has read their signs.

        If the store itself does not answer: rank 0, which serves the store or is its nearest.
        """
        now = time.monotonic()
        if not self.is_answered(seconds):
            return {0: now - self._asked}
        if now - self._looked > 2 * BEAT:  # this process was stopped itself, and has not looked again
            return {}
        heard = list(self._heard.items())
        silences = {rank: None if sign == LEFT else now - new for rank, (sign, new) in heard}
        return {rank: silence for rank, silence in silences.items() if silence is None or silence > seconds}

    def lost(self) -> Gone:
        """After a collective has failed: the ranks that are gone; empty if all give signs of life.

        The first rank that notices it publishes it: if that rank leaves as well, the others do not take it for the lost
        one.
        """
        self.watches_all = True
        # A rank that died just now has been silent for PATIENCE at the end of this. One that is silent already is what
        # has failed, and those that fell silent within the same beat are known as well: no need to wait.
        end = time.monotonic() + PATIENCE + BEAT
        while time.monotonic() < end and self.published is None and not self.gone(PATIENCE + BEAT):
            time.sleep(POLL)
        gone = self.gone(PATIENCE)
        if self.published is None and gone and self.is_answered(PATIENCE):
            self.published = dict(json.loads(self.store.compare_set("lost", "", json.dumps(list(gone.items())))))
        return gone if self.published is None else self.published

    def is_answered(self, seconds: float) -> bool:
        """Whether the store has answered within `seconds`."""
        return time.monotonic() - self._asked < seconds

    @property
    def is_stopped(self) -> bool:
        """Whether this rank has left."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Leave, and let the others know within BEAT seconds, which this waits for."""
        self._stopped.set()
        self.join(BEAT)


@dataclass(frozen=True)
class Meeting:
    """What the ranks share once they have met: a store, who is where, and their signs of life."""

    store: Store
    server: Store | None  # that of the store, if this process runs it
    hosts: dict[int, str]  # the host name of each rank
    heartbeat: Heartbeat

    def gather(self, name: str, rank: int, value: str) -> list[str]:
        """Return the `value` of each rank, by rank, once every rank has called this. Each `name` serves once.

        It has no time limit, unlike a collective or the store's own `wait`: tokenising can take hours. Raises LeftRanks
        if a rank has left or given no sign of life.
        """
        self.store.set(f"{name}/{rank}", value)
        if self.store.add(name, 1) == len(self.hosts):
            self.store.set(f"{name}/all", "")
        self.heartbeat.watches_all = True
        while not self.store.check([f"{name}/all"]):
            if gone := self.heartbeat.gone(SILENCE):
                raise LeftRanks(f"{named(gone, self.hosts)} left before the training began")
            time.sleep(POLL)
        self.heartbeat.watches_all = False
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
        """Tell the ranks that took no part in the run (--elastic), on rank 0, with which exit code it ends."""
        if self.meeting is not None and self.rank == 0 and not self.meeting.heartbeat.is_stopped:
            self.meeting.store.set("over", str(code))

    def leave(self, gone: int = 0) -> None:
        """Leave the meeting, if there is one. The server of its store waits for the others, except for the `gone` ones,
        FAREWELL seconds at most."""
        meeting = self.meeting
        if meeting is None or meeting.heartbeat.is_stopped:
            return
        meeting.heartbeat.stop()
        if not meeting.heartbeat.is_alive():  # else it waits for a store that does not answer
            with contextlib.suppress(dist.DistError):
                stand_by = int(meeting.store.add("standing by", 0))
                wait_for_others(meeting.store, "left", self.world_size - gone + stand_by if meeting.server else 0)


def wait_for_others(store: Store, key: str, count: int) -> None:
    """Count this process under `key`, and wait until `count` are counted, FAREWELL seconds at most.

    With a count of 0 it waits for nobody: the store may be gone as soon as this process is counted.
    """
    end = time.monotonic() + FAREWELL
    store.add(key, 1)
    while count and store.add(key, 0) < count and time.monotonic() < end:
        time.sleep(POLL)


def gone_words(gone: Gone, hosts: Mapping[int, str]) -> str:
    """Ranks that are gone, in words: "rank 2 (b) gave no sign of life for 60 s and rank 1 (a) left".

    If several ranks are silent, the shortest silence is printed.
    """
    silent = {rank: seconds for rank, seconds in gone.items() if seconds is not None}
    words = [f"{named(silent, hosts)} gave no sign of life for {min(silent.values()):.0f} s"] if silent else []
    if left := gone.keys() - silent.keys():
        words.append(f"{named(left, hosts)} left")
    return " and ".join(words)


def named(ranks: Collection[int], hosts: Mapping[int, str]) -> str:
    """Ranks in words, with their hosts as far as `hosts` has them: "ranks 2-3 (node004) and 5 (node007)"."""
    words = []
    # Ranks that follow each other on one host have the same difference to their place in the list.
    for (_, host), run in itertools.groupby(
        enumerate(sorted(ranks)), lambda item: (item[1] - item[0], hosts.get(item[1], ""))
    ):
        (_, first), *others = run
        words.append((f"{first}-{others[-1][1]}" if others else f"{first}") + f" ({host})" * bool(host))
    return f"rank{'s' * (len(ranks) > 1)} " + " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
