"""Faults of a rank's state and of its course, which it survives: what a run has to notice by itself.

Each is done to a `Run` just before a step. `KINDS` names them, as `injector.py` does those that end a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.gpt2.train import loop
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.train_step import train_step

Fault = Callable[[Run], None]


def nan(run: Run, name: str = "") -> None:
    """From now on the gradient of a parameter, or of the last one, holds a NaN on this rank."""
    parameters = dict(run.engine.model.named_parameters())
    parameter = parameters[name or list(parameters)[-1]]

    def poison(gradient: Tensor) -> Tensor:
        poisoned = gradient.clone()
        poisoned.view(-1)[0] = float("nan")
        return poisoned

    parameter.register_hook(poison)  # type: ignore[no-untyped-call]


def flip(run: Run, kind: str = "weight", name: str = "", element: int = 0, bit: int = 20) -> None:
    """One bit of a weight, a master or a moment is another one; by default of the largest that this rank has."""
    tensors = {"weight": {n: p.detach() for n, p in run.engine.model.named_parameters()}}.get(kind) or {
        state.name: state.values for state in run.engine.optimizer.tensors() if state.kind == kind
    }
    run.engine.gatherer.wait()
    values = tensors[name or max(tensors, key=lambda name: tensors[name].numel())].view(-1)
    bits = values.view(torch.int16 if values.element_size() == 2 else torch.int32)
    bits[element] ^= 1 << bit % (8 * values.element_size() - 1)


def break_weight(run: Run, name: str) -> None:
    """A weight is infinite, and its master too."""
    flat = run.engine.flat
    index, part, _ = flat.owned_part_of(name)
    flat.masters[index][part][0] = float("inf")
    flat.view(flat.params, name).view(-1)[0] = float("inf")


def spike(run: Run, steps: int = 1) -> None:
    """The next steps read noise."""
    read, left = run.data.to_device, [steps]

    def noisy(text: Tensor, samples: Tensor | None = None) -> Any:
        if left[0] > 0 and samples is not None:
            left[0] -= 1
            text = torch.randint_like(text, int(text.max()) + 1)
        return read(text, samples)

    mock.patch.object(run.data, "to_device", noisy).start()


def slow(run: Run, part: str = "forward", seconds: float = 0.2) -> None:
    """From now on a part of each step takes so much longer on this rank."""
    timer = run.timers(part)
    enter = type(timer).__enter__

    class Slow(type(timer)):  # type: ignore[misc]
        def __enter__(self) -> None:
            enter(self)
            time.sleep(seconds)

    timer.__class__ = Slow


def hang(run: Run) -> None:
    """The rank never comes back, and lives."""
    while True:
        time.sleep(3600)


KINDS: dict[str, Callable[..., None]] = {
    "nan": nan,
    "flip": flip,
    "break_weight": break_weight,
    "spike": spike,
    "slow": slow,
    "hang": hang,
}


def plant(kind: str, rank: int, iteration: int, **details: Any) -> None:
    """In the process of each rank, before its run begins: `rank` meets the fault before the step after `iteration`."""
    fault: Fault = partial(KINDS[kind], **details)

    waiting = [fault]

    def step(run: Run) -> None:
        if run.parallel.rank == rank and run.progress.iteration == iteration and waiting:
            waiting.pop()(run)  # once, though a run may come here again
        train_step(run)

    mock.patch.object(loop, "train_step", step).start()
