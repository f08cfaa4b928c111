"""The planner's peak beside the most that the fake device ever held, for four layers of GPT-2 345M."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda.program import check_peak, running

SHAPE = [
    "--num-layers",
    "4",
    "--seq-length",
    "1024",
    "--max-position-embeddings",
    "1024",
    "--make-vocab-size-divisible-by",
    "50304",
    "--micro-batch-size",
    "4",
]
CASES: dict[str, tuple[int, list[str]]] = {  # ranks and flags
    "bf16": (1, []),
    "fp32": (1, ["--precision", "fp32"]),
    "selective": (1, ["--recompute-granularity", "selective"]),
    "full": (1, ["--recompute-granularity", "full"]),
    "full in pairs": (1, ["--recompute-granularity", "full", "--recompute-num-layers", "2"]),
    "accumulation": (1, ["--global-batch-size", "8"]),
    "offload": (1, ["--cpu-offload-optimizer"]),
    "dropout": (1, ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]),
    "data": (2, []),
    "sharded": (2, ["--use-distributed-optimizer"]),
    "sharded gradients": (
        2,
        ["--use-distributed-optimizer", "--shard-gradients", "--num-layers", "8", "--ddp-bucket-size", "10000000"],
    ),
    "sharded gradients, accumulation": (
        4,
        ["--use-distributed-optimizer", "--shard-gradients", "--global-batch-size", "32"],
    ),
    "model": (2, ["--model-parallel-size", "2"]),
    "parts of inputs": (
        2,
        ["--model-parallel-size", "2", "--recompute-granularity", "full", "--partition-activations"],
    ),
    "inputs on the host": (1, ["--recompute-granularity", "full", "--checkpoint-in-cpu", "--num-layers", "12"]),
    "parts on the host": (
        2,
        [
            "--model-parallel-size",
            "2",
            "--recompute-granularity",
            "full",
            "--partition-activations",
            "--checkpoint-in-cpu",
        ],
    ),
    "layers on the host": (1, ["--cpu-offloading-num-layers", "2"]),
    "all layers on the host": (1, ["--cpu-offloading-num-layers", "4"]),
    "sequence": (2, ["--model-parallel-size", "2", "--sequence-parallel"]),
}


# Of two stages, with 4 micro-batches.
PIPELINES = {
    "1F1B": [],
    "recompute": ["--recompute-granularity", "full"],
    "zero bubble": ["--pipeline-schedule", "zero-bubble"],
    "interleaved": ["--num-layers-per-virtual-pipeline-stage", "1"],
}


@pytest.mark.parametrize("case", CASES)
def test_the_planner_is_agrees_with_the_device(text: Path, tmp_path: Path, case: str):
    world_size, flags = CASES[case]
    with running(text, tmp_path, [*SHAPE, *flags], world_size=world_size) as (run, gpu):
        print(f"{case}: planner / device {check_peak(run, gpu):.3f}")


@pytest.mark.parametrize("case", PIPELINES)
def test_the_planner_agrees_with_the_device_of_each_stage(text: Path, tmp_path: Path, case: str):
    flags = [*SHAPE, "--pipeline-model-parallel-size", "2", "--global-batch-size", "16", *PIPELINES[case]]
    for rank in range(2):
        with running(text, tmp_path, flags, rank=rank, world_size=2) as (run, gpu):
            print(f"{case}, stage {rank}: planner / device {check_peak(run, gpu):.3f}")
