"""Finds where numbers stop being finite: after too many skipped steps the last one is run once more and watched.

Its micro-batches are still there, and a skipped step has changed no weight. So a healthy run pays nothing. Each rank
looks at its own weights, at the outputs of its layers, and at the gradients of its own micro-batches, before they are
summed over ranks. Sums then spread what is not finite to all ranks; the first of all is where it comes from.
"""

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.dist.gathering import gather_texts
from megatron.gpt2.dist.ranks import named
from megatron.gpt2.monitor.incidents import FOLDER, rank_name
from megatron.gpt2.train.run import Run

PHASES = ("weight", "output", "gradient")  # the order in which a step comes to them
Look = Callable[[str, str, Any], None]  # is given a phase, a name, and a tensor or something else, which it ignores


def explain(run: Run) -> str:
    """Run forward and backward of the last step again, and say where numbers first are not finite; empty if they are.
    Every rank calls it, and writes what it has into its own file in the folder of the incidents."""
    optimizer, flat, folder = run.engine.optimizer, run.engine.flat, run.prepared.save_directory / FOLDER
    optimizer.gatherer.wait()
    seen: list[tuple[str, str]] = []  # in order
    all_finite: list[Tensor] = []  # stays on the device

    def look(phase: str, name: str, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            seen.append((phase, name))
            all_finite.append(torch.isfinite(tensor.detach()).all())

    for name, parameter in flat.parameters.items():
        look("weight", name, parameter)
    micro_batches = run.forward_backward.micro_batches
    with looking(run, look):
        run.forward_backward(micro_batches)
        run.engine.reducer.finish()
    found = None
    if False in (finite := torch.stack(all_finite).tolist()):
        phase, name = seen[place := finite.index(False)]
        stage = run.parallel.pipeline_model_parallel_rank  # backward comes to the last stage first
        found = [PHASES.index(phase), -stage if phase == "gradient" else stage, place, phase, name]
    state = {
        "iteration": run.progress.iteration,
        "samples": [micro_batch["samples"].tolist() for micro_batch in micro_batches],
        "loss_scale": optimizer.scaler.scale.item(),
        "learning_rate": optimizer.learning_rate.item(),
        "first": found and found[3:],
        "norms": {
            name: {"weight": _norm(parameter.detach()), "summed gradient": _norm(flat.owned_grad(name))}
            for name, parameter in flat.parameters.items()
        },
    }
    flat.free_grads()
    path = folder / f"not_finite_{run.progress.iteration:07d}_{rank_name(run.parallel.rank)}.json"
    with contextlib.suppress(OSError):  # a full disk must not hide the reason
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(state, indent=1))
    of_ranks = [json.loads(text) for text in gather_texts(json.dumps(found))]
    if not any(of_ranks):
        return ""
    *when, phase, name = min(filter(None, of_ranks))
    ranks = [rank for rank, first in enumerate(of_ranks) if first and first[:3] == when]
    what = "an output" if phase == "output" else f"a {phase}"
    words = f"first of all {named(ranks, run.hosts)} had {what} of {name} that was not"
    run.incidents.note("not finite", words)
    return f"{words} (the state is in {folder}); "


@contextlib.contextmanager
def looking(run: Run, look: Look) -> Iterator[None]:
    """Inside, `look` sees what the modules of the model return, and the gradients that the reducer is given, or
    autograd if it is torch's DDP. Layers that torch.compile has taken are seen from outside."""
    model, reducer = run.engine.model, run.engine.reducer
    methods = [name for name in ("add", "add_rows") if hasattr(reducer, name)]
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                see = functools.partial(_see_output, look, name)
                hooks.enter_context(module.register_forward_hook(see))
        for method in methods:
            setattr(reducer, method, _seen(getattr(reducer, method), look))
            hooks.callback(delattr, reducer, method)  # the class's own again
        for name, parameter in model.named_parameters() if not methods else ():
            hooks.enter_context(parameter.register_hook(functools.partial(look, "gradient", name)))
        yield


def _see_output(look: Look, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
    look("output", name, output)


def _seen(method: Callable[..., None], look: Look) -> Callable[..., None]:
    def see(name: str, *gradients: Tensor) -> None:
        look("gradient", name, gradients[-1])
        method(name, *gradients)

    return see


def _norm(tensor: Tensor) -> float | str:
    """JSON has no NaN."""
    norm = tensor.double().norm().item()
    return norm if math.isfinite(norm) else str(norm)
