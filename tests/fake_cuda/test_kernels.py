"""Triton kernels of compiled layers and of dropout, assembled for two GPU architectures, spill no registers. The
dropout kernel drops the same elements as the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_cuda.fake_inductor import assemble, assembled, triton_kernels
from tests.fake_cuda.program import DROPOUT, running, steps

ARCHITECTURES = ("sm_80", "sm_90a")
SHAPE = "--compile --seq-length 1024 --max-position-embeddings 1024"
MODELS = {
    "345M": "--micro-batch-size 32",
    "1.5B, fp16, dropout": "--hidden-size 1600 --num-attention-heads 25 --micro-batch-size 16 --precision fp16 "
    f"{DROPOUT}",
}


@pytest.mark.parametrize("model", MODELS)
def test_no_kernel_of_a_compiled_layer_spills(text: Path, tmp_path: Path, model: str):
    with running(text, tmp_path, f"{SHAPE} {MODELS[model]}") as (trainer, gpu):
        steps(trainer, gpu)
    kernels = [kernel for source in gpu.sources for kernel in triton_kernels(source, tmp_path).values()]
    made = [found for kernel in kernels for name in ARCHITECTURES for found in assemble(kernel, name)]
    assert len(made) > 20 and not [kernel for kernel in made if kernel.spilled or kernel.stack]
    needed = {found.name.split()[0]: found.registers for found in made}
    kernels.sort(key=lambda kernel: needed[kernel.inductor_meta["kernel_name"]], reverse=True)
    assert any(found.spilled for kernel in kernels for found in assemble(kernel, "sm_80", most_registers=16)), (
        "none would be seen"
    )


# Triton's interpreter runs a kernel with NumPy. It must be enabled before Triton is imported.
SAME = """
import torch, mpu
from mpu.kernels.dropout import drop_threshold, keep_scale, seeded_dropout
from mpu.kernels.dropout_triton import dropout_on_gpu
for s, b, h, dtype in ((5, 3, 96, torch.float32), (3, 2, 100, torch.bfloat16), (2, 2, 1500, torch.float16)):
    x = torch.randn(s, b, h).to(dtype)
    seeds = mpu.dropout_seeds(2**31 - 5, 2**40 + torch.arange(b), 4)[3]
    here = seeded_dropout(x, 0.3, seeds, 2, 7)
    there = dropout_on_gpu(x, seeds, 2, 7, drop_threshold(0.3), keep_scale(0.3))
    assert torch.equal(here == 0, there == 0) and 0.2 < (here == 0).float().mean() < 0.4
    assert torch.allclose(here.float(), there.float(), rtol=2**-7 if dtype == torch.bfloat16 else 2**-10)
"""


def test_it_drops_what_the_cpu_drops():
    done = subprocess.run(
        [sys.executable, "-c", SAME],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("element", ["bf16", "fp16", "fp32"])
def test_it_spills_nothing(architecture: str, element: str):
    from mpu.kernels.dropout_triton import BLOCKS, WARPS, dropout_kernel

    types = {
        "x": f"*{element}",
        "out": f"*{element}",
        "seeds": "*i64",
        **dict.fromkeys(("b", "h", "first_position", "dropped"), "i32"),
        "keep_scale": "fp32",
        **dict.fromkeys(("LOCATION", "BLOCKS"), "constexpr"),
    }
    found = assembled(
        "seeded dropout",
        dropout_kernel,
        types,
        {"LOCATION": 2, "BLOCKS": BLOCKS},
        architecture,
        options={"num_warps": WARPS},
    )
    assert not found.spilled and not found.stack and found.registers <= 64, found
