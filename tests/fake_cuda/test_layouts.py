"""Steps of all ranks of a layout: the same collectives in the same order, and what one sends the other receives, with
contiguous CUDA tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.modes import DOCUMENTS, DROPOUT
from tests.fake_cuda.program import check_same_order

# Ranks, model-parallel size, flags.
LAYOUTS: dict[str, tuple[int, int, list[str]]] = {
    "data": (4, 1, []),
    "model": (4, 4, []),
    "both": (4, 2, ["--global-batch-size", "8"]),
    "sequence": (4, 4, ["--sequence-parallel", *DROPOUT]),
    "sequence, full": (2, 2, ["--sequence-parallel", "--recompute-granularity", "full"]),
    "sharded": (4, 1, ["--use-distributed-optimizer"]),
    "sharded, sequence, bf16 gradients": (
        4,
        2,
        ["--sequence-parallel", "--use-distributed-optimizer", "--grad-reduce-in-bf16", *DROPOUT],
    ),
    "sharded, offload": (2, 1, ["--use-distributed-optimizer", "--cpu-offload-optimizer"]),
    "sharded gradients, accumulation": (4, 2, ["--zero-stage", "2", "--global-batch-size", "8"]),
    "parts of inputs on the host": (
        2,
        2,
        ["--recompute-granularity", "full", "--partition-activations", "--checkpoint-in-cpu"],
    ),
    "documents": (2, 2, DOCUMENTS),
    "fp16": (4, 2, ["--precision", "fp16"]),
    "pipeline": (4, 1, ["--pipeline-model-parallel-size", "4", "--num-layers", "4", "--global-batch-size", "12"]),
    "pipeline, interleaved, data, sharded, full": (
        4,
        1,
        [
            "--pipeline-model-parallel-size",
            "2",
            "--num-layers",
            "4",
            "--num-layers-per-virtual-pipeline-stage",
            "1",
            "--global-batch-size",
            "12",
            "--use-distributed-optimizer",
            "--recompute-granularity",
            "full",
        ],
    ),
    "pipeline, zero-bubble, sequence": (
        4,
        2,
        [
            "--pipeline-model-parallel-size",
            "2",
            "--pipeline-schedule",
            "zero-bubble",
            "--sequence-parallel",
            "--global-batch-size",
            "6",
            "--precision",
            "fp16",
            *DROPOUT,
        ],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_calls_the_same(text: Path, tmp_path: Path, layout: str):
    world_size, model_parallel_size, flags = LAYOUTS[layout]
    check_same_order(text, tmp_path, flags, world_size, model_parallel_size)
