"""Extensions of training: an extension is a subclass of `Hook`, like a `TrainerCallback` of Hugging Face.

The program calls the methods of `Hook` at fixed points of a run; by default they do nothing. No other file of the
program imports an extension. `load_hooks` imports an extension if its flag is given, and `MemoryPlan` always.
`HangDetector` (dist/hang.py) is a hook, but not an extension. An example of an extension with its three parts:

    class Grumbler(Hook):  # a new file, extensions/grumble.py
        def __init__(self, config):
            self._limit = config.train.grumble

        def on_log(self, trainer, record):
            return ["WARNING: the loss is high"] if (record.lm_loss or 0) > self._limit else []

    grumble: float | None = flag_field(None, "warn about losses above this")  # in TrainConfig, config/sections.py

    EXTENSIONS["train.grumble"] = "grumble:Grumbler"  # an entry of the dictionary below
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch

import mpu
from megatron.gpt2.config import Config, flag_name, flatten_sections

if TYPE_CHECKING:
    from megatron.gpt2.model.gpt2 import GPT2Model
    from megatron.gpt2.monitor.log_lines import IterationRecord
    from megatron.gpt2.optimizer.bucket_reducer import BucketReducer
    from megatron.gpt2.optimizer.param_and_grad_buffer import ParamAndGradBuffer
    from megatron.gpt2.train.setup import RunContext
    from megatron.gpt2.train.trainer import Trainer

# {"section.field" of a flag: "module:class" of its extension in megatron/gpt2/extensions}. The constructor of the class
# takes the configuration.
EXTENSIONS = {
    "parallel.exact_layouts": "exact.hook:ExactLayouts",
    "train.check_replicas_interval": "watch.replicas:ReplicaCheck",
    "train.eval_tasks": "eval_tasks:EvalTasks",
    "train.log_straggler": "watch.stragglers:LogStraggler",
    "train.rewind_on_spike": "watch.spikes:RewindOnSpike",
}
# This extension computes the expected memory of a run. Every run loads the extension if it is installed.
MEMORY_PLAN = "plan.hook:MemoryPlan"

T = TypeVar("T")
P = ParamSpec("P")


class StopRun(Exception):
    """Raised on every rank after the same step to end the run with exit code 1. Its message must be one line."""


class Numerics(NamedTuple):
    """The parts of a run that decide in which order numbers are summed. The defaults are those of a run without hooks.

    submodules: the layer, head and loss classes of the model.
    build_reducer: a function that sets `model.tied_grad_sink` and returns the gradient reducer (default:
        `train_state.build_reducer`).
    squared_norm: a function with the signature of `mpu.all_reduced_squared_norm`.
    contiguous_samples: whether the micro-batches of a data-parallel rank are successive; otherwise ranks take turns.
    separate_tied_bucket: whether the tied matrix has a separate bucket, as it always has with a pipeline.
    batch_matrices: whether a GPU orthogonalizes several matrices together (--optimizer muon).
    """

    submodules: mpu.ModelSubmodules = mpu.DEFAULT_SUBMODULES
    build_reducer: Callable[[ParamAndGradBuffer, GPT2Model, mpu.ParallelState], BucketReducer] | None = None
    squared_norm: Callable[..., torch.Tensor] = mpu.all_reduced_squared_norm
    contiguous_samples: bool = False
    separate_tied_bucket: bool = False
    batch_matrices: bool = True


class ExpectedMemory(NamedTuple):
    """The memory that a run is expected to need.

    rows: rows of the start table, (name, text).
    lines: lines to print after the start table.
    peak: the expected peak of this rank in bytes, which is printed after the first log line. None if the peak is
        unknown.
    """

    rows: list[tuple[str, str]]
    lines: list[str]
    peak: int | None


class Hook:
    """Base class of extensions, which change or observe a run. Every rank calls every method at the same point, except
    `explain_out_of_memory`, `handle_error` and, after an error, `on_train_end`."""

    # The methods below are called before the process group exists, and while the run is built:

    def validate(self, config: Config, device: torch.device) -> None:
        """Raise ValueError with a one-line message if this extension cannot work with the flags or the device."""

    def settings_equal_on_all_ranks(self, context: RunContext) -> dict[str, str]:
        """Return {name for an error message: setting} of settings that must be equal on all ranks."""
        return {}

    def numerics(self, device: torch.device) -> Numerics | None:
        """Return classes and functions with a fixed order of sums, which replace the usual ones, or None."""

    # The methods below are called while the run trains, those of one step in this order:

    def on_train_begin(self, trainer: Trainer) -> None:
        """Called before the first step of a run, and after each rewind."""

    def on_step_begin(self, trainer: Trainer) -> None:
        """Called before each step."""

    def on_pre_optimizer_step(self, trainer: Trainer) -> None:
        """Called before the optimizer step. The gradients are summed over the ranks of all groups and still multiplied
        by the loss scale. With a sharded optimizer, this rank has only its shard of the gradients."""

    def on_step_end(self, trainer: Trainer) -> None:
        """Called after each step. `trainer.progress.iteration` already counts this step."""

    def on_log(self, trainer: Trainer, record: IterationRecord) -> list[str]:
        """Called after each log line. Return further lines to print.

        record: the numbers of the log line.
        """
        return []

    def maybe_rewind(self, trainer: Trainer) -> bool:
        """Called after each step. Return whether this hook has called `Trainer.rewind`."""
        return False

    def on_evaluate(self, trainer: Trainer) -> None:
        """Called every --eval-interval iterations and at the end, before the validation loss is computed; also if
        --eval-iters is 0."""

    def on_save(self, trainer: Trainer) -> None:
        """Called before a checkpoint is saved. With --keep-best also called after evaluations that save none."""

    def expected_memory(self, trainer: Trainer) -> ExpectedMemory | None:
        """Return the memory that the run is expected to need, or None."""

    def explain_out_of_memory(self, context: RunContext) -> str | None:
        """Return the error line of a rank that has run out of memory, or None."""

    def handle_error(self, trainer: Trainer, error: BaseException) -> bool:
        """Called with the error of a failed collective. Return whether this hook has printed the reason and has left
        the rendezvous."""
        return False

    def on_train_end(self, trainer: Trainer) -> None:
        """Called when the run ends or has failed. The method must not wait for other ranks."""


class Hooks(list[Hook]):
    """The hooks of a run."""

    def call(self, method: Callable[Concatenate[Hook, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call a method, for example `Hook.on_log`, of every hook. Return the results."""
        return [getattr(hook, method.__name__)(*args, **kwargs) for hook in self]

    def first_result(
        self, method: Callable[Concatenate[Hook, P], T | None], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Call a method of every hook. Return the first result that is not None, or None if every result is None."""
        return next((result for result in self.call(method, *args, **kwargs) if result is not None), None)


def load_hooks(config: Config) -> Hooks:
    """Load the extensions that the flags choose. Raises ValueError with a one-line message if an extension is not
    installed."""
    hooks, values = Hooks(), flatten_sections(config.as_dict())
    for key, target in EXTENSIONS.items():
        if values[key]:
            if (extension := _load(target)) is None:
                raise ValueError(
                    f"{flag_name(key)} needs megatron.gpt2.extensions.{target.split(':')[0]}, which is not installed: "
                    "install it, or leave the flag out"
                )
            hooks.append(extension(config))
    if (memory_plan := _load(MEMORY_PLAN)) is not None:
        hooks.append(memory_plan(config))
    return hooks


def _load(target: str) -> Callable[[Config], Hook] | None:
    """Return the class "module:class", or None if the module is not installed."""
    module, name = target.split(":")
    path = f"megatron.gpt2.extensions.{module}"
    try:
        extension: Callable[[Config], Hook] = getattr(importlib.import_module(path), name)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise  # The extension is installed, but a library that it needs is not.
        return None
    return extension
