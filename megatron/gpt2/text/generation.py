"""Text from a trained model, one token at a time, for several prompts at once.

The first rank of a model-parallel group leads: it knows the prompts, draws the tokens and orders each computation. The
other ranks only follow its orders, so that all compute the same; an error that ends the leader ends them too.

Legend: b continuations, s sequence, v padded vocabulary, p model-parallel size.
"""

import collections.abc
import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import mpu
from data_utils import Tokenizer
from megatron.gpt2.model.attention_backend import inference
from megatron.gpt2.model.gpt2 import GPT2Model
from megatron.gpt2.text.sampling import Sampler, Sampling
from megatron.gpt2.text.scoring import token_scores
from megatron.gpt2.text.text_stream import TextStream

# What the leader orders: the end, whole contexts, one more token of each.
_END, _CONTEXTS, _TOKENS = range(3)
_NO_TOKEN = -1
_ERRORS = (ValueError, OSError, KeyboardInterrupt, RuntimeError)  # of the leader's, by numbers; the last for any other


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

    def cancel(self) -> None:
        """End it before its next token. May be called from any thread."""
        self.finish = self.finish or "cancelled"


@dataclass(frozen=True)
class GeneratedToken:
    """One new token of the continuation number `row`, with the text that is certain with it.

    text: may be empty, or hold characters of earlier tokens too. probability: of the token by the model alone, before
    penalty, temperature, top-k and top-p. likeliest: the `Sampling.alternatives` likeliest ids, each with its
    probability by the model alone.
    """

    row: int
    id: int
    probability: float
    text: str
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Finished:
    """The continuation number `row` has ended without a further token: it asked for none. Its prompt was read."""

    row: int
    text: str = ""  # as a token has it


TokenStream = collections.abc.Generator[GeneratedToken | Finished, None, None]


class _Order(NamedTuple):
    """kind; b rows of numbers, and how many each has; capacity of the cache that is to be made, 0 for none; likeliest
    tokens beside each one of a prompt that is scored."""

    kind: int
    b: int = 0
    width: int = 0
    capacity: int = 0
    alternatives: int = 0


class Generator:
    """Continues prompts with `model`. The leader calls `stream`, inside `leading`; the others call `follow`."""

    def __init__(self, model: GPT2Model, tokenizer: Tokenizer, *, recompute: bool = False,
                 orders: dist.ProcessGroup | None = None, log: Callable[[str], None] = lambda line: None) -> None:
        """recompute: read the whole context for each token, without a key-value cache. orders: the group through which
        the leader gives orders (default: the model-parallel one). log: takes the notices.
        """
        self.model, self.tokenizer, self.log = model, tokenizer, log
        # The ranks of sequence parallelism split the sequence, which a single token does not allow.
        self.recompute = recompute or model.sequence_parallel
        self.leads = mpu.get_model_parallel_rank() == 0
        self.limit = model.config.max_position_embeddings
        self._device = next(model.parameters()).device
        orders = orders if orders is not None else mpu.get_model_parallel_group()
        self._orders = orders if orders is not None and orders.size() > 1 else None
        self._cache: mpu.KeyValueCache | None = None
        self._busy = self._computing = False

    def stream(self, continuations: Sequence[Continuation]) -> TokenStream:
        """Draw token after token of all continuations until each has its `finish`; closing the iterator ends it too.

        Beyond rounding, a text does not depend on the others beside it. A context that is full goes on with its second
        half, read anew, and of a prompt that is too long the end is read; `log` gets a notice of both.
        """
        assert self.leads and not self._busy, "one stream at a time, on the first rank"
        self._busy = True
        try:
            with inference(self.model):
                yield from self._stream(continuations)
        finally:
            self._busy, self._cache = False, None

    def _stream(self, continuations: Sequence[Continuation]) -> TokenStream:
        contexts = [self._fitting(c.prompt) for c in continuations]
        samplers = [Sampler(c.sampling, context, self.tokenizer.vocab_size, self._device)
                    for c, context in zip(continuations, contexts, strict=True)]
        texts = [TextStream(c.sampling.stop) for c in continuations]
        longest = max(len(context) + c.sampling.max_new_tokens
                      for c, context in zip(continuations, contexts, strict=True))
        capacity = 0 if self.recompute else min(self.limit, longest)
        logits, told = self._read(contexts, capacity, continuations), False
        for row, c in enumerate(continuations):
            if not c.sampling.max_new_tokens and not c.finish:
                c.finish = "length"
                yield Finished(row)
        while True:
            totals = logits.logsumexp(1)
            for row, c in enumerate(continuations):
                if not c.finish:
                    token, probability = samplers[row].draw(logits[row], totals[row])
                    contexts[row].append(token)
                    yield GeneratedToken(row, token, probability, self._take(c, token, texts[row]),
                                         samplers[row].likeliest(logits[row]))
                if c.finish:
                    del contexts[row][1:]  # computed along with the others, as cheaply as possible
            if all(c.finish for c in continuations):
                return
            full = [context for context in contexts if len(context) > self.limit]
            for context in full:
                if not told:
                    self.log(f"notice: the context of {self.limit:,} tokens is full; the text goes on with its last "
                             f"{self._half:,}, each time that it is")
                told = True
                del context[:-self._half]
            if full or self.recompute:
                logits = self._read(contexts, capacity)
            else:
                logits, _ = self._command(_Order(_TOKENS, len(contexts), 2),
                                          [[context[-1], len(context) - 1] for context in contexts])

    def _fitting(self, prompt: list[int]) -> list[int]:
        if len(prompt) > self.limit:
            self.log(f"notice: of a prompt of {len(prompt):,} tokens the last {self.limit:,} are read, which is the "
                     "context of the model")
        return prompt[-self.limit:] or [self.tokenizer.start]

    @property
    def _half(self) -> int:
        return max(1, self.limit // 2)

    def _take(self, c: Continuation, token: int, text: TextStream) -> str:
        """Add the token to the continuation; returns the text that is certain with it."""
        if token == self.tokenizer.eod:
            c.finish = c.finish or "end"
            return text.add(b"", last=True)
        c.ids.append(token)
        is_last = len(c.ids) == c.sampling.max_new_tokens
        certain = text.add(self.tokenizer.token_bytes[token], last=is_last)
        if text.stopped:
            c.finish = c.finish or "stop"
        elif is_last:
            c.finish = c.finish or "length"
        return certain

    def _read(self, contexts: Sequence[Sequence[int]], capacity: int,
              scored: Sequence[Continuation] = ()) -> Tensor:
        """scored: of each context the continuation, where those that ask for it get their `prompt_tokens`."""
        width = max(map(len, contexts))
        wanted = [c.score_prompt for c in scored] or [False] * len(contexts)
        alternatives = max((c.sampling.alternatives for c in scored if c.score_prompt), default=0)
        order = _Order(_CONTEXTS, len(contexts), 1 + width, capacity, min(alternatives, self.model.vocab_size))
        logits, scores = self._command(order, [[flag, *context, *[_NO_TOKEN] * (width - len(context))]
                                               for flag, context in zip(wanted, contexts, strict=True)])
        found = iter(scores.tolist())
        for row, (c, context) in enumerate(zip(scored, contexts, strict=False)):
            if c.score_prompt:
                c.prompt_tokens = [_scored(row, token, next(found), c.sampling.alternatives) for token in context[1:]]
        return logits

    def _command(self, order: _Order, numbers: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Compute on all ranks; an interruption waits until they have done."""
        rows = torch.tensor(numbers)
        with contextlib.nullcontext() if self._orders is None else _interrupted_later():
            self._computing = True
            found = self._compute(*self._tell(order, rows))
            self._computing = False
        return found

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """At its end the other ranks return from `follow`; where an error of the leader's leaves it, they raise it too.

        An error in the middle of a computation cannot be told to ranks that compute: the connection that is lost when
        the leader leaves ends them.
        """
        try:
            yield
        except BaseException as error:
            if not self._computing:
                kind = next((i for i, known in enumerate(_ERRORS) if isinstance(error, known)), len(_ERRORS) - 1)
                words = f"the first rank ended with {type(error).__name__}: {error}".encode(errors="replace")
                self._tell(_Order(_END, 1, 1 + len(words)), torch.tensor([[kind, *words]]))
            raise
        self._tell(_Order(_END), torch.empty(0, 0, dtype=torch.int64))

    def follow(self) -> None:
        """Compute what the leader orders, until it ends. Raises what ended the leader: its kind of error, where that is
        a ValueError, an OSError or a KeyboardInterrupt, else a RuntimeError."""
        assert not self.leads
        with inference(self.model):
            while True:
                order, rows = self._tell()
                if order.kind == _END:
                    break
                self._compute(order, rows)
        self._cache = None
        if rows.numel():
            kind, *words = rows.flatten().tolist()
            raise _ERRORS[kind](bytes(words).decode())

    def _tell(self, order: _Order | None = None, rows: Tensor | None = None) -> tuple[_Order, Tensor]:
        """Give an order with its rows of numbers, int64 on the host, or take one; what the leader gave, on every
        rank."""
        order = _Order(*self._broadcast(torch.tensor(order or _Order(_END))).tolist())
        return order, self._broadcast(torch.empty(order.b, order.width, dtype=torch.int64) if rows is None else rows)

    @torch.inference_mode()
    def _compute(self, order: _Order, rows: Tensor) -> tuple[Tensor, Tensor]:
        """After an order: the logits [b, vocabulary without padding] float32, and what `token_scores` gives of the
        prompts that are scored, one after the other."""
        # A compiled layer would be compiled again for other lengths.
        with torch.compiler.set_stance("force_eager") if self.model.is_compiled else contextlib.nullcontext():
            last, scores = self._last_hidden(order, rows)  # [b, h]
        logits = mpu.gather_from_model_parallel_region(self.model.logits_on_every_stage(last))
        return logits[:, :self.tokenizer.vocab_size].float(), scores

    def _last_hidden(self, order: _Order, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows on the host: a token and its place, or whether the row is scored and tokens filled up with _NO_TOKEN."""
        if order.kind == _TOKENS:
            assert self._cache is not None
            positions = self._cache.set_positions(rows[:, 1].tolist())
            return self.model.hidden_states(rows[:, :1].to(self._device), positions, self._cache)[0], torch.empty(0)
        scored, rows = rows[:, 0] == 1, rows[:, 1:]
        follows = (rows[:, 1:] != _NO_TOKEN).nonzero().t()  # tokens after the first: their rows, and their places - 1
        last = (rows != _NO_TOKEN).sum(1) - 1
        cache = None
        if order.capacity:
            config, p = self.model.config, self.model.world_size
            cache = self._cache = mpu.KeyValueCache(
                sum(map(len, self.model.chunks)), order.b, config.num_attention_heads // p, order.capacity,
                config.hidden_size // config.num_attention_heads, dtype=next(self.model.parameters()).dtype,
                device=self._device)
        elif self.model.sequence_parallel:  # the group must divide it; what is added comes after all that counts
            rows = torch.nn.functional.pad(rows, (0, -rows.size(1) % self.model.world_size))
        tokens = rows.clamp(min=0).to(self._device)
        hidden = self.model.hidden_states(tokens, cache=cache)  # [s, b, h]
        row, place = follows[:, scored[follows[0]]].to(self._device)
        scores = token_scores(self.model, hidden[place, row], tokens[row, place + 1], order.alternatives) \
            if scored.any() else torch.empty(0)
        return hidden[last.to(self._device), range(len(rows))], scores

    def _broadcast(self, numbers: Tensor) -> Tensor:
        """The leader's `numbers`, int64 on the host."""
        if self._orders is None or not numbers.numel():
            return numbers
        numbers = numbers if dist.get_backend(self._orders) == "gloo" else numbers.to(self._device)
        dist.broadcast(numbers, mpu.get_model_parallel_src_rank(), group=self._orders)
        return numbers.cpu()


def _scored(row: int, token: int, scores: list[float], alternatives: int) -> GeneratedToken:
    """scores: of `token_scores`, for at least so many alternatives."""
    ids, values = scores[1:len(scores) // 2 + 1], scores[len(scores) // 2 + 1:]
    likeliest = tuple((int(i), math.exp(value)) for i, value in zip(ids, values, strict=True))
    return GeneratedToken(row, token, math.exp(scores[0]), "", likeliest[:alternatives])


def generate(model: GPT2Model, tokenizer: Tokenizer, continuations: Sequence[Continuation], *,
             recompute: bool = False) -> None:
    """Complete all continuations. Every rank of the model-parallel group calls it; the leader's are filled."""
    generator = Generator(model, tokenizer, recompute=recompute)
    if not generator.leads:
        return generator.follow()
    with generator.leading():
        for _ in generator.stream(continuations):
            pass


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """Inside it Ctrl-C waits for the end. Signals come to the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def untimed_group() -> dist.ProcessGroup | None:
    """A group of all ranks for orders, whose collectives have no time limit in practice; None in a world of one.

    It is of gloo on every device: a rank that waits sleeps, and no watchdog ends it.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(days=3650)) if dist.is_initialized() else None
