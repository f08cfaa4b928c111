"""Triton kernels of compiled layers and of dropout, assembled for two GPU architectures, spill no registers. The
dropout kernel drops the same elements as the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.fake_cuda.fake_inductor import assembled

ARCHITECTURES = ("sm_80", "sm_90a")


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
