"""Each check of this folder finds the fault that it is there for, when it is planted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.gpt2.optimizer.optimizer import AdamWOptimizer
from megatron.gpt2.pipeline.schedule import Action
from megatron.gpt2.train import data, train_step
from megatron.gpt2.train.forward_backward import ForwardBackward
from mpu import kernels, transformer
from mpu.host_memory import HostMemory
from tests.fake_cuda.fake_streams import FakeStream
from tests.fake_cuda.program import check_budget, check_peak, check_same_order, check_step, running
from tests.fake_cuda.test_memory import SHAPE

Plant = pytest.MonkeyPatch


def before(plant: Plant, owner: Any, name: str, extra: Callable[..., object]) -> None:
    """`owner.name` does `extra` first, with the same arguments."""
    original = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        extra(*args, **kwargs)
        return original(*args, **kwargs)

    plant.setattr(owner, name, both)


@pytest.fixture
def step(text: Path, tmp_path: Path) -> Callable[[], None]:
    def check() -> None:
        with running(text, tmp_path) as (run, gpu):
            check_step(run, gpu)
            check_budget("bf16", gpu)

    return check


@pytest.fixture
def ranks(text: Path, tmp_path: Path) -> Callable[[], None]:
    return lambda: check_same_order(text, tmp_path, ["--sequence-parallel"], 2, 2)


def test_nothing_is_found_where_nothing_is_planted(step: Callable[[], None], ranks: Callable[[], None]):
    step()
    ranks()


def test_1_a_value_is_read(step: Callable[[], None], monkeypatch: Plant):
    before(monkeypatch, AdamWOptimizer, "step", lambda self: self.found_inf.item())
    with pytest.raises(AssertionError, match="reads a value"):
        step()


def test_2_a_batch_that_is_not_pinned(step: Callable[[], None], monkeypatch: Plant):
    monkeypatch.setattr(data, "pinned", torch.from_numpy)
    with pytest.raises(AssertionError, match="copies .* from cpu to cuda"):
        step()


def test_3_a_copy_that_blocks(step: Callable[[], None], monkeypatch: Plant):
    before(monkeypatch, train_step, "tokens_in_global_batch", lambda run, batch: batch.mask.cpu())
    with pytest.raises(AssertionError, match="from cuda to cpu"):
        step()


def test_4_a_tensor_on_the_wrong_device(step: Callable[[], None], monkeypatch: Plant):
    before(monkeypatch, train_step, "tokens_in_global_batch", lambda run, batch: batch.mask + torch.ones(256))
    with pytest.raises(RuntimeError, match="found at least two devices"):
        step()


def test_5_a_copy_in_each_layer(step: Callable[[], None], monkeypatch: Plant):
    before(monkeypatch, transformer.ParallelTransformerLayer, "forward", lambda self, x, *_, **__: x.clone())
    with pytest.raises(AssertionError, match="'clone': '7, granted 5'"):
        step()


def test_6_a_chunk_of_logits_in_float32(text: Path, tmp_path: Path, monkeypatch: Plant):
    kept: list[Tensor] = []
    before(monkeypatch, kernels, "vocab_parallel_softmax", lambda logits, *_: kept.append(logits.float()))
    with running(text, tmp_path, SHAPE) as (run, gpu), pytest.raises(AssertionError, match="cross_entropy.py"):
        check_peak(run, gpu)


def test_7_an_allocation_that_the_planner_does_not_know(text: Path, tmp_path: Path, monkeypatch: Plant):
    room: list[Tensor] = []
    before(monkeypatch, AdamWOptimizer, "step", lambda self: room.append(torch.empty(1 << 27, device="cuda")))
    with running(text, tmp_path, SHAPE) as (run, gpu), pytest.raises(AssertionError):
        check_peak(run, gpu)


def test_8_a_cpu_tensor_in_a_collective(ranks: Callable[[], None], monkeypatch: Plant):
    before(monkeypatch, AdamWOptimizer, "step", lambda self: dist.all_reduce(torch.zeros(2)))
    with pytest.raises(AssertionError, match="on the CPU"):
        ranks()


def test_9_a_tensor_in_a_collective_that_is_not_contiguous(ranks: Callable[[], None], monkeypatch: Plant):
    before(monkeypatch, AdamWOptimizer, "step", lambda self: dist.all_reduce(torch.zeros(4, 4, device="cuda").t()))
    with pytest.raises(AssertionError, match="not contiguous"):
        ranks()


def test_10_a_collective_that_one_rank_calls_alone(ranks: Callable[[], None], monkeypatch: Plant):
    before(
        monkeypatch,
        AdamWOptimizer,
        "step",
        lambda self: dist.all_reduce(self.found_inf) if dist.get_rank() == 1 else None,
    )
    with pytest.raises(AssertionError, match="ranks 0 and 1"):
        ranks()


def test_11_another_order_on_one_rank(ranks: Callable[[], None], monkeypatch: Plant):
    def sums(self: AdamWOptimizer) -> None:
        for size in (2, 3) if dist.get_rank() == 0 else (3, 2):
            dist.all_reduce(torch.zeros(size, device="cuda"))

    before(monkeypatch, AdamWOptimizer, "step", sums)
    with pytest.raises(AssertionError, match="ranks 0 and 1"):
        ranks()


@pytest.fixture
def parked(text: Path, tmp_path: Path) -> Callable[[], None]:
    flags = ["--num-layers", "3", "--recompute-granularity", "full", "--checkpoint-in-cpu"]

    def check() -> None:
        with running(text, tmp_path, flags) as (run, gpu):
            check_step(run, gpu)

    return check


def test_12_the_main_stream_does_not_wait_for_copies(parked: Callable[[], None], monkeypatch: Plant):
    parked()
    monkeypatch.setattr(HostMemory, "wait", lambda self, done: None)
    with pytest.raises(AssertionError, match=r"before it is there.*|while another stream uses it"):
        parked()


def test_13_copies_do_not_wait_for_the_main_stream(parked: Callable[[], None], monkeypatch: Plant):
    monkeypatch.setattr(FakeStream, "wait_stream", lambda self, other: None)
    with pytest.raises(AssertionError, match=r"reads \(\d+,\) before it is there"):
        parked()


def test_14_memory_that_is_not_pinned(parked: Callable[[], None], monkeypatch: Plant):
    monkeypatch.setattr(HostMemory, "take", lambda self, numel, dtype: torch.empty(numel, dtype=dtype))
    with pytest.raises(AssertionError, match="copies .* from cuda to cpu"):
        parked()


@pytest.fixture
def stages(text: Path, tmp_path: Path) -> Callable[[], None]:
    flags = ["--pipeline-model-parallel-size", "2", "--global-batch-size", "4"]
    return lambda: check_same_order(text, tmp_path, flags, 2, 1)


def test_15_a_send_that_nobody_receives(stages: Callable[[], None], monkeypatch: Plant):
    def send(self: ForwardBackward, action: Action) -> None:
        if dist.get_rank() == 1:
            dist.send(torch.zeros(2, device="cuda"), dst=0)

    before(monkeypatch, ForwardBackward, "_backward", send)
    with pytest.raises(AssertionError, match="what rank 1 sends to rank 0"):
        stages()
