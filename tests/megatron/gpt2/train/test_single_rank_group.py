"""Test that one rank in a process group calls all collectives, as if there were other ranks, with gloo.
tests/gpu/test_cuda.py has the same test with NCCL on a single GPU.

Normally, no collective is called in a group of one rank. Inside `single_rank_group` the size of the group is 1 in
arithmetic and more than 1 in comparisons. So the program calls every collective, and the losses must be those of a run
without a group.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mpu
from tests.megatron.gpt2.train.training_runs import finish, start, steps, write_text

# {name: (flags, collectives that the flags need in addition to those of every run)}
RUNS: dict[str, tuple[str, set[str]]] = {
    "plain": ("", set()),
    "sequence parallel, sharded": (
        "--sequence-parallel --use-distributed-optimizer --grad-reduce-in-bf16",
        {"_allgather_base_", "_reduce_scatter_base_"},
    ),
}


class FakeGroupSize(int):
    """A group size that is 1 in arithmetic and more than 1 in comparisons."""

    def __new__(cls) -> FakeGroupSize:
        return super().__new__(cls, 1)

    def __eq__(self, other: object) -> bool:
        return False

    def __mul__(self, other: int) -> int:  # Products with other group sizes are 1.
        return self if type(other) is int and other == 1 else 1

    def __gt__(self, other: int) -> bool:
        return other <= 1

    __hash__ = int.__hash__


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives by name and by the device type of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kinds = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            for kind in kinds:
                self.seen[func._schema.name.split("::")[1], kind] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def single_rank_group(backend: str, device: torch.device) -> Iterator[None]:
    """Make a process group of only this process, in which every collective is called."""
    initialize = mpu.initialize_model_parallel

    def of_one(tensor: int, pipeline: int, *, timeout: timedelta | None = None) -> mpu.ParallelState:
        state = dataclasses.replace(
            initialize(1, timeout=timeout),
            tensor_model_parallel_size=FakeGroupSize(),
            data_parallel_size=FakeGroupSize(),
        )
        mpu.initialize._default = state  # type: ignore[attr-defined]
        return state

    dist.init_process_group(
        backend,
        store=HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        with (
            mock.patch.object(dist.ProcessGroup, "size", lambda group: FakeGroupSize()),
            mock.patch.object(mpu, "initialize_model_parallel", of_one),
        ):
            yield
    finally:
        dist.destroy_process_group()
        mpu.destroy_model_parallel()


def losses(folder: Path, flags: str) -> list[float]:
    """Return the losses of three steps."""
    trainer = start(0, 1, folder, flags)
    seen: list[float] = steps(trainer, 3)["loss"]
    finish(trainer)
    return seen


def check_single_rank_group(name: str, backend: str, device: torch.device, folder: Path) -> None:
    """Assert that a run in the group calls its collectives with tensors on the device, and has the losses of a run
    without a group."""
    flags, needed = RUNS[name]
    where = f"--device {device.type} --micro-batch-size 4 --global-batch-size 8"
    expected = losses(folder, f"{where} --save {folder}/without")
    with single_rank_group(backend, device), CollectiveCounter() as collectives:
        got = losses(folder, f"{where} {flags} --save {folder}/with")
        batch = {"text": torch.arange(6)}
        assert torch.equal(mpu.broadcast_data(["text"], batch, torch.int64, device)["text"].cpu(), batch["text"])
    on_device = {seen for seen, kind in collectives.seen if kind == device.type}
    missing = (needed | {"allgather_", "allreduce_", "broadcast_"}) - on_device
    assert not missing, f"{missing} were not called, but {collectives.seen}"
    assert got == pytest.approx(expected, rel=2e-3 if "--grad-reduce-in-bf16" in flags else 1e-5)


def test_one_rank_calls_every_collective_and_computes_the_same(tmp_path: Path):
    write_text(tmp_path)
    check_single_rank_group("sequence parallel, sharded", "gloo", torch.device("cpu"), tmp_path)
