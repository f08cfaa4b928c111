"""Text from a trained model, token after token, of several continuations at once.

They begin and end one by one: between two token steps those that are over leave, and others are read into their places
(continuous batching: Yu et al., "Orca", OSDI 2022). The first rank of a model-parallel group draws the tokens.

Legend: b continuations that are computed, v vocabulary.
"""

import codecs
import collections.abc
import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from torch import Tensor

from data_utils import Tokenizer
from megatron.gpt2.generate.orders import OrderedModel
from megatron.gpt2.generate.sampling import Sampler, Sampling
from megatron.gpt2.model.attention_backend import inference
from megatron.gpt2.model.gpt2 import GPT2Model


class Continuation:
    """The text that follows `prompt`, an array of ids; an empty prompt begins a new document.

    ids: the new tokens so far, without the end-of-document token. finish: why it ended: "end" (of the document), "stop"
    (a stop string), "length" or "cancelled"; "" while it goes on. score_prompt: `prompt_tokens` gets the tokens of the
    prompt that are read, from the second on, before the first new token comes; their text is "".
    """

    def __init__(self, prompt: Sequence[int] | np.ndarray, sampling: Sampling, *, score_prompt: bool = False) -> None:
        self.prompt = [int(i) for i in prompt]
        self.sampling, self.score_prompt = sampling, score_prompt
        self.prompt_tokens: list[GeneratedToken] = []
        self.ids: list[int] = []
        self.finish = ""
        # Its number in the batch that computes it, and what is read there for its next token.
        self.number = -1
        self.context: list[int] = []
        self._text = TextStream(sampling.stop)
        self._sampler: Sampler | None = None  # made when the text begins: it may have memory of the device

    def cancel(self) -> None:
        """End it before its next token. May be called from any thread."""
        self.finish = self.finish or "cancelled"

    def next(self, logits: Tensor, total: Tensor, tokenizer: Tokenizer) -> "Event":
        """Draw the next token, or end. logits [v], total: their logsumexp."""
        wanted = self.sampling.max_new_tokens
        if not wanted:
            self.finish = self.finish or "length"
        if self.finish:
            return Finished(self.number, self.finish)
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

    def take_scores(self, scores: Iterator[list[float]]) -> None:
        """Make `prompt_tokens` of the next rows of `token_scores`, for at least as many alternatives as are asked for."""
        for token in self.context[1:]:
            own, _, *others = next(scores)
            middle = len(others) // 2
            likeliest = [(int(i), math.exp(value)) for i, value in zip(others[:middle], others[middle:], strict=True)]
            wanted = tuple(likeliest[: self.sampling.alternatives])
            self.prompt_tokens.append(GeneratedToken(self.number, token, math.exp(own), "", wanted))
        self.score_prompt = False  # once


@dataclass(frozen=True)
class GeneratedToken:
    """One new token of the continuation number `row`, with the text that is certain with it.

    text: may be empty, or hold characters of earlier tokens too. probability: of the token by the model itself, before
    penalty, temperature, top-k and top-p. likeliest: the `Sampling.alternatives` likeliest ids, each with its
    probability by the model itself. finish: why the continuation ends with this token; "" if it goes on.
    """

    row: int
    id: int
    probability: float
    text: str
    likeliest: tuple[tuple[int, float], ...] = ()
    finish: str = ""


@dataclass(frozen=True)
class Finished:
    """The continuation number `row` has ended without a further token: it asked for none, and its prompt was read
    (finish "length"), or it was cancelled."""

    row: int
    finish: str
    text: str = ""  # as a token has it


Event = GeneratedToken | Finished
EventStream = collections.abc.Generator[Event, None, None]


class Generator:
    """Continues prompts with `model`. The leader calls `stream` or `batch`, inside `leading`; the others `follow`."""

    def __init__(
        self,
        model: GPT2Model,
        tokenizer: Tokenizer,
        *,
        recompute: bool = False,
        orders: dist.ProcessGroup | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        """recompute: read the whole context for each token, without a key-value cache. orders: the group through which
        the leader gives orders (default: the model-parallel one). log: takes the notices.
        """
        self.model, self.tokenizer, self.log = OrderedModel(model, orders), tokenizer, log
        self.leads, self.leading, self.follow = self.model.leads, self.model.leading, self.model.follow
        # The ranks of sequence parallelism split the sequence, which a single token does not allow.
        self.recompute = recompute or model.sequence_parallel
        self.limit = model.config.max_position_embeddings

    def stream(self, continuations: Sequence[Continuation]) -> EventStream:
        """Draw token after token of all continuations until each has its `finish`; closing the iterator ends it too.

        Beyond rounding, a text does not depend on the others of its batch. A context that is full goes on with its
        second half, read anew, and of a prompt that is too long the end is read; `log` gets a notice of both.
        """
        longest = max(max(1, len(c.prompt)) + c.sampling.max_new_tokens for c in continuations)
        with self.batch(len(continuations), longest) as batch:
            for c in continuations:
                batch.add(c)
            yield from batch.events()

    @contextlib.contextmanager
    def batch(self, rows: int, longest: int | None = None) -> "Iterator[Batch]":
        """Computes up to `rows` continuations at once. longest: most tokens of any of them, with its prompt (default:
        the model's context). One batch at a time, on the first rank."""
        assert self.leads
        try:
            with inference(self.model.model):
                if not self.recompute:
                    self.model.new_cache(rows, min(self.limit, longest or self.limit))
                yield Batch(self, rows)
        finally:
            self.model.cache = None


class Batch:
    """Continuations that are computed together, each from its first token to its last; further ones wait.

    They begin in the order in which they were added. Between two token steps no more is read than a full context, so
    that the texts that have begun go on.
    """

    def __init__(self, generator: Generator, rows: int) -> None:
        self._generator, self._model, self._limit = generator, generator.model, generator.limit
        self._tokenizer = generator.tokenizer
        self._numbers = itertools.count()
        self._waiting: deque[Continuation] = deque()
        self._size, self._told = rows, False
        self._rows: dict[int, Continuation] = {}  # by their row in the cache

    def add(self, c: Continuation) -> int:
        """Gives the number that the events of `c` have: 0, 1, 2, … May be called while `events` runs."""
        if len(c.prompt) > self._limit:
            self._generator.log(
                f"notice: of a prompt of {len(c.prompt):,} tokens the last {self._limit:,} are read, "
                "which is the context of the model"
            )
        c.number, c.context = next(self._numbers), c.prompt[-self._limit :] or [self._tokenizer.start]
        self._waiting.append(c)
        return c.number

    def events(self) -> EventStream:
        """Draw token after token until every continuation that was added has ended. May be called again."""
        while self._waiting or self._rows:
            for c in [c for c in self._waiting if c.finish]:
                self._waiting.remove(c)
                yield Finished(c.number, c.finish)
            newcomers = self._admit()
            if not self._generator.recompute:
                yield from self._read(newcomers)
            sources = self._close_up()
            if self._generator.recompute:
                yield from self._read(range(len(sources)))
            elif sources:
                contexts = [c.context for c in self._rows.values()]
                last, places = [context[-1] for context in contexts], [len(context) - 1 for context in contexts]
                yield from self._draw(range(len(sources)), self._model.step(last, places, sources))

    def _admit(self) -> list[int]:
        """Give free rows to those that wait, the first ones first; returns these rows."""
        rows: list[int] = []
        width = 0
        for row in sorted(set(range(self._size)) - self._rows.keys())[: len(self._waiting)]:
            width = max(width, len(self._waiting[0].context))
            if rows and width * (len(rows) + 1) > self._limit:
                break
            self._rows[row] = self._waiting.popleft()
            rows.append(row)
        return rows

    def _close_up(self) -> list[int]:
        """Let the texts have the first rows, by the fewest moves; of each the row in which it was before."""
        taken = sorted(self._rows)
        sources = list(range(len(taken)))
        free = [row for row in sources if row not in self._rows]
        for row, source in zip(free, taken[len(taken) - len(free) :], strict=True):
            sources[row] = source
        self._rows = {row: self._rows[source] for row, source in enumerate(sources)}
        return sources

    def _read(self, rows: Sequence[int]) -> EventStream:
        """Read the contexts of these rows, and draw the next token of each."""
        if not rows:
            return
        texts = [self._rows[row] for row in rows]
        scored = [c.score_prompt for c in texts]
        alternatives = max((c.sampling.alternatives for c in texts if c.score_prompt), default=0)
        logits, scores = self._model.read(
            [c.context for c in texts], rows, scored, min(alternatives, self._tokenizer.vocab_size)
        )
        found = iter(scores.tolist())
        for c in texts:
            if c.score_prompt:
                c.take_scores(found)
        yield from self._draw(rows, logits)

    def _draw(self, rows: Sequence[int], logits: Tensor) -> EventStream:
        """Draw the next tokens of these rows, whose texts leave when they end. logits: [b, v]."""
        logits = logits[:, : self._tokenizer.vocab_size]
        totals = logits.logsumexp(1)
        for i, row in enumerate(rows):
            c = self._rows[row]
            event = c.next(logits[i], totals[i], self._tokenizer)
            if event.finish:
                del self._rows[row]
            elif len(c.context) > self._limit:
                half = max(1, self._limit // 2)
                if not self._told:
                    self._generator.log(
                        f"notice: the context of {self._limit:,} tokens is full; the text goes on with its "
                        f"last {half:,}, each time that it is"
                    )
                self._told = True
                del c.context[:-half]
                if not self._generator.recompute:  # it is read anew, before all that wait
                    self._waiting.appendleft(self._rows.pop(row))
            yield event


class TextStream:
    """Bytes of tokens in, text out: never half a character, and nothing of a stop string. It holds back the bytes of an
    unfinished character, and what may become a stop string."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._stop = stop
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes, *, last: bool = False) -> str:
        """The text that is certain once `data` has come; up to a stop string, and nothing after it.

        last: whether no more data comes. `stopped` is true from the first stop string on.
        """
        held = self._held + self._decoder.decode(data, last)
        found = [place for text in self._stop if (place := held.find(text)) >= 0]
        if found:
            self.stopped = True
            return held[: min(found)]
        # The longest end of the text with which a stop string begins may still become that string.
        sizes = (size for stop in self._stop for size in range(1, len(stop)) if held.endswith(stop[:size]))
        sure = len(held) - (0 if last else max(sizes, default=0))
        self._held = held[sure:]
        return held[:sure]


def generate(
    model: GPT2Model, tokenizer: Tokenizer, continuations: Sequence[Continuation], *, recompute: bool = False
) -> None:
    """Complete all continuations. Every rank of the model-parallel group calls it; the leader's are filled."""
    generator = Generator(model, tokenizer, recompute=recompute)
    if not generator.leads:
        return generator.follow()
    with generator.leading():
        for _ in generator.stream(continuations):
            pass
