"""The kernel that drops on a GPU: the same elements as on the CPU, and code without spills for two kinds of GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.fake_cuda.ptxas import assembled

# Triton's interpreter computes a kernel with numpy; it has to be chosen before Triton is loaded.
SAME = """
import torch, mpu
from mpu.kernels.dropout import keyed_dropout
from mpu.kernels.dropout_triton import dropped_on_gpu
for s, b, h, dtype in ((5, 3, 96, torch.float32), (3, 2, 100, torch.bfloat16), (2, 2, 1500, torch.float16)):
    x = torch.randn(s, b, h).to(dtype)
    keys = mpu.dropout_keys(2**31 - 5, 2**40 + torch.arange(b), 4)[3]
    here, there = keyed_dropout(x, 0.3, keys, 2, 7), dropped_on_gpu(x, 0.3, keys, 2, 7)
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


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("element", ["bf16", "fp16", "fp32"])
def test_it_spills_nothing(architecture: str, element: str):
    from mpu.kernels.dropout_triton import BLOCKS, WARPS, dropout_kernel

    types = {
        "x": f"*{element}",
        "out": f"*{element}",
        "keys": "*i64",
        "b": "i32",
        "h": "i32",
        "first_position": "i32",
        "dropped": "i32",
        "factor": "fp32",
        "SITE": "constexpr",
        "BLOCKS": "constexpr",
    }
    found = assembled(
        "keyed dropout",
        dropout_kernel,
        types,
        {"SITE": 2, "BLOCKS": BLOCKS},
        architecture,
        options={"num_warps": WARPS},
    )
    assert not found.spilled and not found.stack and found.registers <= 64, found
