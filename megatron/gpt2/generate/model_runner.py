"""Inference with a model that is split over the ranks of a model-parallel group.

The first rank is the driver, as in vLLM. The driver broadcasts a command for each forward pass, and the other ranks
execute the same command. An error that ends the driver also ends the other ranks.

Legend: b rows, s sequence, h hidden, v vocabulary without padding, tp tensor-parallel size.
"""

import contextlib
import functools
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import mpu
from megatron.gpt2.device import inference
from megatron.gpt2.model.gpt2 import GPT2Model

M = TypeVar("M", bound=Callable[..., Any])
ROWS = 1024  # The number of rows of logits that are computed at a time: 200 MB in float32.
# With the command "end", the driver sends the index of its error in this list. RuntimeError stands for all other
# exceptions.
_ERRORS = (ValueError, OSError, KeyboardInterrupt, RuntimeError)


def _on_all_ranks(method: M) -> M:
    """Let the driver's call of `method` run on every rank with the driver's arguments. Ctrl-C takes effect after the
    call."""

    @functools.wraps(method)
    def call(self: "ModelRunner", *arguments: Any) -> Any:
        with contextlib.nullcontext() if self._group is None else _delay_interrupt():
            self._executing = True
            self._broadcast_command(method.__name__, *arguments)
            result = self._execute(method, *arguments)
            self._executing = False
        return result

    return call  # type: ignore[return-value]


class ModelRunner:
    """Computes the logits of next tokens. The driver calls `prefill` and `decode` inside `driving`; the other ranks
    call `execute_commands`."""

    def __init__(self, model: GPT2Model, group: dist.ProcessGroup | None = None) -> None:
        """group: the group through which the driver sends commands (default: the model-parallel group)."""
        self.model = model
        self.is_driver = mpu.get_model_parallel_rank() == 0
        self.device = next(model.parameters()).device
        self.cache: mpu.KeyValueCache | None = None
        group = group if group is not None else mpu.get_model_parallel_group()
        self._group = group if group is not None and group.size() > 1 else None
        self._executing = False

    @contextlib.contextmanager
    def driving(self) -> Iterator[None]:
        """Let the other ranks return from `execute_commands` at the end of the block.

        If the block raises an error between forward passes, the other ranks raise the error, too. After an error inside
        a forward pass, the other ranks end when they lose the connection to the driver.
        """
        try:
            yield
        except BaseException as error:
            if not self._executing:
                kind = next((i for i, known in enumerate(_ERRORS) if isinstance(error, known)), len(_ERRORS) - 1)
                self._broadcast_command("end", kind, f"the first rank ended with {type(error).__name__}: {error}")
            raise
        self._broadcast_command("end")

    def execute_commands(self) -> None:
        """Execute the driver's commands until it sends "end".

        Raise an error that ended the driver as ValueError, OSError or KeyboardInterrupt, otherwise as RuntimeError.
        """
        assert not self.is_driver
        with inference(self.model):
            while (command := self._broadcast_command())[0] != "end":
                self._execute(getattr(ModelRunner, command[0]).__wrapped__, *command[1:])
        self.cache = None
        if command[1:]:
            raise _ERRORS[command[1]](command[2])

    def _broadcast_command(self, *command: Any) -> tuple[Any, ...]:
        """Send a command from the driver to all ranks. Every rank gets the driver's command as the result."""
        if self._group is None:
            return command
        # Broadcast the length and then the JSON text, because broadcast_object_list takes three to five times as long.
        data = torch.frombuffer(bytearray(json.dumps(command, default=list).encode()), dtype=torch.uint8)
        size = self._broadcast_tensor(torch.tensor(data.numel()))
        data = self._broadcast_tensor(data if self.is_driver else torch.empty(int(size), dtype=torch.uint8))
        return tuple(json.loads(data.numpy().tobytes()))

    def _broadcast_tensor(self, numbers: Tensor) -> Tensor:
        """Broadcast the driver's tensor `numbers`. Return the tensor on the CPU."""
        numbers = numbers if dist.get_backend(self._group) == "gloo" else numbers.to(self.device)
        dist.broadcast(numbers, mpu.get_model_parallel_src_rank(), group=self._group)
        return numbers.cpu()

    @torch.inference_mode()
    def _execute(self, method: Callable[..., Any], *arguments: Any) -> Any:
        # torch.compile would compile a layer again for every length.
        with torch.compiler.set_stance("force_eager") if self.model.is_compiled else contextlib.nullcontext():
            return method(self, *arguments)

    @_on_all_ranks
    def new_cache(self, rows: int, capacity: int) -> None:
        """Replace the key-value cache by an empty cache."""
        config = self.model.config
        self.cache = None  # Free the old cache first, because memory may not hold two caches.
        self.cache = mpu.KeyValueCache(
            sum(map(len, self.model.layer_ranges)),
            rows,
            config.num_attention_heads // self.model.tp_size,
            capacity,
            config.hidden_size // config.num_attention_heads,
            dtype=next(self.model.parameters()).dtype,
            device=self.device,
        )

    @_on_all_ranks
    def decode(self, tokens: Sequence[int], positions: Sequence[int], sources: Sequence[int]) -> Tensor:
        """Append one token to each of b texts and return the next logits, float32 [b, v].

        positions: the position of each token in its text.
        sources: the cache row that held each text before this step; the texts move to rows 0 to b - 1.
        """
        assert self.cache is not None
        for row, source in enumerate(sources):
            if source != row:
                self.cache.move(source, row)
        position_ids = self.cache.set_positions(positions)
        new = torch.tensor(tokens).unsqueeze(1).to(self.device)
        return self._logits(self.model.hidden_states(new, position_ids, self.cache)[0])

    @_on_all_ranks
    def prefill(
        self, contexts: Sequence[Sequence[int]], rows: Sequence[int], scored: Sequence[bool], alternatives: int
    ) -> tuple[Tensor, Tensor]:
        """Read whole contexts. Return the next logits, float32 [b, v], and the `token_scores` of the contexts that are
        `scored`, one context after the other.

        rows: the cache rows for the keys and values.
        """
        lengths = torch.tensor([len(context) for context in contexts])
        width = padded = int(lengths.max())
        if self.cache is not None:
            self.cache.set_prompts(rows)
        elif self.model.sequence_parallel:
            # Pad the contexts, because sequence parallelism needs a length that is a multiple of the group size.
            padded += -width % self.model.tp_size
        tokens = torch.tensor([[*context, *[0] * (padded - len(context))] for context in contexts]).to(self.device)
        hidden = self.model.hidden_states(tokens, cache=self.cache)  # [s, b, h]
        scores = torch.empty(0)
        if any(scored):
            counts = (lengths - 1) * torch.tensor(scored)
            scores = token_scores(self.model, hidden, tokens, lengths, counts, alternatives)
        return self._logits(hidden[lengths.to(self.device) - 1, range(len(contexts))]), scores

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the float32 logits [b, v] on every rank.

        hidden: [b, h], the hidden states of the last tokens; only those of the last pipeline stage are used.
        """
        logits = mpu.gather_from_model_parallel_region(self.model.logits_on_every_stage(hidden))
        return logits[:, : self.model.vocab_size].float()


def token_scores(
    model: GPT2Model, hidden: Tensor, tokens: Tensor, lengths: Tensor, counts: Tensor, alternatives: int = 0
) -> Tensor:
    """Score the last tokens of b texts. Return float64 [t, 2 + 2a] for the t tokens of all texts, equal on every rank
    of the model-parallel group. The columns are ln p(token); 1 if the token is the arg-max, else 0; the a =
    `alternatives` likeliest ids; ln p of each of these ids.

    hidden: [s, b, h], from `model.hidden_states`.
    tokens: [b, s] or more; padding is at the end.
    lengths: [b] on the CPU, the number of tokens of each text without padding.
    counts: [b] on the CPU, the number of tokens to score at the end of each text; the first token has no score.
    """
    at, last = torch.arange(tokens.size(1) - 1), lengths.unsqueeze(1) - 1
    # The row of each token to score, and the position of the token before it.
    rows, positions = ((at < last) & (at >= last - counts.unsqueeze(1))).nonzero().t().to(tokens.device)
    hidden, targets = hidden[positions, rows], tokens[rows, positions + 1]
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
def _delay_interrupt() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block. Only the main thread, which receives signals, may call
    `_delay_interrupt`."""
    arrived: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if arrived:
            signal.raise_signal(signal.SIGINT)


def new_command_group() -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks for commands, or None if `torch.distributed` is not initialized.

    The group's time limit is ten years, because the driver may wait for a request for days. With gloo a waiting rank
    sleeps, and no NCCL watchdog ends it.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(days=3650)) if dist.is_initialized() else None
