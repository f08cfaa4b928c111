"""In a step, all ranks of a layout call the same collectives in the same order, with contiguous CUDA tensors, sends
match receives, and the last rank calls exactly those of budgets.json. With --exact-layouts, every layout runs the same
operations on the same shapes in the same order, divided over the ranks, and settings for bit-identical results on a GPU
are active."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch

from tests.fake_cuda.fake_gpu import Kernel
from tests.fake_cuda.program import DOCUMENTS, DROPOUT, check_budget, check_same_order, running, steps

TWO, FOUR = "--model-parallel-size 2", "--model-parallel-size 4"
SEQUENCE, SHARDED, FULL = "--sequence-parallel", "--use-distributed-optimizer", "--recompute-granularity full"
STAGES = "--pipeline-model-parallel-size 2 --num-layers 4"
LAYOUTS = {  # ranks and flags
    "data": (4, ""),
    "model": (4, FOUR),
    "both": (4, f"{TWO} --global-batch-size 8"),
    "sequence": (4, f"{FOUR} {SEQUENCE} {DROPOUT}"),
    "sequence, full": (2, f"{TWO} {SEQUENCE} {FULL}"),
    "sharded": (4, SHARDED),
    "sharded, sequence, bf16 gradients": (4, f"{TWO} {SEQUENCE} {SHARDED} --grad-reduce-in-bf16 {DROPOUT}"),
    "sharded, offload": (2, f"{SHARDED} --cpu-offload-optimizer"),
    "sharded gradients, accumulation": (4, f"{TWO} --zero-stage 2 --global-batch-size 8"),
    "parts of inputs on the host": (2, f"{TWO} {FULL} --partition-activations --checkpoint-in-cpu"),
    "documents": (2, f"{TWO} {DOCUMENTS}"),
    "fp16": (4, f"{TWO} --precision fp16"),
    "pipeline": (4, "--pipeline-model-parallel-size 4 --num-layers 4 --global-batch-size 12"),
    "pipeline, interleaved, data, sharded, full": (
        4,
        f"{STAGES} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 12 {SHARDED} {FULL}",
    ),
    "pipeline, zero-bubble, sequence": (
        4,
        f"{TWO} --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble {SEQUENCE} --global-batch-size 6 "
        f"--precision fp16 {DROPOUT}",
    ),
}
PARTS = 4
EXACT = f"--exact-layouts {PARTS} --hidden-dropout 0.1"
# The kernels of these operators add elements of a sum that a layout could split, or that are divided into parts.
ATTENTION = "_scaled_dot_product_flash_attention"
SPLIT = ("mm", "addmm", "bmm", ATTENTION, f"{ATTENTION}_backward", "gelu", "gelu_backward")
SUMS = (*SPLIT, "native_layer_norm_backward", "sum", "dot", "index_add_")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_calls_the_same_within_a_budget(text: Path, tmp_path: Path, layout: str):
    ranks, flags = LAYOUTS[layout]
    check_budget(f"{layout}, {ranks} ranks", check_same_order(text, tmp_path, flags, ranks))


def test_each_rank_runs_its_parts_in_one_order(text: Path, tmp_path: Path):
    one = runs(traced(text, tmp_path / "one", "", 1, 0))
    assert {kernel[0] for kernel, _ in one} == set(SUMS) - {"bmm"}
    assert all(count % PARTS == 0 for (name, _), count in one if name in SPLIT)
    for size, rank, flags in ((2, 1, "--sequence-parallel"), (4, 2, "")):
        here = runs(traced(text, tmp_path / str(size), flags, size, rank))
        assert [kernel for kernel, _ in here] == [kernel for kernel, _ in one], f"{size} ranks, {flags}"
        for (kernel, count), (_, whole) in zip(here, one, strict=True):
            shares = (size,) if kernel[0] in SPLIT else (1, size)
            assert whole in [count * share for share in shares], f"{kernel}: {count} of {whole}, {size} ranks, {flags}"


def test_torch_has_one_algorithm_for_each_shape_while_the_run_lasts(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for flags in (EXACT, "--deterministic"):
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        with running(text, tmp_path, flags):
            assert torch.are_deterministic_algorithms_enabled()
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.are_deterministic_algorithms_enabled()


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
        assert not gpu.waits and not gpu.faults
        return list(gpu.kernels)


def runs(kernels: list[Kernel]) -> list[tuple[tuple[str, tuple[tuple[int, ...], ...]], int]]:
    """Return the sums among `kernels` by name and shapes, with the number of equal ones in a row. The gradient norm is
    left out, because it adds integers, whose order does not matter."""
    sums = [
        (kernel.name, kernel.shapes)
        for kernel in kernels
        if kernel.name in SUMS and not kernel.place.startswith("megatron/gpt2/extensions/exact/norm.py")
    ]
    return [(key, len(list(equal))) for key, equal in itertools.groupby(sums)]
