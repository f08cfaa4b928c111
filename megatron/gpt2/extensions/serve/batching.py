"""A queue that passes the requests of many clients to the thread that generates text."""

from collections.abc import Callable, Sequence
from queue import SimpleQueue

from megatron.gpt2.generate.generation import ContinuousBatch, GeneratedToken, GenerationRequest, Generator

# The generating thread calls deliver(number, token) for each token of continuation `number` of a request. The
# continuation's `prompt_tokens` are complete before the first call. If the server stops early, the thread calls
# deliver(0, None).
Deliver = Callable[[int, GeneratedToken | None], None]


class Batcher:
    """Generates the texts of requests, at most `batch_size` at once. The texts start in the order of submission, each
    as soon as a row of the batch is free."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        # A signal handler may call `put` during a `get`. SimpleQueue allows this.
        self._incoming: SimpleQueue[tuple[Sequence[GenerationRequest], Deliver]] = SimpleQueue()
        self._texts: dict[int, tuple[int, Deliver]] = {}  # the unfinished texts, by their number in the batch
        self._stopping = False

    def submit(self, continuations: Sequence[GenerationRequest], deliver: Deliver) -> None:
        """Queue the continuations of a request. Any thread may call this method."""
        if self._stopping:
            deliver(0, None)
        else:
            self._incoming.put((continuations, deliver))

    def stop(self) -> None:
        """Make `run` return after the next token. Any thread and any signal handler may call `stop`."""
        self._stopping = True
        self._incoming.put(((), lambda number, event: None))  # An empty request wakes the thread.

    def run(self, generator: Generator) -> None:
        """Generate until `stop` is called. At the end, also after an exception, call deliver(0, None) for each
        unfinished request."""
        try:
            with generator.batch(self._batch_size) as batch:
                while not self._stopping:
                    self._admit(batch)
                    for event in batch.events():
                        number, deliver = self._texts[event.number]
                        if event.finish:
                            del self._texts[event.number]
                        deliver(number, event)
                        while not self._incoming.empty():
                            self._admit(batch)
                        if self._stopping:
                            break
        finally:
            unfinished = dict.fromkeys(deliver for _, deliver in self._texts.values())
            while not self._incoming.empty():  # No other thread calls get.
                unfinished[self._incoming.get()[1]] = None
            for deliver in unfinished:
                deliver(0, None)

    def _admit(self, batch: ContinuousBatch) -> None:
        """Wait for a request, and add its texts to the batch."""
        continuations, deliver = self._incoming.get()
        for number, c in enumerate(continuations):
            self._texts[batch.add(c)] = number, deliver
