"""A queue that passes the requests of many clients to the thread that generates."""

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from megatron.gpt2.generate.generation import Continuation, ContinuousBatch, Event, Generator


class ServerStopping:
    """Sent instead of an event, if the server stops before the job is complete."""


@dataclass(frozen=True)
class GenerationJob:
    """The continuations of one request.

    deliver(number, event): called by the thread that generates, with each event of continuation `number`: a
    GeneratedToken; or Finished, if it ends without one because its `max_new_tokens` is 0 or it was cancelled. Its
    `prompt_tokens` are complete before its first event. If the server stops before the end, the call is
    deliver(0, ServerStopping()).
    """

    continuations: list[Continuation]
    deliver: Callable[[int, Event | ServerStopping], None]


class Batcher:
    """Generates the texts of submitted jobs, at most `batch_size` at once. They start in the order of submission, each
    as soon as a row of the batch is free."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        # A signal handler may call `put` during a `get`, which SimpleQueue allows.
        self._incoming: SimpleQueue[GenerationJob | None] = SimpleQueue()
        self._texts: dict[int, tuple[GenerationJob, int]] = {}  # unfinished texts, by their number in the batch
        self._stopping = False

    def submit(self, job: GenerationJob) -> None:
        """Queue a job. Any thread may call it."""
        if self._stopping:
            job.deliver(0, ServerStopping())
        else:
            self._incoming.put(job)

    def stop(self) -> None:
        """Make `run` return after the next token. Any thread and a signal handler may call it."""
        self._stopping = True
        self._incoming.put(None)

    def run(self, generator: Generator) -> None:
        """Generate until `stop` is called. Every unfinished job is then told that the server stops, also after an
        error."""
        try:
            with generator.batch(self._batch_size) as batch:
                while not self._stopping:
                    self._add_job(batch, self._incoming.get())
                    self._generate(batch)
        finally:
            unfinished = {id(job): job for job, _ in self._texts.values()}
            while not self._incoming.empty():  # no other thread calls get
                if job := self._incoming.get():
                    unfinished[id(job)] = job
            for job in unfinished.values():
                job.deliver(0, ServerStopping())

    def _generate(self, batch: ContinuousBatch) -> None:
        """Generate until no text is left, or the server stops."""
        for event in batch.events():
            job, number = self._texts[event.row]
            if event.finish:
                del self._texts[event.row]
            job.deliver(number, event)
            while not self._incoming.empty():
                self._add_job(batch, self._incoming.get())
            if self._stopping:
                return

    def _add_job(self, batch: ContinuousBatch, job: GenerationJob | None) -> None:
        for number, c in enumerate(job.continuations if job else ()):
            assert job
            self._texts[batch.add(c)] = job, number
