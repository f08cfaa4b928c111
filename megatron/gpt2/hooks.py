"""How an extension plugs into training: a subclass of `Hook`, which is loaded if its flag is given.

A run has a list of hooks, empty but for what its flags and its ranks ask for. The program calls each of them at the
places that `Hook` names; what a hook does not override does nothing. So the product imports no extension, and a run
without one of these flags loads none of its modules.

    class Grumbler(Hook):                                  # extensions/grumble.py
        def at_log(self, run, record):
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

# By the key of the flag: the module in megatron/gpt2/extensions and the class, which is made from the configuration.
EXTENSIONS = {
    "parallel.exact_layouts": "exact.hook:ExactLayouts",
    "train.check_replicas_interval": "watch.replicas:ReplicaCheck",
    "train.log_straggler": "watch.slow_ranks:LogStraggler",
    "train.rewind_on_spike": "watch.spikes:RewindOnSpike",
}
# Is loaded whatever the flags are, if it is installed. Without it a run says nothing about expected memory.
MEMORY_PLANNER = "plan.hook:MemoryPlan"

T = TypeVar("T")
Prepared = Any  # megatron.gpt2.train.setup.PreparedRun
Run = Any  # megatron.gpt2.train.run.Run


class StopRun(Exception):
    """A hook ends the run, on every rank after the same step. Its message is one line. Exit code 1."""


class Hook:
    """What can be changed in a run, and where it can be watched. Every rank calls every method at the same place.

    contiguous_samples: whether a data-parallel rank reads successive samples of a batch, not every n-th of them.
    splits_tied_gradient: whether the tied matrix has a bucket of its own, in which its gradient comes in two parts.
    """

    contiguous_samples = False
    splits_tied_gradient = False

    # Before the process group exists, and while the run is built:

    def check(self, config: Config, device: torch.device) -> None:
        """ValueError, in one line, if the run cannot be so on this device."""

    def decisions(self, prepared: Prepared) -> dict[str, str]:
        """What has to be the same on all ranks, by the words that an error has for it."""
        return {}

    def modules(self) -> mpu.Modules | None:
        """The layers, the head and the loss of which the model is made, in the place of `mpu.PLAIN_MODULES`."""

    def reducer(self, flat: Any, model: Any, parallel: mpu.ParallelState) -> Any:
        """A `GradientReducer` in the place of the one that the flags ask for. It also sets `model.tied_gradient`."""

    def squared_norm(self, device: torch.device) -> Callable[..., torch.Tensor] | None:
        """Takes the place of `mpu.squared_norm`, for the norm of all gradients."""

    # While it runs:

    def begin(self, run: Run) -> None:
        """The run is built, or continued; nothing is trained yet."""

    def start_rows(self, run: Run) -> list[tuple[str, str]]:
        """Rows (name, text) of the start table."""
        return []

    def start_lines(self, run: Run) -> list[str]:
        """Lines after the start table."""
        return []

    def before_step(self, run: Run) -> None:
        """A step begins."""

    def before_update(self, run: Run) -> None:
        """The gradients are summed over all ranks, and the optimizer is about to use them."""

    def after_step(self, run: Run) -> None:
        """The step is done and counted: it makes `run.progress.iteration`."""

    def before_save(self, run: Run) -> None:
        """The state is about to be saved."""

    def at_log(self, run: Run, record: Any) -> list[str]:
        """Lines for the log. record: the `IterationRecord` of the line before them."""
        return []

    def went_back(self, run: Run) -> bool:
        """After a log line: whether this hook has put the run back to an earlier iteration. It then calls `begin` of
        every hook."""
        return False

    def expected_memory(self, run: Run) -> int | None:
        """Bytes that the log's line about memory should show."""

    def explain_out_of_memory(self, prepared: Prepared) -> str | None:
        """The line in which a rank ends that has run out of memory."""

    def explains(self, run: Run, error: BaseException) -> bool:
        """Whether this hook has told the user why `error`, of a collective, ends the run, and has left the ranks."""
        return False

    def close(self, run: Run) -> None:
        """The run ends, or has failed. Waits for no other rank."""


def load_hooks(config: Config) -> list[Hook]:
    """The extensions that the flags ask for. ValueError, in one line, if one of them is not installed."""
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
    planner = _load(MEMORY_PLANNER)
    return [*hooks, planner(config)] if planner is not None else hooks


def _load(place: str) -> type | None:
    """The class at "module:class"; None if the module is not there."""
    module, name = place.split(":")
    path = f"megatron.gpt2.extensions.{module}"
    try:
        found: type = getattr(importlib.import_module(path), name)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise  # something else that the extension needs
        return None
    return found


def first(offers: Iterable[T | None]) -> T | None:
    """The first of the hooks' offers that is not None."""
    return next((offer for offer in offers if offer is not None), None)
