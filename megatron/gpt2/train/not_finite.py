"""Where numbers stop to be finite: after too many skipped steps the last one is run once more, and looked at.

Its micro-batches are there still, and a skipped step has changed no weight. So a run that is well pays nothing. Each
rank looks at its own weights, at what its layers return, and at the gradients of its own micro-batches, before they are
summed over ranks. Sums then spread what is not finite to all ranks; the first of all is where it comes from.
"""

import contextlib
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
Look = Callable[[str, str, Any], None]  # is given a phase, a name, and a tensor, or what is none


def explain(run: Run) -> str:
    """Run forward and backward of the last step again, and say where numbers first are not finite; empty if they are.
    Every rank calls it, and writes what it has into a file of its own beside the incidents."""
    optimizer, flat, folder = run.engine.optimizer, run.engine.flat, run.prepared.save_directory / FOLDER
    optimizer.gatherer.wait()
    seen: list[tuple[str, str, Tensor]] = []  # in order; whether it is finite stays on the device

    def look(phase: str, name: str, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            seen.append((phase, name, torch.isfinite(tensor.detach()).all()))

    for name, parameter in flat.parameters.items():
        look("weight", name, parameter)
    micro_batches = run.forward_backward.micro_batches
    with looking(run, look):
        run.forward_backward(micro_batches)
        run.engine.reducer.finish()
    finite = torch.stack([is_finite for *_, is_finite in seen]).tolist()
    place = finite.index(False) if False in finite else None
    found = None if place is None else [*seen[place][:2], place, run.parallel.pipeline_model_parallel_rank]
    state = {
        "iteration": run.progress.iteration,
        "samples": [micro_batch["samples"].tolist() for micro_batch in micro_batches],
        "loss_scale": optimizer.scaler.scale.item(),
        "learning_rate": optimizer.learning_rate.item(),
        "first": found and found[:2],
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
    words = _first_of_all([json.loads(text) for text in gather_texts(json.dumps(found))], run.hosts)
    run.incidents.note("not finite", words)
    return f"{words} (the state is in {folder}); " if words else ""


@contextlib.contextmanager
def looking(run: Run, look: Look) -> Iterator[None]:
    """Inside, `look` sees what the modules of the model return, and the gradients that the reducer is given, or
    autograd if it is torch's DDP. Layers that torch.compile has taken are seen from outside."""
    model, reducer = run.engine.model, run.engine.reducer
    hooks = [
        module.register_forward_hook(lambda module, args, out, name=name: look("output", name, out))
        for name, module in model.named_modules()
        if name
    ]
    methods = [name for name in ("add", "add_rows") if hasattr(reducer, name)]
    for method in methods:
        setattr(reducer, method, _seen(getattr(reducer, method), look))
    if not methods:
        hooks += [
            parameter.register_hook(lambda grad, name=name: look("gradient", name, grad))
            for name, parameter in model.named_parameters()
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for method in methods:
            delattr(reducer, method)  # the class's own again


def _seen(method: Callable[..., None], look: Look) -> Callable[..., None]:
    def see(name: str, *gradients: Tensor) -> None:
        look("gradient", name, gradients[-1])
        method(name, *gradients)

    return see


def _first_of_all(found: list[Any], hosts: dict[int, str]) -> str:
    """found: what each rank found first: None, or phase, name, place in its order and stage."""

    def order(first: tuple[str, str, int, int]) -> tuple[int, int, int]:
        phase, _, place, stage = first  # backward comes to the last stage first
        return PHASES.index(phase), -stage if phase == "gradient" else stage, place

    if not any(found):
        return ""
    earliest = min(filter(None, found), key=order)
    ranks = [rank for rank, first in enumerate(found) if first and order(first) == order(earliest)]
    what = "an output" if earliest[0] == "output" else f"a {earliest[0]}"
    return f"first of all {named(ranks, hosts)} had {what} of {earliest[1]} that was not"


def _norm(tensor: Tensor) -> float | str:
    """JSON has no NaN."""
    norm = tensor.double().norm().item()
    return norm if math.isfinite(norm) else str(norm)
