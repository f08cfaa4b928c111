"""Test that each check of this folder finds the fault for which it is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.gpt2.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.gpt2.train import data, train_step
from megatron.gpt2.train.forward_backward import ForwardBackward
from mpu import transformer
from mpu.activation_offload import ActivationOffload
from tests.fake_cuda.fake_gpu import FakeStream
from tests.fake_cuda.program import check_budget, check_same_order, check_step, running

Plant = Callable[[pytest.MonkeyPatch], None]


def step(text: Path, save: Path) -> None:
    with running(text, save) as (trainer, gpu):
        check_step(trainer, gpu)
        check_budget("bf16", gpu)


def ranks(text: Path, save: Path) -> None:
    check_same_order(text, save, "--model-parallel-size 2 --sequence-parallel", 2)


def stages(text: Path, save: Path) -> None:
    check_same_order(text, save, "--pipeline-model-parallel-size 2 --global-batch-size 4", 2)


def parked(text: Path, save: Path) -> None:
    with running(text, save, "--num-layers 3 --recompute-granularity full --checkpoint-in-cpu") as (trainer, gpu):
        check_step(trainer, gpu)


def before(owner: Any, name: str, extra: Callable[..., object]) -> Plant:
    """Make `owner.name` call `extra` first, with the same arguments."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)

        def both(*args: Any, **kwargs: Any) -> Any:
            extra(*args, **kwargs)
            return original(*args, **kwargs)

        patch.setattr(owner, name, both)

    return plant


def instead(owner: Any, name: str, other: Callable[..., object]) -> Plant:
    """Replace `owner.name` by `other` during the test."""
    return lambda patch: patch.setattr(owner, name, other)


def before_update(extra: Callable[[MixedPrecisionOptimizer], object]) -> Plant:
    return before(MixedPrecisionOptimizer, "step", extra)


def before_counting(extra: Callable[[Tensor], object]) -> Plant:
    """Call `extra` with the mask of the batch before the tokens are counted."""
    return before(train_step, "tokens_in_global_batch", lambda trainer, batch: extra(batch.mask))


def on_gpu(*shape: int) -> Tensor:
    return torch.zeros(*shape, device="cuda")


# Each case has the check, the planted fault, and the expected message.
FAULTS: dict[str, tuple[Callable[[Path, Path], None], Plant, str]] = {
    "a value is read": (step, before_update(lambda self: self.found_inf.item()), "reads a value"),
    "a batch that is not pinned": (step, instead(data, "pin_tensor", torch.from_numpy), "copies .* from cpu to cuda"),
    "a tensor on the wrong device": (
        step,
        before_counting(lambda mask: mask + torch.ones(256)),
        "found at least two devices",
    ),
    "a copy in each layer": (
        step,
        before(transformer.ParallelTransformerLayer, "forward", lambda self, x, *_, **__: x.clone()),
        "'clone': '7, granted 5'",
    ),
    "a CPU tensor in a collective": (ranks, before_update(lambda self: dist.all_reduce(torch.zeros(2))), "on the CPU"),
    "a tensor in a collective that is not contiguous": (
        ranks,
        before_update(lambda self: dist.all_reduce(on_gpu(4, 4).t())),
        "not contiguous",
    ),
    "a collective that only one rank calls": (
        ranks,
        before_update(lambda self: dist.all_reduce(self.found_inf) if dist.get_rank() == 1 else None),
        "ranks 0 and 1",
    ),
    "the main stream does not wait for copies": (
        parked,
        instead(ActivationOffload, "wait", lambda self, done: None),
        "before it is there.*|while another stream uses it",
    ),
    "copies do not wait for the main stream": (
        parked,
        instead(FakeStream, "wait_stream", lambda self, other: None),
        r"reads \(\d+,\) before it is there",
    ),
    "a send that nobody receives": (
        stages,
        before(
            ForwardBackward,
            "_backward",
            lambda self, action: dist.send(on_gpu(2), dst=0) if dist.get_rank() == 1 else None,
        ),
        "what rank 1 sends to rank 0",
    ),
}


def test_nothing_is_found_if_nothing_is_planted(text: Path, tmp_path: Path):
    for check in (step, ranks, stages, parked):
        check(text, tmp_path / check.__name__)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(text: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch):
    check, plant, said = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError), match=said):
        check(text, tmp_path)
