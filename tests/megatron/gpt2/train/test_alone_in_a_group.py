"""One rank in a real process group whose collectives all run, as if there were others: what one GPU can show of NCCL,
here over gloo. tests/gpu/test_cuda.py runs the same over NCCL.

A group of one rank is left alone everywhere: mpu's operations return their input, the reducer sends nothing. Inside
`alone` the group's size is 1 in arithmetic and more than 1 in comparisons. So every collective is called, over one rank
that holds everything, and the numbers of a run are those of a run without a group.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
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

# Flags, and the collectives of these beside those of every run.
RUNS: dict[str, tuple[list[str], set[str]]] = {
    "plain": ([], set()),
    "sequence parallel, sharded": (
        ["--sequence-parallel", "--use-distributed-optimizer", "--grad-reduce-in-bf16"],
        {"_allgather_base_", "_reduce_scatter_base_"},
    ),
    "torch's DDP": (["--DDP-impl", "torch"], set()),
}


class One(int):
    """1 in arithmetic, more than 1 in comparisons."""

    def __new__(cls) -> One:
        return super().__new__(cls, 1)

    def __eq__(self, other: object) -> bool:
        return False

    def __mul__(self, other: int) -> int:  # of sizes
        return self if type(other) is int and other == 1 else 1

    def __gt__(self, other: int) -> bool:
        return other <= 1

    __hash__ = int.__hash__


class Collectives(TorchDispatchMode):
    """Counts the collectives inside, by name and by the kind of device of their tensors."""

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
def alone(backend: str, device: torch.device) -> Iterator[None]:
    """A process group of this process alone."""
    initialize = mpu.initialize_model_parallel

    def of_one(tensor: int, pipeline: int, *, timeout: timedelta | None = None) -> mpu.ParallelState:
        state = dataclasses.replace(
            initialize(1, timeout=timeout), tensor_model_parallel_size=One(), data_parallel_size=One()
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
            mock.patch.object(dist.ProcessGroup, "size", lambda group: One()),
            mock.patch.object(mpu, "initialize_model_parallel", of_one),
        ):
            yield
    finally:
        dist.destroy_process_group()
        mpu.destroy_model_parallel()


def losses(folder: str, flags: Sequence[str]) -> list[float]:
    """Of three steps."""
    run = start(0, 1, folder, flags)
    seen: list[float] = steps(run, 3)["loss"]
    finish(run)
    return seen


def check(name: str, backend: str, device: torch.device, folder: str) -> None:
    """AssertionError unless a run in the group calls its collectives with tensors of the device, and has the losses of
    a run without a group."""
    flags, needed = RUNS[name]
    where = ["--device", device.type, *"--micro-batch-size 4 --global-batch-size 8".split()]
    expected = losses(folder, [*where, "--save", f"{folder}/without"])
    with alone(backend, device), Collectives() as collectives:
        got = losses(folder, [*where, *flags, "--save", f"{folder}/{name}"])
        batch = {"text": torch.arange(6)}
        assert torch.equal(mpu.broadcast_data(["text"], batch, torch.int64, device)["text"].cpu(), batch["text"])
    on_device = {seen for seen, kind in collectives.seen if kind == device.type}
    missing = (needed | {"allgather_", "allreduce_", "broadcast_"}) - on_device
    assert not missing, f"{missing} were not called, but {collectives.seen}"
    assert got == pytest.approx(expected, rel=2e-3 if "--grad-reduce-in-bf16" in flags else 1e-5)


def test_one_rank_calls_every_collective_and_computes_the_same(tmp_path: Path):
    write_text(tmp_path)
    check("sequence parallel, sharded", "gloo", torch.device("cpu"), str(tmp_path))
