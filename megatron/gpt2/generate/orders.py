"""A model that the ranks of a model-parallel group compute together. The first rank leads: it orders each computation.

The other ranks only follow its orders, so that all compute the same; an error that ends the leader ends them too.

Legend: b rows, s sequence, h hidden, v vocabulary without padding, p model-parallel size.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import mpu
from megatron.gpt2.generate.scoring import token_scores
from megatron.gpt2.model.attention_backend import inference
from megatron.gpt2.model.gpt2 import GPT2Model

# What the leader orders: the end, another cache, whole contexts, one more token of each text.
_END, _CACHE, _CONTEXTS, _TOKENS = range(4)
_NO_TOKEN = -1
_ERRORS = (ValueError, OSError, KeyboardInterrupt, RuntimeError)  # of the leader's, by numbers; the last for any other


class _Order(NamedTuple):
    """kind; b rows of numbers that say more, and how many each has; likeliest tokens beside each one of a prompt that
    is scored."""

    kind: int
    b: int = 0
    width: int = 0
    alternatives: int = 0


class OrderedModel:
    """Computes what follows texts. The leader calls `read` and `step`, inside `leading`; the others call `follow`."""

    def __init__(self, model: GPT2Model, orders: dist.ProcessGroup | None = None) -> None:
        """orders: the group through which the leader gives orders (default: the model-parallel one)."""
        self.model = model
        self.leads = mpu.get_model_parallel_rank() == 0
        self.device = next(model.parameters()).device
        self.cache: mpu.KeyValueCache | None = None
        orders = orders if orders is not None else mpu.get_model_parallel_group()
        self._orders = orders if orders is not None and orders.size() > 1 else None
        self._computing = False

    def new_cache(self, rows: int, capacity: int) -> None:
        """On every rank, in the place of an earlier one."""
        self._command(_CACHE, [[rows, capacity]])

    def read(
        self, contexts: Sequence[Sequence[int]], rows: Sequence[int], scored: Sequence[bool], alternatives: int
    ) -> tuple[Tensor, Tensor]:
        """The logits after these contexts, float32 [b, v]. rows: of the cache, where there is one, that keep their keys
        and values. Of the contexts that are scored, one after the other, also what `token_scores` gives."""
        width = max(map(len, contexts))
        return self._command(
            _CONTEXTS,
            [
                [row, flag, *context, *[_NO_TOKEN] * (width - len(context))]
                for row, flag, context in zip(rows, scored, contexts, strict=True)
            ],
            alternatives,
        )

    def step(self, tokens: Sequence[int], places: Sequence[int], sources: Sequence[int]) -> Tensor:
        """The logits after one more token of each of the first b texts, float32 [b, v]. places: of the tokens in their
        texts. sources: the row of the cache in which each text was before."""
        return self._command(_TOKENS, [list(row) for row in zip(tokens, places, sources, strict=True)])[0]

    def _command(self, kind: int, numbers: list[list[int]], alternatives: int = 0) -> tuple[Tensor, Tensor]:
        """Compute on all ranks; an interruption waits until they have done."""
        rows = torch.tensor(numbers)
        with contextlib.nullcontext() if self._orders is None else _interrupted_later():
            self._computing = True
            found = self._compute(*self._tell(_Order(kind, rows.size(0), rows.size(1), alternatives), rows))
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
        self.cache = None
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
        """After an order: the logits, and the scores of the contexts that are scored."""
        if order.kind == _CACHE:
            self._make_cache(*rows[0].tolist())
            return torch.empty(0), torch.empty(0)
        # A compiled layer would be compiled again for other lengths.
        with torch.compiler.set_stance("force_eager") if self.model.is_compiled else contextlib.nullcontext():
            last, scores = self._read(order, rows) if order.kind == _CONTEXTS else (self._step(rows), torch.empty(0))
        logits = mpu.gather_from_model_parallel_region(self.model.logits_on_every_stage(last))
        return logits[:, : self.model.vocab_size].float(), scores

    def _make_cache(self, rows: int, capacity: int) -> None:
        config, p = self.model.config, self.model.world_size
        self.cache = None  # first: there is no room for two
        self.cache = mpu.KeyValueCache(
            sum(map(len, self.model.chunks)),
            rows,
            config.num_attention_heads // p,
            capacity,
            config.hidden_size // config.num_attention_heads,
            dtype=next(self.model.parameters()).dtype,
            device=self.device,
        )

    def _step(self, rows: Tensor) -> Tensor:
        """rows [b, 3] on the host -> [b, h]."""
        assert self.cache is not None
        tokens, places, sources = rows.unbind(1)
        for row, source in enumerate(sources.tolist()):
            if source != row:
                self.cache.move(source, row)
        positions = self.cache.set_positions(places.tolist())
        return self.model.hidden_states(tokens.unsqueeze(1).to(self.device), positions, self.cache)[0]

    def _read(self, order: _Order, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows [b, 2 + s] on the host -> [b, h] after the last token of each, and the scores."""
        into, scored, rows = rows[:, 0].tolist(), rows[:, 1] == 1, rows[:, 2:]
        follows = (rows[:, 1:] != _NO_TOKEN).nonzero().t()  # tokens after the first: their rows, and their places - 1
        last = (rows != _NO_TOKEN).sum(1) - 1
        if self.cache is not None:
            self.cache.set_prompts(into, rows.size(1))
        elif self.model.sequence_parallel:  # the group must divide it; what is added comes after all that counts
            rows = torch.nn.functional.pad(rows, (0, -rows.size(1) % self.model.world_size))
        tokens = rows.clamp(min=0).to(self.device)
        hidden = self.model.hidden_states(tokens, cache=self.cache)  # [s, b, h]
        row, place = follows[:, scored[follows[0]]].to(self.device)
        scores = (
            token_scores(self.model, hidden[place, row], tokens[row, place + 1], order.alternatives)
            if scored.any()
            else torch.empty(0)
        )
        return hidden[last.to(self.device), range(len(rows))], scores

    def _broadcast(self, numbers: Tensor) -> Tensor:
        """The leader's `numbers`, int64 on the host."""
        if self._orders is None or not numbers.numel():
            return numbers
        numbers = numbers if dist.get_backend(self._orders) == "gloo" else numbers.to(self.device)
        dist.broadcast(numbers, mpu.get_model_parallel_src_rank(), group=self._orders)
        return numbers.cpu()


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
