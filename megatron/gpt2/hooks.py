"""Extensions of training: an extension is a subclass of `Hook`, which is loaded if its flag is given.

A run has a list of hooks. The program calls the methods of `Hook` at fixed points of a run; by default they do nothing.
So the program imports no extension, and a run without an extension's flag loads none of its modules.

    class Grumbler(Hook):                                  # extensions/grumble.py
        def on_log(self, trainer, record):
            return ["WARNING: the loss is high"] if record.lm_loss > 4 else []

    EXTENSIONS["train.grumble"] = "grumble:Grumbler"       # the flag's section and name
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

import mpu
from megatron.gpt2.config import Config, flag

# Key of the flag -> "module:class" in megatron/gpt2/extensions. The constructor takes the configuration.
EXTENSIONS = {
    "parallel.exact_layouts": "exact.hook:ExactLayouts",
    "train.check_replicas_interval": "watch.replicas:ReplicaCheck",
    "train.eval_tasks": "eval_tasks:EvalTasks",
    "train.log_straggler": "watch.stragglers:LogStraggler",
    "train.rewind_on_spike": "watch.spikes:RewindOnSpike",
}
# This extension is always loaded if it is installed. Without it, a run does not print its expected memory.
MEMORY_PLAN = "plan.hook:MemoryPlan"

T = TypeVar("T")
RunContext = Any  # megatron.gpt2.train.setup.RunContext
Trainer = Any  # megatron.gpt2.train.trainer.Trainer


class StopRun(Exception):
    """Ends the run, on every rank after the same step. The message is one line; the exit code is 1."""


class Hook:
    """Base class of extensions, which change or observe a run. Every rank calls every method at the same point.

    contiguous_samples: whether a data-parallel rank reads successive samples of a batch instead of every n-th sample.
    splits_tied_gradient: whether the tied matrix has a separate bucket, in which its gradient is summed in two parts.
    """

    contiguous_samples = False
    splits_tied_gradient = False

    # Before the process group exists, and while the run is built:

    def check(self, config: Config, device: torch.device) -> None:
        """Raise ValueError with a one-line message if this extension cannot work with the flags or the device."""

    def must_match(self, context: RunContext) -> dict[str, str]:
        """Return settings that must be equal on all ranks, by the name that an error message uses."""
        return {}

    def submodules(self) -> mpu.TransformerLayerSubmodules | None:
        """Return the layer, head and loss classes of the model, which replace `mpu.DEFAULT_SUBMODULES`, or None."""

    def reducer(self, buffer: Any, model: Any, parallel: mpu.ParallelState) -> Any:
        """Return a `BucketReducer` that replaces the default one, or None. It must also set `model.tied_grad_hook`."""

    def squared_norm(self, device: torch.device) -> Callable[..., torch.Tensor] | None:
        """Return a function that replaces `mpu.squared_norm` for the norm of all gradients, or None."""

    # While it runs:

    def begin(self, trainer: Trainer) -> None:
        """Called when the run is built or resumed, before the first step."""

    def start_rows(self, trainer: Trainer) -> list[tuple[str, str]]:
        """Return rows (name, text) of the start table."""
        return []

    def start_lines(self, trainer: Trainer) -> list[str]:
        """Return lines to print after the start table."""
        return []

    def before_step(self, trainer: Trainer) -> None:
        """Called before a step."""

    def before_update(self, trainer: Trainer) -> None:
        """Called when the gradients are summed over all ranks, before the optimizer uses them."""

    def after_step(self, trainer: Trainer) -> None:
        """Called after a step. `trainer.progress.iteration` already counts it."""

    def on_evaluation(self, trainer: Trainer) -> None:
        """Called when the validation loss is due: every --eval-interval iterations, and at the end of training."""

    def before_save(self, trainer: Trainer) -> None:
        """Called before a checkpoint is saved."""

    def on_log(self, trainer: Trainer, record: Any) -> list[str]:
        """Return lines to print after a log line. record: the `IterationRecord` of the log line."""
        return []

    def rewound(self, trainer: Trainer) -> bool:
        """Called after each step. Return whether this hook has rewound the run to an earlier iteration. The hook then
        also calls `begin` of every hook."""
        return False

    def expected_memory(self, trainer: Trainer) -> int | None:
        """Return the bytes of memory that the run is expected to use, or None. The log prints them once."""

    def explain_out_of_memory(self, context: RunContext) -> str | None:
        """Return the error line of a rank that has run out of memory, or None."""

    def handle_error(self, trainer: Trainer, error: BaseException) -> bool:
        """Called with the error of a failed collective. Return whether this hook has printed the reason and has left
        the process group."""
        return False

    def close(self, trainer: Trainer) -> None:
        """Called when the run ends or has failed. It must not wait for other ranks."""


def load_hooks(config: Config) -> list[Hook]:
    """Load the extensions that the flags choose. Raises ValueError with a one-line message if one is not installed."""
    hooks = []
    for key, place in EXTENSIONS.items():
        section, name = key.split(".")
        if getattr(getattr(config, section), name):
            if (extension := _load(place)) is None:
                raise ValueError(
                    f"{flag(key)} needs megatron.gpt2.extensions.{place.split(':')[0]}, which is not installed: "
                    "install it, or leave the flag out"
                )
            hooks.append(extension(config))
    planner = _load(MEMORY_PLAN)
    return [*hooks, planner(config)] if planner is not None else hooks


def _load(place: str) -> type | None:
    """Return the class "module:class", or None if the module is not installed."""
    module, name = place.split(":")
    path = f"megatron.gpt2.extensions.{module}"
    try:
        found: type = getattr(importlib.import_module(path), name)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise  # a library of the extension is missing
        return None
    return found


def first_not_none(offers: Iterable[T | None]) -> T | None:
    """Return the first value that is not None, or None."""
    return next((offer for offer in offers if offer is not None), None)
