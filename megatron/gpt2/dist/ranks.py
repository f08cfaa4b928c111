"""Rank, world size and rendezvous of this process, and the heartbeats of all ranks.

Each rank writes a heartbeat to the store every second, so that other ranks can name a lost rank. torch does not name
lost ranks: if a rank is killed, gloo reports a closed connection to a neighbour, which may have exited because of a
third rank. `monitored_barrier` names a hanging rank only on rank 0, and never a killed rank.
"""

import contextlib
import itertools
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from data_utils.command_line import require
from megatron.gpt2.monitor.incidents import IncidentLog

POLL_INTERVAL = 0.05  # Seconds between two reads of the store.
HEARTBEAT_INTERVAL = 1.0  # Seconds between two heartbeats of a rank.
# A rank is lost if it has sent no heartbeat for SILENCE_TIMEOUT seconds, or, after a collective has failed, for
# LOST_TIMEOUT seconds.
LOST_TIMEOUT = 3.0
SILENCE_TIMEOUT = 20.0
LEAVE_TIMEOUT = 5.0  # The server of the store waits at most this number of seconds for other ranks.
LEFT = b"left"

T = TypeVar("T")

# {lost rank: seconds since its last heartbeat, or None if the rank has left}
LostRanks = Mapping[int, float | None]


class MissingRanksError(ValueError):
    """Raised if some ranks did not join.

    exit_code: the exit code of the process. The value 1 lets launchers try again.
    is_first_on_node: whether this rank must print the error, because all lower ranks of its machine are missing.
    """

    cause = "missing ranks"  # The cause of this error in the incident log.
    exit_code = 2
    is_first_on_node = False


class LostRanksError(MissingRanksError):
    """Raised if ranks have joined and then left before training. The exit code is that of a run that loses a rank
    during training."""

    exit_code = 1


def run_in_thread(function: Callable[[], T], timeout: float, silence: str) -> T:
    """Return the result of `function`, which runs in a thread. Signals end the wait of the caller at once, unlike a
    wait in torch's C++ code.

    silence: the message of the MissingRanksError that is raised after `timeout` seconds.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    try:
        return result.result(timeout)
    except FutureTimeoutError:
        raise MissingRanksError(silence) from None


class TimedStore:
    """Calls the methods of a store with a time limit of `timeout` seconds. torch's own limits do not apply if the
    server of the store stops to answer."""

    def __init__(self, store: Store, timeout: float) -> None:
        self._store, self._timeout = store, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)
        silence = f"the store of the ranks, on the machine of rank 0, did not answer for {self._timeout:g} s"
        return lambda *arguments: run_in_thread(partial(method, *arguments), self._timeout, silence)


class Heartbeat(threading.Thread):
    """A thread that writes this rank's heartbeat to the store and reads those of other ranks.

    store: a store with a separate connection, because the training thread may block on its own connection.
    hosts: {rank: host name} of all ranks.
    is_first_on_node: whether the rank is the first one of its machine. The first rank reads all heartbeats, and other
        ranks read them only while `reads_all` is set. If all ranks always read all heartbeats, the load of the store
        would grow with the square of the number of ranks.
    """

    def __init__(self, store: Store, rank: int, hosts: Mapping[int, str], *, is_first_on_node: bool) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.store, self.reads_all = store, False
        self.published_lost: LostRanks | None = None  # The lost ranks that a rank has written to the store.
        # The thread calls `on_beat` with the store after each heartbeat.
        self.on_beat: Callable[[Store], None] = lambda store: None
        self._hosts, self._key, self._is_first, self._beats = hosts, f"beat/{rank}", is_first_on_node, 0
        # {rank: (its last heartbeat, the time at which it was first read)}
        self._last_beats: dict[int, tuple[bytes, float]] = {}
        self._last_read = -math.inf  # The time at which heartbeats were last read.
        self._waiting_since = math.inf  # The start of the request to the store that has no answer yet.
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        """Write heartbeats until `stop` is called."""
        try:
            while not self._stopped.wait(HEARTBEAT_INTERVAL):
                self.beat()
            self.store.set(self._key, LEFT.decode())
        except dist.DistError:
            pass  # The server of the store has ended, so `lost_ranks` returns rank 0.

    def beat(self) -> None:
        """Write this rank's heartbeat and read the heartbeats of other ranks."""
        self._beats += 1
        self._waiting_since = time.monotonic()
        self.store.set(self._key, str(self._beats))
        ranks = list(self._hosts) if self._is_first or self.reads_all else []
        beats = self.store.multi_get([f"beat/{rank}" for rank in ranks]) if ranks else []
        # Read the published lost ranks after the heartbeats. A rank that publishes lost ranks and then exits must not
        # count as lost.
        if self.store.check(["lost"]):
            self.published_lost = dict(json.loads(self.store.get("lost")))
        # After so long a time without a read, this process was suspended. Other ranks may have been suspended, too, so
        # their silence does not count.
        if time.monotonic() - self._last_read > SILENCE_TIMEOUT / 2:
            self._last_beats.clear()
        self._waiting_since, self._last_read = math.inf, time.monotonic()
        for rank, beat in zip(ranks, beats, strict=True):
            if rank not in self._last_beats or self._last_beats[rank][0] != beat:
                self._last_beats[rank] = beat, self._last_read
        self.on_beat(self.store)

    def lost_ranks(self, seconds: float) -> LostRanks:
        """Return the ranks that have left or sent no heartbeat for `seconds`, except ranks whose heartbeats this rank
        does not read. If the store does not answer, return rank 0, on whose machine the store is."""
        now = time.monotonic()
        if not self.store_answers(seconds):
            return {0: now - self._waiting_since}
        # Without a recent read of the heartbeats, this process was suspended and cannot say which ranks are lost.
        if now - self._last_read > 2 * HEARTBEAT_INTERVAL:
            return {}
        heard = list(self._last_beats.items())
        silences = {rank: None if beat == LEFT else now - new for rank, (beat, new) in heard}
        return {rank: silence for rank, silence in silences.items() if silence is None or silence > seconds}

    def wait_for_lost_ranks(self) -> LostRanks:
        """After a collective has failed, wait for the next heartbeats and return the lost ranks, if any.

        The first rank that notices lost ranks publishes them in the store, and the other ranks return the published
        ranks. If each rank searched by itself, it would also report ranks that exit because of a lost rank.
        """
        self.reads_all = True
        # Wait until a rank that has just died has been silent for LOST_TIMEOUT seconds. The wait ends earlier if a rank
        # has been silent for longer, because this rank is then the cause.
        end = time.monotonic() + LOST_TIMEOUT + HEARTBEAT_INTERVAL
        while (
            # A heartbeat without an answer yet shows whether the store answers at all.
            (time.monotonic() < end or self._waiting_since < math.inf)
            and self.published_lost is None
            and not self.lost_ranks(LOST_TIMEOUT + HEARTBEAT_INTERVAL)
        ):
            time.sleep(POLL_INTERVAL)
        lost = self.lost_ranks(LOST_TIMEOUT)
        if self.published_lost is None and lost and self.store_answers(LOST_TIMEOUT):
            self.published_lost = dict(json.loads(self.store.compare_set("lost", "", json.dumps(list(lost.items())))))
        return lost if self.published_lost is None else self.published_lost

    def store_answers(self, seconds: float) -> bool:
        """Return whether the store has answered the last request within `seconds`."""
        return time.monotonic() - self._waiting_since < seconds

    @property
    def is_stopped(self) -> bool:
        """True if this rank has left the rendezvous."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Stop the thread, which tells the other ranks that this rank has left. Wait at most HEARTBEAT_INTERVAL
        seconds."""
        self._stopped.set()
        self.join(HEARTBEAT_INTERVAL)


@dataclass(frozen=True)
class Rendezvous:
    """The store, hosts and heartbeats that all ranks share."""

    store: Store
    server: Store | None  # The server of the store, or None if a different process serves the store.
    hosts: dict[int, str]  # {rank: host name}
    heartbeat: Heartbeat
    addresses: Mapping[int, str] = field(default_factory=dict)  # {rank: the address from which it reaches rank 0}

    def gather(self, name: str, rank: int, value: str) -> list[str]:
        """Gather the `value` of each rank, and return the values in the order of ranks. A `name` can be used for only
        one call.

        The wait for other ranks has no time limit, because tokenising can take hours. Raises LostRanksError if a rank
        has left or sends no heartbeats, and MissingRanksError if the store does not answer.
        """
        store = TimedStore(self.store, SILENCE_TIMEOUT)
        store.set(f"{name}/{rank}", value)
        if store.add(name, 1) == len(self.hosts):
            store.set(f"{name}/all", "")
        self.heartbeat.reads_all = True
        while not store.check([f"{name}/all"]):
            if lost := self.heartbeat.lost_ranks(SILENCE_TIMEOUT):
                raise LostRanksError(f"{format_ranks(lost, self.hosts)} left before training began")
            time.sleep(POLL_INTERVAL)
        self.heartbeat.reads_all = False
        return [text.decode() for text in store.multi_get([f"{name}/{other}" for other in self.hosts])]


@dataclass(frozen=True)
class RankInfo:
    """The rank and the world size of this process, globally and on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    rendezvous: Rendezvous | None = field(default=None, compare=False, repr=False)  # None for a run of one rank
    incidents: IncidentLog | None = field(default=None, compare=False, repr=False)  # None outside of training

    def __post_init__(self) -> None:
        require(
            0 <= self.rank < self.world_size and 0 <= self.local_rank < self.local_world_size <= self.world_size,
            f"the launcher's variables contradict each other: rank {self.rank} of {self.world_size}, "
            f"local rank {self.local_rank} of {self.local_world_size}",
        )

    @property
    def hosts(self) -> dict[int, str]:
        """{rank: host name}; empty for a run of one rank."""
        return self.rendezvous.hosts if self.rendezvous is not None else {}

    def note(self, kind: str, text: str = "", **details: Any) -> None:
        """Write a line into the incident log with `IncidentLog.note`, if this rank has an incident log."""
        if self.incidents is not None:
            self.incidents.note(kind, text, **details)

    def end(self, code: int) -> None:
        """On rank 0, send the exit code of the run to the ranks on standby (--elastic)."""
        if self.rendezvous is not None and self.rank == 0 and not self.rendezvous.heartbeat.is_stopped:
            self.rendezvous.store.set("over", str(code))

    def leave(self, gone: int = 0) -> None:
        """Leave the rendezvous, if there is one. The rank that serves the store first waits for the other ranks, for at
        most LEAVE_TIMEOUT seconds.

        gone: the number of lost ranks, for which the server does not wait.
        """
        rendezvous = self.rendezvous
        if rendezvous is None or rendezvous.heartbeat.is_stopped:
            return
        rendezvous.heartbeat.stop()
        if not rendezvous.heartbeat.is_alive():  # The thread hangs if the store does not answer.
            with contextlib.suppress(dist.DistError):
                stand_by = int(rendezvous.store.add("standing by", 0))
                wait_for_others(rendezvous.store, "left", self.world_size - gone + stand_by if rendezvous.server else 0)


def wait_for_others(store: Store, key: str, count: int) -> None:
    """Add 1 to the counter `key` of the store, and wait at most LEAVE_TIMEOUT seconds until the counter is `count`. If
    `count` is 0, do not wait, because the server may end as soon as this process is counted."""
    end = time.monotonic() + LEAVE_TIMEOUT
    store.add(key, 1)
    while count and store.add(key, 0) < count and time.monotonic() < end:
        time.sleep(POLL_INTERVAL)


def print_status(line: str, kind: str = "error") -> None:
    """Print `kind: line` on standard error."""
    print(f"{kind}: {line}", file=sys.stderr, flush=True)


def describe_lost(lost: LostRanks, hosts: Mapping[int, str]) -> str:
    """Describe lost ranks: "rank 2 (b) sent no heartbeat for 60 s and rank 1 (a) left". The time is that of the rank
    with the newest heartbeat."""
    silent = {rank: seconds for rank, seconds in lost.items() if seconds is not None}
    words = [f"{format_ranks(silent, hosts)} sent no heartbeat for {min(silent.values()):.0f} s"] if silent else []
    if ended := lost.keys() - silent.keys():
        words.append(f"{format_ranks(ended, hosts)} left")
    return " and ".join(words)


def format_ranks(ranks: Collection[int], hosts: Mapping[int, str]) -> str:
    """Format ranks with their hosts, if known: "ranks 2-3 (node004) and 5 (node007)"."""
    words = []
    # Consecutive ranks on one host have the same difference between rank and index.
    for (_, host), run in itertools.groupby(
        enumerate(sorted(ranks)), lambda item: (item[1] - item[0], hosts.get(item[1], ""))
    ):
        (_, first), *others = run
        words.append((f"{first}-{others[-1][1]}" if others else f"{first}") + f" ({host})" * bool(host))
    return f"rank{'s' * (len(ranks) > 1)} " + " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
