"""The planner's peak beside the most that the fake device ever held, for four layers of GPT-2 345M."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda.program import DROPOUT, check_peak, running

SHAPE = (
    "--num-layers 4 --seq-length 1024 --max-position-embeddings 1024 --make-vocab-size-divisible-by 50304 "
    "--micro-batch-size 4"
)
FULL, SHARDED, SPLIT = "--recompute-granularity full", "--use-distributed-optimizer", "--model-parallel-size 2"
STAGES = "--pipeline-model-parallel-size 2 --global-batch-size 16"
CASES = {  # ranks and flags; of two stages each is compared
    "bf16": (1, ""),
    "fp32": (1, "--precision fp32"),
    "selective": (1, "--recompute-granularity selective"),
    "full": (1, FULL),
    "full in pairs": (1, f"{FULL} --recompute-num-layers 2"),
    "accumulation": (1, "--global-batch-size 8"),
    "offload": (1, "--cpu-offload-optimizer"),
    "dropout": (1, DROPOUT),
    "data": (2, ""),
    "sharded": (2, SHARDED),
    "sharded gradients": (2, f"{SHARDED} --shard-gradients --num-layers 8 --ddp-bucket-size 10000000"),
    "sharded gradients, accumulation": (4, f"{SHARDED} --shard-gradients --global-batch-size 32"),
    "model": (2, SPLIT),
    "parts of inputs": (2, f"{SPLIT} {FULL} --partition-activations"),
    "inputs on the host": (1, f"{FULL} --checkpoint-in-cpu --num-layers 12"),
    "parts on the host": (2, f"{SPLIT} {FULL} --partition-activations --checkpoint-in-cpu"),
    "layers on the host": (1, "--cpu-offloading-num-layers 2"),
    "all layers on the host": (1, "--cpu-offloading-num-layers 4"),
    "sequence": (2, f"{SPLIT} --sequence-parallel"),
    "1F1B": (2, STAGES),
    "1F1B, full": (2, f"{STAGES} {FULL}"),
    "zero bubble": (2, f"{STAGES} --pipeline-schedule zero-bubble"),
    "interleaved": (2, f"{STAGES} --num-layers-per-virtual-pipeline-stage 1"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_planner_agrees_with_the_device(text: Path, tmp_path: Path, case: str):
    world_size, flags = CASES[case]
    for rank in range(2 if STAGES in flags else 1):
        with running(text, tmp_path, f"{SHAPE} {flags}", rank=rank, world_size=world_size) as (run, gpu):
            print(f"{case}, rank {rank}: planner / device {check_peak(run, gpu):.3f}")
