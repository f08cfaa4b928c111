"""Where numbers stop to be finite: after too many skipped steps the last one is run once more, and looked at.

Its micro-batches are there still, and a skipped step has changed no weight. So a run that is well pays nothing. Each
rank looks at its own weights, at what its layers return, and at the gradients of its own micro-batches, before they are
summed over ranks. Sums then spread what is not finite to all ranks; the first of all is where it comes from.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mpu
from megatron.gpt2.dist.gathering import gather_texts
from megatron.gpt2.dist.ranks import named
from megatron.gpt2.monitor.incidents import FOLDER, rank_name
from megatron.gpt2.optimizer.optimizer import AdamWOptimizer

PHASES = ("weight", "output", "gradient")  # the order in which a step comes to them


class Looker:
    """Notes, in order, whether what passes is finite; on the device."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, str, Tensor]] = []

    def look(self, phase: str, name: str, tensor: Any) -> None:
        """tensor: anything; what is no floating-point tensor is passed over."""
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            self._seen.append((phase, name, torch.isfinite(tensor.detach()).all()))

    def first(self) -> tuple[str, str, int] | None:
        """Phase, name and place in the order of the first that was not finite. It waits for the device."""
        if self._seen:
            finite = torch.stack([flag for _, _, flag in self._seen]).tolist()
            for place, ((phase, name, _), is_finite) in enumerate(zip(self._seen, finite, strict=True)):
                if not is_finite:
                    return phase, name, place
        return None


@contextlib.contextmanager
def looking(model: nn.Module, reducer: Any, looker: Looker) -> Iterator[None]:
    """Inside, `looker` sees what the modules of `model` return, and the gradients that `reducer` is given, or autograd
    where it is torch's DDP. Layers that torch.compile has taken are seen from outside."""
    hooks = [
        module.register_forward_hook(lambda module, args, out, name=name: looker.look("output", name, out))
        for name, module in model.named_modules()
        if name
    ]
    methods = [name for name in ("add", "add_rows") if hasattr(reducer, name)]
    for method in methods:
        setattr(reducer, method, _seen(getattr(reducer, method), looker))
    if not methods:
        hooks += [
            parameter.register_hook(lambda grad, name=name: looker.look("gradient", name, grad))
            for name, parameter in model.named_parameters()
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for method in methods:
            delattr(reducer, method)  # the class's own again


def _seen(method: Callable[..., None], looker: Looker) -> Callable[..., None]:
    def see(name: str, *gradients: Tensor) -> None:
        looker.look("gradient", name, gradients[-1])
        method(name, *gradients)

    return see


def explain(
    run_again: Callable[[], object],
    *,
    model: nn.Module,
    reducer: Any,
    optimizer: AdamWOptimizer,
    parallel: mpu.ParallelState,
    hosts: Mapping[int, str],
    save_directory: Path,
    facts: Mapping[str, Any],
) -> str:
    """Run forward and backward of the last step again, and say where numbers first are not finite; empty where they
    are. Every rank calls it, and writes what it has into a file of its own beside the incidents, with `facts`.

    run_again: leaves the gradients' sums in the buffers of `optimizer.flat`.
    """
    optimizer.gatherer.wait()
    looker, flat = Looker(), optimizer.flat
    for name, parameter in flat.parameters.items():
        looker.look("weight", name, parameter)
    with looking(model, reducer, looker):
        run_again()
    first = looker.first()
    norms = {
        name: {"weight": _number(parameter.detach()), "summed gradient": _number(flat.owned_grad(name))}
        for name, parameter in flat.parameters.items()
    }
    flat.free_grads()
    state = {
        **facts,
        "loss_scale": optimizer.scaler.scale.item(),
        "learning_rate": optimizer.learning_rate.item(),
        "first": first[:2] if first else None,
        "norms": norms,
    }
    path = save_directory / FOLDER / f"not_finite_{facts['iteration']:07d}_{rank_name(parallel.rank)}.json"
    with contextlib.suppress(OSError):  # a full disk must not hide the reason
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(state, indent=1))
    return _first_of_all(
        gather_texts(json.dumps(first and [*first, parallel.pipeline_model_parallel_rank]), flat.params.device), hosts
    )


def _first_of_all(texts: Sequence[str], hosts: Mapping[int, str]) -> str:
    """texts: what each rank found first, as JSON: null, or phase, name, place in its order and stage."""
    found = [(rank, *json.loads(text)) for rank, text in enumerate(texts) if text != "null"]

    def order(entry: tuple[int, str, str, int, int]) -> tuple[int, int, int]:
        _, phase, _, place, stage = entry  # backward comes to the last stage first
        return PHASES.index(phase), -stage if phase == "gradient" else stage, place

    if not found:
        return ""
    earliest = min(order(entry) for entry in found)
    ranks = [entry[0] for entry in found if order(entry) == earliest]
    _, phase, name, *_ = min(found, key=order)
    what = "an output" if phase == "output" else f"a {phase}"
    return f"first of all {named(ranks, hosts)} had {what} of {name} that was not"


def _number(tensor: Tensor) -> float | str:
    """The norm, which JSON knows no NaN for."""
    norm = tensor.double().norm().item()
    return norm if math.isfinite(norm) else str(norm)
