"""Generate text with a trained model, several continuations at a time.

Continuations are batched continuously (Yu et al., "Orca", OSDI 2022): after each token, finished continuations leave
the batch and waiting ones take their rows. The first rank of a model-parallel group, the driver, draws the tokens.

Legend: b continuations in the batch, v vocabulary.
"""

import codecs
import contextlib
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from torch import Tensor

from data_utils import Tokenizer
from data_utils.command_line import Log
from megatron.gpt2.device import inference
from megatron.gpt2.generate.model_runner import ModelRunner
from megatron.gpt2.generate.sampling import Sampler, SamplingParams
from megatron.gpt2.model.gpt2 import GPT2Model


class GenerationRequest:
    """A request for the text that follows `prompt`, a list of ids. An empty prompt begins a new document.

    ids: the new tokens so far, without the end-of-document token.
    finish: the reason for the end, "end" (of the document), "stop" (a stop string), "length" or "cancelled"; "" before
        the end.
    score_prompt: put the prompt's tokens from the second on, with their probabilities and without text, into
        `prompt_tokens` before the first new token.
    """

    def __init__(
        self, prompt: Sequence[int] | np.ndarray, sampling: SamplingParams, *, score_prompt: bool = False
    ) -> None:
        self.prompt = [int(i) for i in prompt]
        self.sampling, self.score_prompt = sampling, score_prompt
        self.prompt_tokens: list[GeneratedToken] = []
        self.ids: list[int] = []
        self.finish = ""
        # `ContinuousBatch.add` sets `number` and `context`. The context has the ids that the model reads.
        self.number = -1
        self.context: list[int] = []
        self._text = TextStream(sampling.stop)
        self._sampler: Sampler | None = None  # Made at the first token, because it may need GPU memory.

    def cancel(self) -> None:
        """End the continuation before its next token. Any thread may call this method."""
        self.finish = self.finish or "cancelled"

    def next(self, logits: Tensor, total: Tensor, tokenizer: Tokenizer) -> "GeneratedToken":
        """Draw the next token, or end the continuation.

        logits: [v].
        total: logsumexp of the logits.
        """
        wanted = self.sampling.max_new_tokens
        if not wanted:
            self.finish = self.finish or "length"
        if self.finish:
            return GeneratedToken(self.number, finish=self.finish)
        if self._sampler is None:
            self._sampler = Sampler(self.sampling, self.context, logits.numel(), logits.device)
        token, probability = self._sampler.draw(logits, total)
        self.context.append(token)
        if token == tokenizer.eod:
            text, ended = self._text.add(b"", last=True), "end"
        else:
            self.ids.append(token)
            is_last = len(self.ids) == wanted
            text = self._text.add(tokenizer.token_bytes[token], last=is_last)
            ended = "stop" if self._text.stopped else "length" if is_last else ""
        self.finish = self.finish or ended
        return GeneratedToken(self.number, token, probability, text, self._sampler.likeliest(logits), self.finish)

    def set_prompt_scores(self, scores: Iterator[list[float]]) -> None:
        """Fill `prompt_tokens` from rows of `token_scores`, which may have more alternatives than needed."""
        for token in self.context[1:]:
            log_probability, _, *others = next(scores)
            middle = len(others) // 2
            likeliest = [(int(i), math.exp(value)) for i, value in zip(others[:middle], others[middle:], strict=True)]
            wanted = tuple(likeliest[: self.sampling.alternatives])
            self.prompt_tokens.append(GeneratedToken(self.number, token, math.exp(log_probability), "", wanted))
        self.score_prompt = False  # The model may read the context again, but scores it once.


Continuation = GenerationRequest  # the name of GenerationRequest before version 0.3


class GeneratedToken(NamedTuple):
    """A new token of continuation `number`, or the continuation's end if it was cancelled or has `max_new_tokens` 0.

    id: the token, or -1 if the continuation ended without a token.
    text: the characters that this token completes: none, some, or also characters of earlier tokens.
    probability: the model's probability, before penalty, temperature, top-k and top-p.
    likeliest: the `SamplingParams.alternatives` likeliest ids with their probabilities.
    finish: see `GenerationRequest.finish`.
    """

    number: int
    id: int = -1
    probability: float = 0.0
    text: str = ""
    likeliest: tuple[tuple[int, float], ...] = ()
    finish: str = ""


class Generator(ModelRunner):
    """Continues prompts. The driver calls `stream` or `batch` inside `driving`, and the other ranks call
    `execute_commands`."""

    def __init__(
        self,
        model: GPT2Model,
        tokenizer: Tokenizer,
        *,
        recompute: bool = False,
        group: dist.ProcessGroup | None = None,
        log: Log = lambda line: None,
    ) -> None:
        """recompute: read the whole context again for each token, without a key-value cache.
        group: the process group that broadcasts the commands (default: the model-parallel group).
        log: receives notices.
        """
        super().__init__(model, group)
        self.tokenizer, self.log = tokenizer, log
        # Sequence parallelism splits the sequence over the ranks, and a single token cannot be split.
        self.recompute = recompute or model.sequence_parallel
        self.limit = model.config.max_position_embeddings

    def stream(self, continuations: Sequence[GenerationRequest]) -> Iterator[GeneratedToken]:
        """Generate all continuations and yield an event for each token. Closing the iterator stops the generation.

        A text does not depend on the rest of its batch, except for rounding. If a prompt is longer than the model's
        context, only its end is read. If a context is full, its second half is read again and generation continues.
        `log` receives a notice about each cut.
        """
        longest = max(max(1, len(c.prompt)) + c.sampling.max_new_tokens for c in continuations)
        with self.batch(len(continuations), longest) as batch:
            for c in continuations:
                batch.add(c)
            yield from batch.events()

    @contextlib.contextmanager
    def batch(self, rows: int, longest: int | None = None) -> "Iterator[ContinuousBatch]":
        """Make a batch of up to `rows` continuations. Only the driver calls this method, for one batch at a time.

        longest: the maximum length of a continuation with its prompt, in tokens (default: the model's context).
        """
        assert self.is_driver
        try:
            with inference(self.model):
                if not self.recompute:
                    self.new_cache(rows, min(self.limit, longest or self.limit))
                yield ContinuousBatch(self, rows)
        finally:
            self.cache = None


class ContinuousBatch:
    """A batch that continuations join and leave while it runs. Continuations wait in a queue for a free row.

    Between two decoding steps, the new prompts that are read have at most as many tokens as one full context. Running
    texts therefore never wait for long.
    """

    def __init__(self, generator: Generator, rows: int) -> None:
        self._generator, self._limit, self._tokenizer = generator, generator.limit, generator.tokenizer
        self._numbers = itertools.count()
        self._waiting: deque[GenerationRequest] = deque()
        self._size, self._notified = rows, False
        self._rows: dict[int, GenerationRequest] = {}  # {row of the cache: continuation in this row}

    def add(self, c: GenerationRequest) -> int:
        """Add a continuation, even while `events` runs. Return the number of the continuation (0, 1, 2, …), which its
        events carry."""
        if len(c.prompt) > self._limit:
            self._generator.log(
                f"notice: of a prompt of {len(c.prompt):,} tokens the last {self._limit:,} are read, "
                "the context of the model"
            )
        c.number, c.context = next(self._numbers), c.prompt[-self._limit :] or [self._tokenizer.bos]
        self._waiting.append(c)
        return c.number

    def events(self) -> Iterator[GeneratedToken]:
        """Generate until every added continuation has ended. The method may be called again after more continuations
        are added."""
        while self._waiting or self._rows:
            for c in [c for c in self._waiting if c.finish]:
                self._waiting.remove(c)
                yield GeneratedToken(c.number, finish=c.finish)
            newcomers = self._admit()
            if not self._generator.recompute:
                yield from self._read(newcomers)
            sources = self._compact()
            if self._generator.recompute:
                yield from self._read(range(len(sources)))
            elif sources:
                contexts = [c.context for c in self._rows.values()]
                last, positions = [context[-1] for context in contexts], [len(context) - 1 for context in contexts]
                yield from self._draw(range(len(sources)), self._generator.decode(last, positions, sources))

    def _admit(self) -> list[int]:
        """Give free rows of the cache to waiting continuations in the order of their arrival. Return the rows."""
        rows: list[int] = []
        width = 0
        for row in sorted(set(range(self._size)) - self._rows.keys())[: len(self._waiting)]:
            width = max(width, len(self._waiting[0].context))
            if rows and width * (len(rows) + 1) > self._limit:
                break
            self._rows[row] = self._waiting.popleft()
            rows.append(row)
        return rows

    def _compact(self) -> list[int]:
        """Move the running continuations to the first rows, with as few moves as possible. Return the previous row of
        each continuation."""
        used_rows = sorted(self._rows)
        sources = list(range(len(used_rows)))
        free = [row for row in sources if row not in self._rows]
        for row, source in zip(free, used_rows[len(used_rows) - len(free) :], strict=True):
            sources[row] = source
        self._rows = {row: self._rows[source] for row, source in enumerate(sources)}
        return sources

    def _read(self, rows: Sequence[int]) -> Iterator[GeneratedToken]:
        """Read the contexts of `rows`, and draw one token for each row."""
        if not rows:
            return
        texts = [self._rows[row] for row in rows]
        alternatives = max(c.sampling.alternatives * c.score_prompt for c in texts)
        scored = [c.score_prompt for c in texts]
        logits, scores = self._generator.prefill(
            [c.context for c in texts], rows, scored, min(alternatives, self._tokenizer.vocab_size)
        )
        prompt_scores = iter(scores.tolist())
        for c in texts:
            if c.score_prompt:
                c.set_prompt_scores(prompt_scores)
        yield from self._draw(rows, logits)

    def _draw(self, rows: Sequence[int], logits: Tensor) -> Iterator[GeneratedToken]:
        """Draw one token for each of `rows`, and remove finished continuations.

        logits: [b, v].
        """
        logits = logits[:, : self._tokenizer.vocab_size]
        totals = logits.logsumexp(1)
        for i, row in enumerate(rows):
            c = self._rows[row]
            event = c.next(logits[i], totals[i], self._tokenizer)
            if event.finish:
                del self._rows[row]
            elif len(c.context) > self._limit:
                half = max(1, self._limit // 2)
                if not self._notified:
                    self._generator.log(
                        f"notice: the context of {self._limit:,} tokens is full; the text continues from its "
                        f"last {half:,} tokens, each time that the context is full"
                    )
                self._notified = True
                del c.context[:-half]
                if not self._generator.recompute:  # The next read is that of the shortened context.
                    self._waiting.appendleft(self._rows.pop(row))
            yield event


class TextStream:
    """Turns the bytes of tokens into text. Unfinished characters, and text that may become a stop string, are kept
    back."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._stop = stop
        self._kept_back = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes, *, last: bool = False) -> str:
        """Add bytes and return the text that is now certain, up to the first stop string, which sets `stopped`.

        last: whether `data` is the end of the text.
        """
        text = self._kept_back + self._decoder.decode(data, last)
        ends = [index for string in self._stop if (index := text.find(string)) >= 0]
        if ends:
            self.stopped = True
            return text[: min(ends)]
        # If the text ends with the beginning of a stop string, keep this end back.
        sizes = (size for stop in self._stop for size in range(1, len(stop)) if text.endswith(stop[:size]))
        certain = len(text) - (0 if last else max(sizes, default=0))
        self._kept_back = text[certain:]
        return text[:certain]


def generate(model: GPT2Model, tokenizer: Tokenizer, continuations: Sequence[GenerationRequest]) -> None:
    """Generate all continuations. Every rank of the model-parallel group calls this function; the driver gets the
    results."""
    generator = Generator(model, tokenizer)
    if not generator.is_driver:
        return generator.execute_commands()
    with generator.driving():
        for _ in generator.stream(continuations):
            pass
