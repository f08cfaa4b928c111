"""What chance shares between ranks, and activation checkpointing that repeats it.

    default generator   the same on the ranks of a model-parallel group: hidden and embedding dropout, where
                        activations are replicated
    tracker             different on every model-parallel rank: attention dropout, where heads differ

Both follow from the seed and the model-parallel rank alone, as in 2019: who wants other numbers on data-parallel ranks
gives them other seeds. Everything works on CPU and GPU alike; "cuda" in the names is 2019's.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from mpu.initialize import get_model_parallel_rank

MODEL_PARALLEL_RNG = "model-parallel-rng"
_TRACKER_OFFSET = 2718


def _on_gpu() -> bool:
    # A process that never touched its GPU draws on the CPU: asking for the state must not start CUDA.
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _get_state() -> Tensor:
    return torch.cuda.get_rng_state() if _on_gpu() else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    if _on_gpu():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


class RNGStatesTracker:
    """Named streams of random numbers; `fork(name)` draws from one and leaves the default generator untouched."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}

    def reset(self) -> None:
        self._states.clear()

    def get_states(self) -> dict[str, Tensor]:
        return {name: state.clone() for name, state in self._states.items()}

    def set_states(self, states: dict[str, Tensor]) -> None:
        self._states = {name: state.clone() for name, state in states.items()}

    def add(self, name: str, seed: int) -> None:
        if name in self._states:
            raise ValueError(f"the random stream {name!r} exists already")
        before = _get_state()
        if _on_gpu():
            torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        self._states[name] = _get_state()
        _set_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        if name not in self._states:
            raise KeyError(f"no random stream {name!r}: call mpu.model_parallel_cuda_manual_seed first")
        before = _get_state()
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _get_state()
            _set_state(before)


_tracker = RNGStatesTracker()


def get_cuda_rng_tracker() -> RNGStatesTracker:
    return _tracker


def tracker_in_use() -> RNGStatesTracker:
    """What `mpu.get_cuda_rng_tracker()` gives now. All of mpu asks here.

    A program may put another function in its place: the activation checkpointing of DeepSpeed repeats the states of its
    own tracker alone, so the masks must be drawn from that one. Hence the late look-up, in the package itself.
    """
    tracker: RNGStatesTracker = sys.modules["mpu"].get_cuda_rng_tracker()
    return tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default generator with `seed`, the tracker of this rank with `seed + 2718 + model-parallel rank`.

    The seeds are Megatron's of 2019: data-parallel ranks that pass the same one draw the same numbers.
    """
    torch.manual_seed(seed)
    tracker = tracker_in_use()
    tracker.reset()
    tracker.add(MODEL_PARALLEL_RNG, seed + _TRACKER_OFFSET + get_model_parallel_rank())


def dropout(x: Tensor, p: float) -> Tensor:
    """x with each element zeroed with probability p and the others raised by 1 / (1 - p).

    On a CPU torch draws a number of 64 bits for each element, in one thread; 16 bits of it decide here, so that one
    number serves four elements (0.5 M elements in bf16, forward and backward: 1.3 ms instead of 3.4). That is so with
    AVX2 as with AVX-512, and no choice by measuring: what a run draws must not depend on its processor. p is taken to
    the nearest 1/65536 below 1, and the factor is exactly that one's. torch.compile has its own generator.
    """
    if p == 0.0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    dropped = min(round(p * 65536), 65535)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None)
    kept = draws.view(torch.int16)[:x.numel()].view(x.shape) >= dropped - 32768
    return x * kept.to(x.dtype).mul_(65536 / (65536 - dropped))


@contextlib.contextmanager
def _tracker_states(states: dict[str, Tensor]) -> Iterator[None]:
    tracker = tracker_in_use()
    after = tracker.get_states()
    tracker.set_states(states)
    try:
        yield
    finally:
        tracker.set_states(after)


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, keeping the arguments alone and computing the rest again in backward.

    torch's non-reentrant checkpoint repeats the default generator; the tracker is repeated here, so that
    dropout drops the same elements both times. It stops recomputing at the last saved tensor, so what comes
    after it (a closing all-reduce without dropout) is not repeated.
    """
    states = tracker_in_use().get_states()
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False,
        context_fn=lambda: (contextlib.nullcontext(), _tracker_states(states)))
