"""The requests of many clients, brought to the one thread that owns the generator."""

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from megatron.gpt2.generate.generation import Batch, Continuation, Event, Generator


class Stopping:
    """The server stops before the job's end."""


@dataclass(frozen=True)
class Job:
    """The continuations of one request.

    deliver(number, event): called by the thread that generates, with each event of the continuation of this number: a
    GeneratedToken; or Finished, where it ends without one because its `max_new_tokens` is 0 or it was cancelled. A
    continuation's `prompt_tokens` are there before its first event, and do not change any more. deliver(0, Stopping())
    where the server stops before the end.
    """

    continuations: list[Continuation]
    deliver: Callable[[int, Event | Stopping], None]


class Batcher:
    """Generates for submitted jobs, as many texts at once as `batch_size`. The texts begin in the order in which they
    were submitted, each as soon as one before it has ended."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        # Its `put` may interrupt its `get`, as a signal handler does.
        self._incoming: SimpleQueue[Job | None] = SimpleQueue()
        self._texts: dict[int, tuple[Job, int]] = {}  # those that have not ended, by their number in the batch
        self._stopping = False

    def submit(self, job: Job) -> None:
        """Queue a job. May be called from any thread."""
        if self._stopping:
            job.deliver(0, Stopping())
        else:
            self._incoming.put(job)

    def stop(self) -> None:
        """Let `run` return after the next token. May be called from any thread and from a signal handler."""
        self._stopping = True
        self._incoming.put(None)

    def run(self, generator: Generator) -> None:
        """Generate until `stop`. However it ends, every job gets an answer."""
        try:
            with generator.batch(self._batch_size) as batch:
                while not self._stopping:
                    self._take(batch, self._incoming.get())
                    self._generate(batch)
        finally:
            unfinished = {id(job): job for job, _ in self._texts.values()}
            while not self._incoming.empty():  # nobody else takes from it
                if job := self._incoming.get():
                    unfinished[id(job)] = job
            for job in unfinished.values():
                job.deliver(0, Stopping())

    def _generate(self, batch: Batch) -> None:
        """Until nobody waits, or the server stops."""
        for event in batch.events():
            job, number = self._texts[event.row]
            if event.finish:
                del self._texts[event.row]
            job.deliver(number, event)
            while not self._incoming.empty():
                self._take(batch, self._incoming.get())
            if self._stopping:
                return

    def _take(self, batch: Batch, job: Job | None) -> None:
        for number, c in enumerate(job.continuations if job else ()):
            assert job
            self._texts[batch.add(c)] = job, number
