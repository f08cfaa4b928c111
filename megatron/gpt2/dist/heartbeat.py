"""A sign of life of each rank, every second, so that whoever loses a rank can say which.

torch does not: when a rank is killed, gloo reports a closed connection to a neighbour, which may have left because of a
third rank. `monitored_barrier`, called after that, names a rank that hangs, on rank 0 only, and none that was killed.
"""

import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

POLL = 0.05  # seconds between two looks into the store
BEAT = 1.0  # seconds between two signs
PATIENCE = 3.0  # seconds without one after which, where something has failed, a rank is gone
SILENCE = 30.0  # seconds without one that are worth a warning where nothing has failed yet
LEFT = b"left"

Gone = Mapping[int, float | None]  # ranks that are gone, with the seconds since the last sign of life; None: it left


class Heartbeat(threading.Thread):
    """A thread that writes this rank's sign of life into the store every BEAT seconds and reads those of others.

    store: on a connection of its own, since the training thread's may be waiting for an answer. hosts: of all ranks.
    is_first: of its machine. It reads all signs and warns of a rank without one for SILENCE seconds; the others read
    them only where something has failed: if all did, the store would answer the square of their number.
    """

    def __init__(self, store: Store, rank: int, hosts: Mapping[int, str], *, is_first: bool) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.store, self.hosts, self._mine, self._is_first = store, hosts, f"beat/{rank}", is_first
        self._beats = 0
        self._heard: dict[int, tuple[bytes, float]] = {}  # the last beat of each rank, and when it was new
        self._looked = -math.inf  # when this process looked last
        self._unanswered = math.inf  # since when the store owes an answer
        self._warned: set[int] = set()
        self._stopped, self._watches_all = threading.Event(), threading.Event()
        self.published: Gone | None = None  # the ranks that another rank has found to be gone
        self.at_each_beat: list[Callable[[Store], None]] = []  # called in this thread after each beat
        self.start()

    def run(self) -> None:
        """The thread's body: beat until `stop`."""
        try:
            while not self._stopped.wait(BEAT):
                self.beat()
            self.store.set(self._mine, LEFT.decode())
        except dist.DistError:
            pass  # nobody serves the store any more: `silent` sees that it does not answer

    def beat(self) -> None:
        """Write this rank's sign of life and read those of others."""
        self._beats += 1
        self._unanswered = time.monotonic()
        self.store.set(self._mine, str(self._beats))
        ranks = list(self.hosts) if self._is_first or self._watches_all.is_set() else []
        heard = self.store.multi_get([f"beat/{rank}" for rank in ranks]) if ranks else []
        # Read after the beats and shown before them: who publishes and leaves is not itself taken for lost.
        if self.store.check(["lost"]):
            self.published = {int(rank): seconds for rank, seconds in json.loads(self.store.get("lost")).items()}
        self._unanswered, self._looked = math.inf, time.monotonic()
        for rank, beat in zip(ranks, heard, strict=True):
            if self._heard.get(rank, (b"", 0.0))[0] != beat:
                self._heard[rank] = beat, self._looked
        if self._is_first:
            new = {rank for rank in self.silent(SILENCE) if not self.has_left(rank)} - self._warned
            self._warned |= new
            if new:
                print(f"WARNING: no sign of life for {SILENCE:.0f} s from {named(new, self.hosts)}", file=sys.stderr)
        for look in self.at_each_beat:
            look(self.store)

    @contextlib.contextmanager
    def watching_all(self) -> Iterator[None]:
        """Inside, this rank reads the signs of all ranks."""
        self._watches_all.set()
        try:
            yield
        finally:
            self._watches_all.clear()

    def silent(self, seconds: float) -> list[int]:
        """The ranks that have left or given no sign for `seconds`, as far as this rank has read their signs.

        Rank 0, which serves the store or is its nearest, where the store itself does not answer.
        """
        if not self.is_answered(seconds):
            return [0]
        if time.monotonic() - self._looked > 2 * BEAT:  # this process was stopped itself, and has not looked again
            return []
        return [rank for rank in list(self._heard) if self.has_left(rank) or self.silence(rank) > seconds]

    def silence(self, rank: int) -> float:
        """Seconds since the last sign of life of this rank; 0 where this process has not read its signs."""
        now = time.monotonic()
        of_store = now - self._unanswered if rank == 0 else 0.0
        return max(now - self._heard[rank][1] if rank in self._heard else 0.0, of_store)

    def has_left(self, rank: int) -> bool:
        """Whether this rank has left by itself."""
        return rank in self._heard and self._heard[rank][0] == LEFT

    def gone(self, ranks: Iterable[int]) -> Gone:
        """These ranks, each with the seconds since its last sign of life, or None if it has left by itself."""
        return {rank: None if self.has_left(rank) else self.silence(rank) for rank in ranks}

    def lost(self) -> Gone:
        """The ranks that are gone, after a collective has failed; none if all ranks give signs of life.

        The first rank that notices it publishes it: when that rank leaves as well, the others do not take it for the
        lost one.
        """
        with self.watching_all():
            # A rank that died just now has been silent for PATIENCE at the end of this. One that is silent already is
            # what has failed, and those that fell silent within the same beat are known as well: no need to wait.
            end = time.monotonic() + PATIENCE + BEAT
            while time.monotonic() < end and self.published is None and not self.silent(PATIENCE + BEAT):
                time.sleep(POLL)
            gone = self.gone(self.silent(PATIENCE))
        published = self.published
        if published is None and gone and self.is_answered(PATIENCE):
            text = self.store.compare_set("lost", "", json.dumps(gone))
            published = {int(rank): seconds for rank, seconds in json.loads(text).items()}
        # Another machine may have heard a rank later than this one did.
        return (
            gone
            if published is None
            else {
                rank: seconds if seconds is None else max(seconds, self.silence(rank))
                for rank, seconds in published.items()
            }
        )

    def is_answered(self, seconds: float) -> bool:
        """Whether the store has answered within `seconds`."""
        return time.monotonic() - self._unanswered < seconds

    @property
    def is_stopped(self) -> bool:
        """Whether this rank has left."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Leave, and let the others know within BEAT seconds, which this waits for."""
        self._stopped.set()
        self.join(BEAT)


def gone_words(gone: Gone, hosts: Mapping[int, str]) -> str:
    """Ranks that are gone, in words: "rank 2 (b) gave no sign of life for 60 s and rank 1 (a) left". Of several silent
    ranks the shortest silence is printed."""
    silent = {rank: seconds for rank, seconds in gone.items() if seconds is not None}
    words = [f"{named(silent, hosts)} gave no sign of life for {min(silent.values()):.0f} s"] if silent else []
    if left := gone.keys() - silent.keys():
        words.append(f"{named(left, hosts)} left")
    return " and ".join(words)


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
