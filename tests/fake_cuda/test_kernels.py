"""Triton kernels, assembled for two GPU architectures, spill no registers and compute what their references compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_cuda.fake_inductor import assembled

ARCHITECTURES = ("sm_80", "sm_90a")


def test_the_values_are_those_of_the_references():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", Path(__file__).with_name("interpreted.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        text=True,
        capture_output=True,
        timeout=300,
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
