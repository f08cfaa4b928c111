"""Runs the training program on the fake GPU with any flags and layout, and checks what the program must not do.

The ranks of a layout run in turn in one process. Each rank uses torch's fake process group, whose collectives send
nothing.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.extensions.order import RankRecord, prove
from megatron.gpt2.extensions.plan.hook import memory_inputs
from megatron.gpt2.extensions.plan.memory import estimate_memory
from megatron.gpt2.model import gpt2
from megatron.gpt2.train.setup import build_context
from megatron.gpt2.train.train_step import train_step
from megatron.gpt2.train.trainer import Trainer, build_trainer
from mpu.kernels import triton_kernel
from mpu.kernels.triton_kernel import TritonKernel
from tests.fake_cuda.fake_gpu import FakeGPU

BUDGETS = Path(__file__).with_name("budgets.json")

# Two layers of GPT-2 345M. bf16 is the default precision on a GPU.
FLAGS = (
    "--num-layers 2 --hidden-size 1024 --num-attention-heads 16 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 2 --tokenizer-type bytes --train-iters 1000 --eval-iters 1 --attention-dropout 0 "
    "--hidden-dropout 0 --split 90,10"
)
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
# If the optimizer is offloaded to the CPU, the host waits for the gradients in this file once in each step.
OFFLOAD = ("megatron/gpt2/optimizer/optimizer.py",)


def write_documents(folder: Path) -> None:
    """Write documents.jsonl with 2,000 documents of 20 to 400 bytes."""
    lines = (json.dumps({"text": "word " * (4 + 37 * number % 77)}) for number in range(2000))
    (folder / "documents.jsonl").write_text("\n".join(lines))


Log = Callable[[str], None]


def say_the_same(texts: list[str], text: str, group: object = None) -> None:
    texts[:] = [text] * len(texts)


call_kernel = TritonKernel.__call__


def call_unless_measured(kernel: TritonKernel[Any, Any], *args: Any) -> Any:
    return kernel.reference(*args) if kernel.is_measured else call_kernel(kernel, *args)


@contextlib.contextmanager
def running(
    text: Path,
    save: Path,
    flags: str = "",
    *,
    rank: int = 0,
    world_size: int = 1,
    log: Log = lambda line: None,
    measured_kernels: bool = False,
) -> Iterator[tuple[Trainer, FakeGPU]]:
    """Build a run with `FLAGS` and `flags` on a fake GPU, and yield the trainer and the GPU.

    text: the folder of documents.jsonl.
    measured_kernels: use the operators that a GPU uses only if they are faster than their references; see
        `TritonKernel`.
    """
    with FakeGPU() as gpu, contextlib.ExitStack() as stack:
        if "--compile" in flags:
            from tests.fake_cuda.fake_inductor import fake_inductor

            stack.enter_context(fake_inductor(gpu))
        # Time each attention kernel once, and do not initialise weights: a fake device has neither times nor values.
        stack.enter_context(mock.patch.object(triton_kernel, "REPEATS", 1))
        if not measured_kernels:
            stack.enter_context(mock.patch.object(TritonKernel, "__call__", call_unless_measured))
        stack.enter_context(mock.patch.object(gpt2, "seeded_normal", lambda *_: lambda weight: None))
        # The fake process group gathers no strings, so every rank's string is replaced by the string of the current
        # rank.
        stack.enter_context(mock.patch.object(dist, "all_gather_object", say_the_same))
        if world_size > 1:
            dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
            stack.callback(dist.destroy_process_group)
            new_group = dist.new_group
            stack.enter_context(
                mock.patch.object(  # Every group gets the fake backend.
                    dist, "new_group", lambda ranks=None, **options: new_group(ranks, backend="fake")
                )
            )
        files = f"--train-data {text}/documents.jsonl --data-cache-path {text}/cache --save {save}/{rank}"
        arguments = parse(f"{FLAGS} {files} {flags}".split())
        context = build_context(arguments, RankInfo(rank, world_size, 0, 1), log)
        trainer = build_trainer(context, log)
        trainer.state.model.train()
        try:
            yield trainer, gpu
        finally:
            trainer.data.loader.close()
            trainer.stop_signal.close()
            trainer.close()


def steps(trainer: Trainer, gpu: FakeGPU, count: int = 1) -> None:
    """Run a first step, which allocates buffers, and then record `count` steps."""
    train_step(trainer)
    gpu.clear()
    for _ in range(count):
        train_step(trainer)


def check_step(trainer: Trainer, gpu: FakeGPU, allowed: Sequence[str] = ()) -> None:
    """Assert that a step never waits for the device and sends only contiguous CUDA tensors.

    allowed: names of files in which the host may wait.
    """
    steps(trainer, gpu)
    waits = [wait for wait in gpu.waits if not wait.startswith(tuple(allowed))]
    assert gpu.kernels and not waits and not gpu.faults, f"{waits} {gpu.faults}"


def check_same_order(text: Path, save: Path, flags: str, world_size: int) -> dict[str, int]:
    """Assert that the calls of all ranks match, and that no rank waits forever under NCCL's rules. Also run
    `check_step` on each rank. Return the communication of the last rank."""
    records: list[RankRecord] = []
    for rank in range(world_size):
        with running(text, save, flags, rank=rank, world_size=world_size) as (trainer, gpu):
            check_step(trainer, gpu, OFFLOAD if "--cpu-offload-optimizer" in flags else ())
            records.append(RankRecord(rank, world_size, gpu.events))
            sent = communication(trainer, gpu)
    story = prove(records, ("nccl",))
    assert all(record.events for record in records) and not story, "\n".join(story)
    return sent


def check_peak(text: Path, save: Path, flags: str, *, rank: int, world_size: int) -> float:
    """Assert that the planner's peak is within 1 % of the fake device's peak. Return planner / device."""
    with running(text, save, flags, rank=rank, world_size=world_size) as (trainer, gpu):
        steps(trainer, gpu)
    stage = trainer.parallel.pipeline_model_parallel_rank
    ratio = estimate_memory(memory_inputs(trainer.context), stage).allocated / gpu.memory.peak
    assert abs(ratio - 1) < 0.01, f"{ratio:.3f} at {gpu.memory.place}"
    return ratio


def cost(gpu: FakeGPU) -> dict[str, int]:
    """Return the number of kernels of the recorded step by name, and the MB that they read and write."""
    moved = sum(kernel.read + kernel.written for kernel in gpu.kernels)
    return {**dict(sorted(collections.Counter(kernel.name for kernel in gpu.kernels).items())), "MB": moved >> 20}


def communication(trainer: Trainer, gpu: FakeGPU) -> dict[str, int]:
    """Return the number of calls in the recorded step by name, group, and tensors."""
    of_ranks = {tuple(range(trainer.parallel.world_size)): "world"}
    for name in ("embedding", "model_parallel", "data_parallel", "pipeline_model_parallel", "tensor_model_parallel"):
        if (group := getattr(trainer.parallel, f"{name}_group")) is not None:
            of_ranks[tuple(dist.get_process_group_ranks(group))] = name
    calls = [call for is_call, call in gpu.events[gpu.recorded :] if is_call]
    counts = collections.Counter(f"{of_ranks[call.channel[0]]}: {call.name} {call.arguments}" for call in calls)
    return dict(sorted(counts.items()))


def check_budget(mode: str, now: Mapping[str, int]) -> None:
    """Assert that the recorded step has exactly the kernels and bytes, or the communication, that budgets.json gives
    for `mode`. With RECORD_BUDGETS in the environment, write `now` to budgets.json instead."""
    budgets = json.loads(BUDGETS.read_text())
    if "RECORD_BUDGETS" in os.environ:
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(of)}" for name, of in {**budgets, mode: now}.items())
        BUDGETS.write_text(f"{{\n{lines}\n}}\n")
        return
    granted = budgets.get(mode, {})
    changed = {
        name: f"{now.get(name, 0)}, granted {granted.get(name, 0)}"
        for name in sorted(now.keys() | granted.keys())
        if now.get(name, 0) != granted.get(name, 0)
    }
    assert not changed, f"{changed}: if that is meant, RECORD_BUDGETS=1 bash scripts/test_fake_cuda.sh -k budget"
