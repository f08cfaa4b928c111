"""A sign of life of each rank, every second, so that whoever loses a rank can say which.

torch does not: when a rank is killed, gloo reports a closed connection to a neighbour, which may have left because of a
third rank. `monitored_barrier`, called after that, names a rank that hangs, on rank 0 alone, and none that was killed.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

BEAT = 1.0  # seconds between two signs
PATIENCE = 3.0  # seconds without one after which, where something has failed, a rank is gone
SILENCE = 30.0  # seconds without one that are worth a warning where nothing has failed yet
LOST = 25.0  # seconds without one after which a run ends whose collectives would not notice
LEFT = b"left"


class Heartbeat(threading.Thread):
    """A thread that writes this rank's sign of life into the store every BEAT seconds and reads those of others.

    store: on a connection of its own, since the training thread's may be waiting for an answer.
    watched: the ranks whose signs it reads while all is well. If every rank watched all others, the store would answer
    the square of their number; so the first rank of each machine does, and the others watch their own machine.
    warn: takes the watched ranks without a sign for SILENCE seconds, each rank once. Otherwise the first news of a rank
    that hangs on a GPU is that NCCL's watchdog ends the process.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        watched: Iterable[int],
        warn: Callable[[list[int]], None] | None,
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.store, self._mine, self._warn = store, f"beat/{rank}", warn
        self._watched, self._all = tuple(watched), tuple(range(world_size))
        self._beats = 0
        self._heard: dict[int, tuple[bytes, float]] = {}  # the last beat of each rank, and when it was new
        self._looked = -math.inf  # when this process looked last
        self._unanswered = math.inf  # since when the store owes an answer
        self._warned: set[int] = set()
        self._stopped, self._watches_all = threading.Event(), threading.Event()
        self.published: str | None = None  # what another rank has found out
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
        ranks = self._all if self._watches_all.is_set() else self._watched
        heard = self.store.multi_get([f"beat/{rank}" for rank in ranks])  # waits for those that are not there yet
        # Read after the beats and shown before them: who publishes and leaves is not itself taken for lost.
        if self.store.check(["lost"]):
            self.published = self.store.get("lost").decode()
        self._unanswered = math.inf
        self._hear(dict(zip(ranks, heard, strict=True)))
        for look in self.at_each_beat:
            look(self.store)

    def _hear(self, beats: dict[int, bytes]) -> None:
        now, before = time.monotonic(), self._heard
        self._heard = {
            rank: before[rank] if rank in before and before[rank][0] == beat else (beat, now)
            for rank, beat in beats.items()
        }
        self._looked = now
        if self._warn is None:
            return
        new = [rank for rank in self.silent(SILENCE) if rank not in self._warned and not self.has_left(rank)]
        if new:
            self._warned.update(new)
            self._warn(new)

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
