"""After too many skipped steps, run the last step again to find the first tensor that is not finite.

The micro-batches of the last step are still in memory, and a skipped step changes no weight. A run without skipped
steps does no extra work. Each rank checks its weights, the outputs of its layers, and the gradients of its
micro-batches before they are summed over ranks, because the sum would spread a value that is not finite to all ranks.
"""

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.dist.gathering import gather_strings
from megatron.gpt2.dist.ranks import format_ranks
from megatron.gpt2.monitor.incidents import FOLDER, rank_file_name
from megatron.gpt2.train.trainer import Trainer

PHASES = ("weight", "output", "gradient")  # The kinds of observed tensors, in the order of a step.
Observer = Callable[[str, str, Any], None]  # Called with phase, name and tensor; ignores other objects.


def find_first_not_finite(trainer: Trainer) -> str:
    """Run forward and backward of the last step again. Return a text that names the first tensor that is not finite, or
    "" if all tensors are finite. Every rank must call this function, which also writes the rank's norms and
    sample ids into a file in the folder of the incident log."""
    optimizer, buffer, folder = trainer.state.optimizer, trainer.state.buffer, trainer.context.save_directory / FOLDER
    optimizer.param_gather.finish_param_sync()
    seen: list[tuple[str, str]] = []  # (phase, name) of each observed tensor, in the order of the step.
    all_finite: list[Tensor] = []  # These tensors stay on the device, so that the host does not wait.

    def observe(phase: str, name: str, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            seen.append((phase, name))
            all_finite.append(torch.isfinite(tensor.detach()).all())

    for name, parameter in buffer.parameters.items():
        observe("weight", name, parameter)
    micro_batches = trainer.forward_backward.micro_batches
    with observe_tensors(trainer, observe):
        trainer.forward_backward(micro_batches)
        trainer.state.reducer.finish_grad_sync()
    first_here = None
    if False in (finite := torch.stack(all_finite).tolist()):
        phase, name = seen[slot := finite.index(False)]
        stage = trainer.parallel.pipeline_model_parallel_rank  # Backward starts at the last stage.
        first_here = [PHASES.index(phase), -stage if phase == "gradient" else stage, slot, phase, name]
    state = {
        "iteration": trainer.progress.iteration,
        "samples": [micro_batch["sample_ids"].tolist() for micro_batch in micro_batches],
        "loss_scale": optimizer.scaler.scale.item(),
        "learning_rate": optimizer.learning_rate.item(),
        "first": first_here and first_here[3:],
        "norms": {
            name: {"weight": _norm(parameter), "summed gradient": _norm(buffer.owned_grad(name))}
            for name, parameter in buffer.parameters.items()
        },
    }
    buffer.free_grads()
    path = folder / f"not_finite_{trainer.progress.iteration:07d}_{rank_file_name(trainer.parallel.rank)}.json"
    with contextlib.suppress(OSError):  # On a full disk, the run must still report the tensor.
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(state, indent=1, allow_nan=False))
    first_by_rank = [json.loads(text) for text in gather_strings(json.dumps(first_here))]
    if not any(first_by_rank):
        return ""
    *when, phase, name = min(filter(None, first_by_rank))
    ranks = [rank for rank, first in enumerate(first_by_rank) if first and first[:3] == when]
    words = f"the first such tensor is the {phase} of {name} on {format_ranks(ranks, trainer.hosts)}"
    trainer.incidents.note("not finite", words)
    return f"{words} (the state is in {folder}); "


@contextlib.contextmanager
def observe_tensors(trainer: Trainer, observe: Observer) -> Iterator[None]:
    """Inside the block, call `observe` for each output of a module and for each gradient that the reducer gets. The
    modules inside a compiled layer are not observed."""

    def observed(method: Callable[..., None], name: str, *gradients: Tensor) -> None:
        observe("gradient", name, gradients[-1])
        method(name, *gradients)

    reducer = trainer.state.reducer
    with contextlib.ExitStack() as hooks:
        for name, module in trainer.state.model.named_modules():
            if name:
                see = functools.partial(_observe_output, observe, name)
                hooks.enter_context(module.register_forward_hook(see))
        for method in ("add", "add_rows", "add_and_count"):
            setattr(reducer, method, functools.partial(observed, getattr(reducer, method)))
            hooks.callback(delattr, reducer, method)  # Deleting the attribute restores the class's method.
        yield


def _norm(tensor: Tensor) -> float | str:
    """Return the norm of `tensor` as a JSON value: "nan" or "inf" if it is not finite, because JSON has no NaN."""
    norm = tensor.float().norm().item()
    return norm if math.isfinite(norm) else str(norm)


def _observe_output(observe: Observer, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
    observe("output", name, output)
