"""A sign of life of each rank, every second, so that whoever loses a rank can say which.

A collective that fails tells of a closed connection or of a time-out, but not of whom: over gloo a rank hears of its
neighbour alone, who may only have left because of somebody else.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

BEAT = 1.0       # seconds between two signs
PATIENCE = 3.0   # seconds without one after which, where something has failed, a rank is gone
SILENCE = 30.0   # seconds without one that are worth a warning where nothing has failed yet
LEFT = b"left"


class Heart(threading.Thread):
    """Beats in the store, on a connection of its own: the training thread's may be waiting for an answer.

    watched: the ranks whose beats it looks at with each of its own while all is well. Where every rank watched all
    others the store would have the square of their number to answer; so the first of each machine does, and the rest
    watch their own machine.
    warn: is told of watched ranks that give no sign, each once: a rank that hangs on a GPU is otherwise heard of when
    NCCL's watchdog ends the process.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, watched: Iterable[int],
                 warn: Callable[[list[int]], None] | None) -> None:
        super().__init__(name="heart", daemon=True)
        self._store, self._mine, self._warn = store, f"beat/{rank}", warn
        self._watched, self._all = tuple(watched), tuple(range(world_size))
        self._heard: dict[int, tuple[bytes, float]] = {}  # the last beat of each rank, and when it was new
        self._looked = -math.inf     # when this process looked last
        self._unanswered = math.inf  # since when the store owes an answer
        self._warned: set[int] = set()
        self._stopped, self._listens = threading.Event(), threading.Event()
        self.published: str | None = None  # what another rank has found out
        self.start()

    def run(self) -> None:
        beats = 0
        try:
            while not self._stopped.wait(BEAT):
                beats += 1
                self._unanswered = time.monotonic()
                self._store.set(self._mine, str(beats))
                ranks = self._all if self._listens.is_set() else self._watched
                heard = self._store.multi_get([f"beat/{rank}" for rank in ranks])  # there since the ranks have met
                # Asked after the beats and told before them: who publishes and leaves is not itself taken for lost.
                if self._store.check(["lost"]):
                    self.published = self._store.get("lost").decode()
                self._unanswered = math.inf
                self._hear(dict(zip(ranks, heard, strict=True)))
            self._store.set(self._mine, LEFT.decode())
        except dist.DistError:
            pass  # nobody keeps the store any more: `silent` sees that it does not answer

    def _hear(self, beats: dict[int, bytes]) -> None:
        now, before = time.monotonic(), self._heard
        self._heard = {rank: before[rank] if rank in before and before[rank][0] == beat else (beat, now)
                       for rank, beat in beats.items()}
        self._looked = now
        if self._warn is None:
            return
        new = [rank for rank in self.silent(SILENCE) if rank not in self._warned and not self.has_said_farewell(rank)]
        if new:
            self._warned.update(new)
            self._warn(new)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, this rank looks at the beats of all."""
        self._listens.set()
        try:
            yield
        finally:
            self._listens.clear()

    def silent(self, seconds: float) -> list[int]:
        """Ranks that have left or given no sign for so long, as far as this one has looked; rank 0, with which all
        others meet, where the store itself is silent."""
        if not self.is_answered(seconds):
            return [0]
        if time.monotonic() - self._looked > 2 * BEAT:  # this process was stopped itself, and has not looked again
            return []
        return [rank for rank in list(self._heard) if self.has_said_farewell(rank) or self.silence(rank) > seconds]

    def silence(self, rank: int) -> float:
        """Seconds since the last sign of life of this rank; 0 where this one has not looked at it."""
        now = time.monotonic()
        of_store = now - self._unanswered if rank == 0 else 0.0
        return max(now - self._heard[rank][1] if rank in self._heard else 0.0, of_store)

    def has_said_farewell(self, rank: int) -> bool:
        """Whether this rank has left by itself."""
        return rank in self._heard and self._heard[rank][0] == LEFT

    def is_answered(self, seconds: float) -> bool:
        """Whether the store has answered within so many seconds."""
        return time.monotonic() - self._unanswered < seconds

    @property
    def has_left(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """Leave: the others need not wait to hear of it."""
        self._stopped.set()
        self.join(BEAT)
