"""A model that the ranks of a model-parallel group compute together. The first rank leads: it orders each computation.

The other ranks only follow its orders, so that all compute the same; an error that ends the leader ends them too.

Legend: b rows, s sequence, h hidden, v vocabulary without padding, p model-parallel size.
"""

import contextlib
import functools
import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import mpu
from megatron.gpt2.model.attention_backend import inference
from megatron.gpt2.model.gpt2 import GPT2Model

P = ParamSpec("P")
R = TypeVar("R")
ROWS = 1024  # of logits at a time: 200 MB in float32
_ERRORS = (ValueError, OSError, KeyboardInterrupt, RuntimeError)  # of the leader, by numbers; the last for any other


def _ordered(method: Callable[Concatenate["OrderedModel", P], R]) -> Callable[Concatenate["OrderedModel", P], R]:
    """A method that the leader calls and that every rank runs, with the leader's arguments. An interruption waits until
    all have done."""

    @functools.wraps(method)
    def call(self: "OrderedModel", /, *arguments: P.args, **named: P.kwargs) -> R:
        with contextlib.nullcontext() if self._orders is None else _interrupted_later():
            self._computing = True
            self._tell(method.__name__, *arguments)
            found: R = self._compute(method, *arguments)
            self._computing = False
        return found

    return call


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

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """At its end the other ranks return from `follow`; if an error of the leader leaves it, they raise it too.

        An error in the middle of a computation cannot be told to ranks that compute: the connection that is lost when
        the leader leaves ends them.
        """
        try:
            yield
        except BaseException as error:
            if not self._computing:
                kind = next((i for i, known in enumerate(_ERRORS) if isinstance(error, known)), len(_ERRORS) - 1)
                self._tell("end", kind, f"the first rank ended with {type(error).__name__}: {error}")
            raise
        self._tell("end")

    def follow(self) -> None:
        """Compute what the leader orders, until it ends. Raises what ended the leader: its kind of error, if that is a
        ValueError, an OSError or a KeyboardInterrupt, else a RuntimeError."""
        assert not self.leads
        with inference(self.model):
            while (order := self._tell())[0] != "end":
                self._compute(getattr(OrderedModel, order[0]).__wrapped__, *order[1:])
        self.cache = None
        if order[1:]:
            raise _ERRORS[order[1]](order[2])

    def _tell(self, *order: Any) -> tuple[Any, ...]:
        """Give an order, or take one; what the leader gave, on every rank."""
        if self._orders is None:
            return order
        # As JSON, in two broadcasts: broadcast_object_list takes three to five times as long.
        said = torch.frombuffer(bytearray(json.dumps(order, default=list).encode()), dtype=torch.uint8)
        size = self._broadcast(torch.tensor(said.numel()))
        said = self._broadcast(said if self.leads else torch.empty(int(size), dtype=torch.uint8))
        return tuple(json.loads(said.numpy().tobytes()))

    def _broadcast(self, numbers: Tensor) -> Tensor:
        """The leader's numbers, on the host."""
        numbers = numbers if dist.get_backend(self._orders) == "gloo" else numbers.to(self.device)
        dist.broadcast(numbers, mpu.get_model_parallel_src_rank(), group=self._orders)
        return numbers.cpu()

    @torch.inference_mode()
    def _compute(self, method: Callable[..., Any], *arguments: Any) -> Any:
        # A compiled layer would be compiled again for other lengths.
        with torch.compiler.set_stance("force_eager") if self.model.is_compiled else contextlib.nullcontext():
            return method(self, *arguments)

    @_ordered
    def new_cache(self, rows: int, capacity: int) -> None:
        """Make a key-value cache, in the place of an earlier one."""
        config = self.model.config
        self.cache = None  # first: there is no room for two
        self.cache = mpu.KeyValueCache(
            sum(map(len, self.model.chunks)),
            rows,
            config.num_attention_heads // self.model.world_size,
            capacity,
            config.hidden_size // config.num_attention_heads,
            dtype=next(self.model.parameters()).dtype,
            device=self.device,
        )

    @_ordered
    def step(self, tokens: Sequence[int], places: Sequence[int], sources: Sequence[int]) -> Tensor:
        """The logits after one more token of each of the first b texts, float32 [b, v]. places: of the tokens in their
        texts. sources: the row of the cache in which each text was before."""
        assert self.cache is not None
        for row, source in enumerate(sources):
            if source != row:
                self.cache.move(source, row)
        positions = self.cache.set_positions(places)
        new = torch.tensor(tokens).unsqueeze(1).to(self.device)
        return self._logits(self.model.hidden_states(new, positions, self.cache)[0])

    @_ordered
    def read(
        self, contexts: Sequence[Sequence[int]], rows: Sequence[int], scored: Sequence[bool], alternatives: int
    ) -> tuple[Tensor, Tensor]:
        """The logits after these contexts, float32 [b, v]. rows: of the cache, if there is one, that keep their keys
        and values. Also what `token_scores` gives for the contexts that are scored, one after the other."""
        lengths = torch.tensor([len(context) for context in contexts])
        width = padded = int(lengths.max())
        if self.cache is not None:
            self.cache.set_prompts(rows, width)
        elif self.model.sequence_parallel:  # the group must divide it; what is added comes after all that counts
            padded += -width % self.model.world_size
        tokens = torch.tensor([[*context, *[0] * (padded - len(context))] for context in contexts]).to(self.device)
        hidden = self.model.hidden_states(tokens, cache=self.cache)  # [s, b, h]
        scores = torch.empty(0)
        if any(scored):
            # The row of each token after the first, and its place - 1.
            to_score = torch.where(torch.tensor(scored), lengths, 1) - 1
            row, place = (torch.arange(width - 1) < to_score.unsqueeze(1)).nonzero().t().to(self.device)
            scores = token_scores(self.model, hidden[place, row], tokens[row, place + 1], alternatives)
        return self._logits(hidden[lengths.to(self.device) - 1, range(len(contexts))]), scores

    def _logits(self, hidden: Tensor) -> Tensor:
        """hidden [b, h] of the last tokens, on the last stage -> float32 [b, v] on every rank."""
        logits = mpu.gather_from_model_parallel_region(self.model.logits_on_every_stage(hidden))
        return logits[:, : self.model.vocab_size].float()


def token_scores(model: GPT2Model, hidden: Tensor, targets: Tensor, alternatives: int = 0) -> Tensor:
    """hidden [t, h], of `model.hidden_states`, targets [t] -> float64 [t, 2 + 2a], the same on every rank of the
    model-parallel group: ln p(target); 1 if the target is the likeliest id, of equal ones the lowest, else 0; the
    a = `alternatives` likeliest ids; and ln p of each."""
    scores = hidden.new_empty(len(hidden), 2 + 2 * alternatives, dtype=torch.float64)
    if model.has_head:
        for x, target, score_of in zip(hidden.split(ROWS), targets.split(ROWS), scores.split(ROWS), strict=True):
            logits = mpu.gather_from_model_parallel_region(model.logits(x))[:, : model.vocab_size].float()
            values, ids = logits.topk(alternatives)  # [t, a]
            known = torch.cat([logits.gather(1, target.unsqueeze(1)), values], dim=1)  # [t, 1 + a]
            known = (known - logits.logsumexp(1, keepdim=True)).double()
            hits = (logits.argmax(1) == target).unsqueeze(1)
            score_of.copy_(torch.cat([known[:, :1], hits, ids, known[:, 1:]], dim=1))
    return mpu.broadcast_from_last_stage(scores)


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """Inside it Ctrl-C waits for the end. Only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if arrived:
            signal.raise_signal(signal.SIGINT)


def untimed_group() -> dist.ProcessGroup | None:
    """A group of all ranks for orders, whose collectives have no time limit in practice; None in a world of one.

    It is of gloo on every device: a rank that waits sleeps, and no watchdog ends it.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(days=3650)) if dist.is_initialized() else None
