"""A sign of life of each rank, every second, so that whoever loses a rank can say which.

A collective that fails tells of a closed connection or of a time-out, but not of whom: over gloo a rank hears of its
neighbour alone, who may only have left because of somebody else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

BEAT = 1.0       # seconds between two signs
PATIENCE = 3.0   # seconds without one after which, where something has failed, a rank is gone
SILENCE = 30.0   # seconds without one that are worth a warning where nothing has failed yet
WATCH = 10       # beats from one look at the others to the next while all is well
LEFT = b"left"


class Heart(threading.Thread):
    """Beats in the store, on a connection of its own: the training thread's may be waiting for an answer.

    watches: look at the others' beats also while all is well, and `warn` of ranks that give no sign: a rank that hangs
    on a GPU is otherwise heard of when NCCL's watchdog ends the process.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, watches: bool,
                 warn: Callable[[list[int]], None]) -> None:
        super().__init__(name="heart", daemon=True)
        self._store, self._mine, self._watches, self._warn = store, f"beat/{rank}", watches, warn
        self._keys = [f"beat/{number}" for number in range(world_size)]  # all of them are there when ranks have met
        self._heard: dict[int, tuple[bytes, float]] = {}  # the last beat of each rank, and when it was new
        self._answered = time.monotonic()
        self._warned: set[int] = set()
        self._stopped, self._listens = threading.Event(), threading.Event()
        self.published: str | None = None  # what another rank has found out
        self.start()

    def run(self) -> None:
        beats = 0
        try:
            while not self._stopped.wait(BEAT):
                beats += 1
                self._store.set(self._mine, str(beats))
                if self._store.check(["lost"]):
                    self.published = self._store.get("lost").decode()
                if self._listens.is_set() or self._watches and beats % WATCH == 0:
                    self._listen()
                self._answered = time.monotonic()
            self._store.set(self._mine, LEFT.decode())
        except dist.DistError:
            pass  # nobody keeps the store any more: `silent` sees that it does not answer

    def _listen(self) -> None:
        now = time.monotonic()
        for rank, beat in enumerate(self._store.multi_get(self._keys)):
            if rank not in self._heard or self._heard[rank][0] != beat:
                self._heard[rank] = beat, now
        new = [rank for rank in self.silent(SILENCE) if rank not in self._warned and self._heard[rank][0] != LEFT]
        if new and self._watches:
            self._warned.update(new)
            self._warn(new)

    def listen(self) -> None:
        """From now on look at the others with every beat."""
        self._listens.set()

    def silent(self, seconds: float) -> list[int]:
        """Ranks that have left or given no sign for so long, as far as this one has listened; rank 0, with which all
        others meet, where the store itself is silent."""
        if not self.is_answered(seconds):
            return [0]
        now = time.monotonic()
        return [rank for rank, (beat, when) in self._heard.items() if beat == LEFT or now - when > seconds]

    def is_answered(self, seconds: float) -> bool:
        """Whether the store has answered within so many seconds."""
        return time.monotonic() - self._answered < seconds

    @property
    def has_left(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """Leave: the others need not wait to hear of it."""
        self._stopped.set()
        self.join(BEAT)
