"""The fused layer on a GPU: its kernels spill no registers, and it moves less memory than torch's operators."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest

from mpu.kernels.layer import WIDEST
from tests.fake_cuda.fake_inductor import assembled
from tests.fake_cuda.program import running, steps
from tests.fake_cuda.test_kernels import ARCHITECTURES

FLOAT32 = ("sums", "mean", "rstd")
NUMBERS = {
    **dict.fromkeys("t b h f n d rows stride_s stride_b stride_n first_position dropped".split(), "i32"),
    **dict.fromkeys(("eps", "keep_scale"), "fp32"),
    **dict.fromkeys(FLOAT32, "*fp32"),
    "seeds": "*i64",
}
CASES: dict[str, list[dict[str, Any]]] = {  # The constants of each kernel, without its tile.
    "gelu_backward_kernel": [{"TANH": True}, {"TANH": False}],
    "stack_qkv_kernel": [{}],
    "add_norm_kernel": [{"LOCATION": 2, "DROPOUT": True, "NORM": True}],
    "add_norm_backward_kernel": [{"LOCATION": 2, "DROPOUT": True, "NORM": True}],
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("element", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_it_spills_nothing(name: str, element: str, architecture: str):
    from mpu.kernels import in_triton

    kernel = getattr(in_triton, name)
    for case in CASES[name]:
        constants: dict[str, Any] = {**in_triton.tile(WIDEST), **case}
        warps = constants.pop("num_warps")
        if "COLUMNS" in kernel.arg_names:
            columns = {"gelu_backward_kernel": in_triton.GELU_COLUMNS, "stack_qkv_kernel": 64}[name]
            constants = {**case, "ROWS": in_triton.LAYER_TILE // columns, "COLUMNS": columns}
            warps = in_triton.LAYER_WARPS
        types = {
            argument: "constexpr" if argument in constants else NUMBERS.get(argument, f"*{element}")
            for argument in kernel.arg_names
        }
        found = assembled(name, kernel, types, constants, architecture, options={"num_warps": warps})
        assert not found.spilled and not found.stack and found.registers * warps * 32 <= 65536, found


def passes(text: Path, save: Path, flags: str) -> float:
    """Return how often a layer reads or writes as many elements as its input has, outside of matrix products and
    attention: the difference between models of three layers and of two."""
    counts = []
    for layers in (2, 3):
        with running(text, save, f"--num-layers {layers} --micro-batch-size 16 {flags}") as (trainer, gpu):
            steps(trainer, gpu)
        moved: collections.Counter[str] = collections.Counter()
        for kernel in gpu.kernels:
            if kernel.place.startswith("mpu/grads.py") or kernel.place.startswith("megatron/gpt2/optimizer"):
                continue
            moved[kernel.name] += kernel.read + kernel.written
        counts.append(moved)
    products = {name for name in counts[0] if name in ("mm", "addmm") or "attention" in name}
    return sum((counts[1] - counts[0])[name] for name in counts[1] if name not in products) / (16 * 256 * 1024 * 2)


@pytest.mark.parametrize("flags, most", [("--compile", 44.1), ("--hidden-dropout 0.1", 46.1)])
def test_a_layer_moves_little_memory(text: Path, tmp_path: Path, flags: str, most: float):
    """torch's operators move 63 and 71, Inductor's kernels 56 and 65."""
    assert most - 1 < passes(text, tmp_path, flags) < most
