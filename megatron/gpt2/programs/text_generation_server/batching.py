"""The requests of many clients, brought to the one thread that owns the generator."""

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from megatron.gpt2.text.generation import Continuation, Finished, GeneratedToken, Generator


class Stopping:
    """The server stops before the job's end."""


@dataclass(frozen=True)
class Job:
    """The continuations of one request.

    deliver(number, event, finish): called by the thread that generates, with each event of the continuation of this
    number: a GeneratedToken; or Finished, where it ends without one because its `max_new_tokens` is 0. `finish` is ""
    until its last event. A continuation's `prompt_tokens` are there before its first event, and do not change any more.
    deliver(0, Stopping(), "") where the server stops before the end.
    """

    continuations: list[Continuation]
    deliver: Callable[[int, GeneratedToken | Finished | Stopping, str], None]

    @property
    def is_over(self) -> bool:
        """Whether every continuation has ended."""
        return all(c.finish for c in self.continuations)


class Batcher:
    """Generates for submitted jobs, first come, first served, as many texts at once as fit into `batch_size`."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        # Its `put` may interrupt its `get`, as a signal handler does.
        self._incoming: SimpleQueue[Job | None] = SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._stopping = False

    def submit(self, job: Job) -> None:
        """Queue a job of at most `batch_size` continuations. May be called from any thread."""
        assert 0 < len(job.continuations) <= self._batch_size
        if self._stopping:
            job.deliver(0, Stopping(), "")
        else:
            self._incoming.put(job)

    def stop(self) -> None:
        """Let `run` return after the next token. May be called from any thread and from a signal handler."""
        self._stopping = True
        self._incoming.put(None)

    def run(self, generator: Generator) -> None:
        """Generate until `stop`. However it ends, every job gets an answer."""
        batch: list[Job] = []
        try:
            while not self._stopping:
                batch = self._next_batch()
                self._write(generator, batch)
        finally:
            self._collect()
            for job in (*batch, *self._waiting):
                if not job.is_over:
                    job.deliver(0, Stopping(), "")

    def _write(self, generator: Generator, batch: list[Job]) -> None:
        rows = [(job, number, c) for job in batch for number, c in enumerate(job.continuations)]
        if not rows:
            return
        with contextlib.closing(generator.stream([c for _, _, c in rows])) as pieces:
            for generated in pieces:
                job, number, c = rows[generated.row]
                job.deliver(number, generated, c.finish)
                if self._stopping:
                    return

    def _next_batch(self) -> list[Job]:
        """The jobs that come next; waits where there is none."""
        if not self._waiting and (job := self._incoming.get()):
            self._waiting.append(job)
        self._collect()
        batch: list[Job] = []
        room = self._batch_size
        while self._waiting and len(self._waiting[0].continuations) <= room:
            job = self._waiting.popleft()
            if not job.is_over:  # its client went away
                batch.append(job)
                room -= len(job.continuations)
        return batch

    def _collect(self) -> None:
        while not self._incoming.empty():  # nobody else takes from it
            if job := self._incoming.get():
                self._waiting.append(job)
