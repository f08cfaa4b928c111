"""Training steps in every mode never wait for the device and have no tensor on the wrong device. Offloaded activations
are copied on a side stream, in order and without a wait. The planner's peak memory agrees with the device. All ranks of
a layout call the same collectives in the same order. With --exact-layouts, every layout runs the same operations on the
same shapes in the same order, divided over the ranks."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path

import pytest
import torch

from megatron.gpt2.checkpoint import sharded_state, writer
from megatron.gpt2.train.evaluate import SAMPLING, evaluate_and_log, sample_text
from megatron.gpt2.train.loop import train
from megatron.gpt2.train.train_step import train_step
from tests.fake_cuda.fake_gpu import FakeStream, Kernel
from tests.fake_cuda.program import (
    DOCUMENTS,
    DROPOUT,
    OFFLOAD,
    check_budget,
    check_peak,
    check_same_order,
    check_step,
    cost,
    running,
    steps,
)

FULL = "--recompute-granularity full"
MODES = {
    "bf16": "",
    "fp16": "--precision fp16",
    "fp32": "--precision fp32",
    "selective": "--recompute-granularity selective",
    "full": FULL,
    "full in pairs": f"{FULL} --recompute-num-layers 2",
    "full, inputs on the host": f"{FULL} --checkpoint-in-cpu",
    "a layer on the host": "--cpu-offloading-num-layers 1",
    "accumulation": "--global-batch-size 6",
    "dropout": DROPOUT,
    "dropout, full": f"{DROPOUT} {FULL}",
    "documents": DOCUMENTS,
    "documents, dropout": f"{DOCUMENTS} {DROPOUT}",
    "offload": "--cpu-offload-optimizer",
    "exact layouts": "--exact-layouts 4 --global-batch-size 4",
    "muon": "--optimizer muon",
    "compiled": "--compile",
    "compiled, dropout": f"--compile {DROPOUT}",
}
LAYERS = 4
INPUT = 2 * 256 * 1024 * 2  # a layer's input in bytes: micro-batch, sequence, hidden, bf16
PARKED = f"--num-layers {LAYERS} {FULL} --checkpoint-in-cpu"
WAYS = {  # number of ranks, flags, and the bytes that are copied to the host and back
    "inputs": (1, PARKED, LAYERS * INPUT),
    "in pairs": (1, f"{PARKED} --recompute-num-layers 2", LAYERS // 2 * INPUT),
    "accumulation": (1, f"{PARKED} --global-batch-size 4", 2 * LAYERS * INPUT),
    "parts of inputs": (2, f"{PARKED} --partition-activations --model-parallel-size 2", LAYERS * INPUT // 2),
    # A layer offloads the inputs and outputs of both layer norms, queries, keys and values, attention's output, and
    # twice the 4h of the MLP.
    "of layers": (1, f"--num-layers {LAYERS} --cpu-offloading-num-layers 3", 3 * (8 + 8) * INPUT),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_waits_for_nothing_and_keeps_to_its_budget(text: Path, tmp_path: Path, mode: str):
    lines: list[str] = []
    with running(text, tmp_path, MODES[mode], log=lines.append) as (trainer, gpu):
        check_step(trainer, gpu, OFFLOAD if mode == "offload" else ())
        check_budget(mode, cost(gpu))
    assert sum("has its own launches" in line for line in lines) == (mode == "documents, dropout")


def test_training_waits_at_log_lines_only(text: Path, tmp_path: Path):
    """Run ten iterations with a log line after every fifth, and an evaluation and a sample at the end."""
    with running(text, tmp_path, "--train-iters 10 --log-interval 5 --eval-interval 100") as (trainer, gpu):
        steps(trainer, gpu)
        gpu.clear()
        assert train(trainer) == ""
        assert gpu.waits
        places = {wait.split(":")[0].removeprefix("megatron/gpt2/train/") for wait in gpu.waits}
        assert places <= {"loop.py", "evaluate.py"}


def test_an_evaluation_waits_once_for_its_sums_and_generation_once_for_each_token(text: Path, tmp_path: Path):
    with running(text, tmp_path) as (trainer, gpu):
        gpu.clear()
        evaluate_and_log(trainer, "valid")
        # The host waits twice: for the byte lengths of all tokens, and for the sums of the evaluation.
        assert gpu.kernels and len({wait.split(" ")[0] for wait in gpu.waits}) == 2, gpu.waits
        gpu.waits.clear()
        sample_text(trainer)
        reads = [wait for wait in gpu.waits if "reads" in wait or "cuda to cpu" in wait]
        assert len(reads) == SAMPLING.max_new_tokens, collections.Counter(reads)
        assert not gpu.faults


def test_save_and_load(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tensors of every kind are written to files and loaded. Copies to the host contain zeros."""
    # Only one file is written at a time, because fake tensors do not work in threads.
    for module in (writer, sharded_state):
        monkeypatch.setattr(module, "in_threads", lambda work, items, *_: [work(item) for item in items])
    with running(text, tmp_path, DROPOUT) as (trainer, gpu):
        steps(trainer, gpu)
        trainer.progress.count_step(trainer.current_global_batch_size)
        assert trainer.checkpoints.save() is not None
    with running(text, tmp_path, DROPOUT) as (trainer, gpu):
        assert trainer.progress.iteration == 1
        check_step(trainer, gpu)


@pytest.mark.parametrize("way", WAYS)
def test_it_leaves_and_comes_back_on_a_side_stream(text: Path, tmp_path: Path, way: str):
    ranks, flags, size = WAYS[way]
    with running(text, tmp_path, flags, world_size=ranks) as (trainer, gpu):
        check_step(trainer, gpu)
        aside = [copy for copy in gpu.copies if copy.stream != FakeStream.current.number]
        assert [sum(copy.size for copy in aside if copy.to == to) for to in ("cpu", "cuda")] == [size, size]
        memory = trainer.state.model.transformer.activation_offload
        allocated = memory.allocated_bytes
        train_step(trainer)
        assert memory.allocated_bytes == allocated <= size


# The planner's peak is compared with the peak of the fake device, for four layers of GPT-2 345M.
SHAPE = (
    "--num-layers 4 --seq-length 1024 --max-position-embeddings 1024 --make-vocab-size-divisible-by 50304 "
    "--micro-batch-size 4"
)
SHARDED, SPLIT = "--use-distributed-optimizer", "--model-parallel-size 2"
STAGES = "--pipeline-model-parallel-size 2 --global-batch-size 16"
CASES = {  # number of ranks, and flags; with two pipeline stages, the peaks of both stages are compared
    "bf16": (1, ""),
    "selective": (1, "--recompute-granularity selective"),
    "full": (1, FULL),
    "full in pairs": (1, f"{FULL} --recompute-num-layers 2"),
    "accumulation": (1, "--global-batch-size 8"),
    "offload": (1, "--cpu-offload-optimizer"),
    "dropout": (1, DROPOUT),
    "sharded": (2, SHARDED),
    "sharded gradients": (2, f"{SHARDED} --shard-gradients --num-layers 8 --ddp-bucket-size 10000000"),
    "sharded gradients, accumulation": (4, f"{SHARDED} --shard-gradients --global-batch-size 32"),
    "model": (2, SPLIT),
    "parts of inputs": (2, f"{SPLIT} {FULL} --partition-activations"),
    "inputs on the host": (1, f"{FULL} --checkpoint-in-cpu --num-layers 12"),
    "parts on the host": (2, f"{SPLIT} {FULL} --partition-activations --checkpoint-in-cpu"),
    "all layers on the host": (1, "--cpu-offloading-num-layers 4"),
    "sequence": (2, f"{SPLIT} --sequence-parallel"),
    "1F1B": (2, STAGES),
    "zero bubble": (2, f"{STAGES} --pipeline-schedule zero-bubble"),
    "interleaved": (2, f"{STAGES} --num-layers-per-virtual-pipeline-stage 1"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_planner_agrees_with_the_device(text: Path, tmp_path: Path, case: str):
    world_size, flags = CASES[case]
    for rank in range(2 if STAGES in flags else 1):
        ratio = check_peak(text, tmp_path, f"{SHAPE} {flags}", rank=rank, world_size=world_size)
        print(f"{case}, rank {rank}: planner / device {ratio:.4f}")


FOUR = "--model-parallel-size 4"
SEQUENCE = "--sequence-parallel"
DEEP_STAGES = "--pipeline-model-parallel-size 2 --num-layers 4"
LAYOUTS = {  # number of ranks, and flags
    "data": (4, ""),
    "model": (4, FOUR),
    "both": (4, f"{SPLIT} --global-batch-size 8"),
    "sequence": (4, f"{FOUR} {SEQUENCE} {DROPOUT}"),
    "sequence, full": (2, f"{SPLIT} {SEQUENCE} {FULL}"),
    "sharded": (4, SHARDED),
    "sharded, sequence, bf16 gradients": (4, f"{SPLIT} {SEQUENCE} {SHARDED} --grad-reduce-in-bf16 {DROPOUT}"),
    "sharded, offload": (2, f"{SHARDED} --cpu-offload-optimizer"),
    "sharded gradients, accumulation": (4, f"{SPLIT} --zero-stage 2 --global-batch-size 8"),
    "parts of inputs on the host": (2, f"{SPLIT} {FULL} --partition-activations --checkpoint-in-cpu"),
    "documents": (2, f"{SPLIT} {DOCUMENTS}"),
    "fp16": (4, f"{SPLIT} --precision fp16"),
    "pipeline": (4, "--pipeline-model-parallel-size 4 --num-layers 4 --global-batch-size 12"),
    "pipeline, interleaved, data, sharded, full": (
        4,
        f"{DEEP_STAGES} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 12 {SHARDED} {FULL}",
    ),
    "pipeline, zero-bubble, sequence": (
        4,
        f"{SPLIT} --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble {SEQUENCE} --global-batch-size 6 "
        f"--precision fp16 {DROPOUT}",
    ),
}
PARTS = 4
EXACT = f"--exact-layouts {PARTS} --hidden-dropout 0.1"
# These operators compute sums that a layout could split, or that --exact-layouts divides into parts.
ATTENTION = "_scaled_dot_product_flash_attention"
SPLIT_SUMS = ("mm", "addmm", "bmm", ATTENTION, f"{ATTENTION}_backward", "gelu", "gelu_backward")
SUMS = (*SPLIT_SUMS, "native_layer_norm_backward", "sum", "dot", "index_add_")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_calls_the_same_within_a_budget(text: Path, tmp_path: Path, layout: str):
    ranks, flags = LAYOUTS[layout]
    check_budget(f"{layout}, {ranks} ranks", check_same_order(text, tmp_path, flags, ranks))


def test_each_rank_runs_its_parts_in_one_order(text: Path, tmp_path: Path):
    one = runs(traced(text, tmp_path / "one", "", 1, 0))
    assert {kernel[0] for kernel, _ in one} == set(SUMS) - {"bmm"}
    assert all(count % PARTS == 0 for (name, _), count in one if name in SPLIT_SUMS)
    for size, rank, flags in ((2, 1, "--sequence-parallel"), (4, 2, "")):
        here = runs(traced(text, tmp_path / str(size), flags, size, rank))
        assert [kernel for kernel, _ in here] == [kernel for kernel, _ in one], f"{size} ranks, {flags}"
        for (kernel, count), (_, whole) in zip(here, one, strict=True):
            shares = (size,) if kernel[0] in SPLIT_SUMS else (1, size)
            assert whole in [count * share for share in shares], f"{kernel}: {count} of {whole}, {size} ranks, {flags}"


@pytest.mark.parametrize(
    "flags, line",
    [
        (
            f"{EXACT} --attention-dropout 0.1",
            "--exact-layouts and --attention-dropout 0.1: .* give --attention-dropout 0, or",
        ),
        (
            f"{EXACT} --attention-backend fused",
            "--exact-layouts and --attention-backend fused: .* --attention-backend flash",
        ),
        ("--deterministic-mode --attention-backend fused", "--deterministic and --attention-backend fused: "),
    ],
)
def test_attention_without_a_fixed_order_is_refused(text: Path, tmp_path: Path, flags: str, line: str):
    with pytest.raises(ValueError, match=line), running(text, tmp_path, flags):
        pass
    assert not torch.are_deterministic_algorithms_enabled()


def traced(text: Path, save: Path, flags: str, size: int, rank: int) -> list[Kernel]:
    """Return the kernels of a step on one of `size` tensor-parallel ranks."""
    flags = f"{EXACT} --model-parallel-size {size} {flags}"
    with running(text, save, flags, rank=rank, world_size=size) as (trainer, gpu):
        steps(trainer, gpu)
        assert not gpu.waits and not gpu.faults and torch.are_deterministic_algorithms_enabled()
        return list(gpu.kernels)


def runs(kernels: list[Kernel]) -> list[tuple[tuple[str, tuple[tuple[int, ...], ...]], int]]:
    """Return the name and shapes of each operator of SUMS among `kernels`, and how many equal calls follow each other.
    The gradient norm is left out, because it adds integers, whose order does not matter."""
    sums = [
        (kernel.name, kernel.shapes)
        for kernel in kernels
        if kernel.name in SUMS and not kernel.place.startswith("megatron/gpt2/extensions/exact/norm.py")
    ]
    return [(key, len(list(equal))) for key, equal in itertools.groupby(sums)]
