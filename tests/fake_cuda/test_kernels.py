"""Triton kernels, assembled for two GPU architectures, spill no registers and compute what their references compute."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.fake_inductor import assembled

ARCHITECTURES = ("sm_80", "sm_90a")
# A Triton function, the types of its arguments, its constants, and its warps.
Described = tuple[Any, dict[str, str], dict[str, Any], int]


def test_the_values_are_those_of_the_references():
    done = subprocess.run(
        [sys.executable, *"-m pytest -q -p no:cacheprovider".split(), Path(__file__).with_name("interpreted.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def dropout(element: str) -> Described:
    from mpu.kernels.in_triton import DROPOUT_BLOCKS, DROPOUT_WARPS, dropout_kernel

    types = {
        "x": f"*{element}",
        "out": f"*{element}",
        "seeds": "*i64",
        **dict.fromkeys(("b", "h", "first_position", "dropped"), "i32"),
        "keep_scale": "fp32",
    }
    return dropout_kernel, types, {"LOCATION": 2, "BLOCKS": DROPOUT_BLOCKS}, DROPOUT_WARPS


def cross_entropy(element: str, find_stats: bool = True, write_gradient: bool = True) -> Described:
    from mpu.kernels.in_triton import LOSS_COLUMNS, LOSS_WARPS, cross_entropy_kernel

    types = {
        "logits": f"*{element}",
        **dict.fromkeys(("stats", "weight"), "*fp32"),
        "target": "*i64",
        "is_local": "*i1",
        "tokens": "i32",
    }
    return (
        cross_entropy_kernel,
        types,
        {
            "COLUMNS": 50257,
            "WIDTH": 50304,
            "FIND_STATS": find_stats,
            "WRITE_GRADIENT": write_gradient,
            "BLOCK": LOSS_COLUMNS,
        },
        LOSS_WARPS,
    )


def on_lists(element: str, name: str, **constants: Any) -> Described:
    """A kernel of lists of tensors, whose 16-bit or float32 elements have the type `element`."""
    from mpu.kernels import in_triton

    function = getattr(in_triton, name)
    of_elements = {"x", "param"} if name != "squares_kernel" else set()
    pointers = {"master", "grad", "exp_avg", "exp_avg_sq", "total", "partial_sums", "step", "rate", "grad_scale"}
    constants |= {
        "TENSORS": 128,
        "SIZE_UNIT": 16,
        "UNIT": in_triton.UNIT,
        "CHUNK": in_triton.CHUNK,
        "BLOCK": in_triton.LIST_BLOCK,
    }
    types = {
        argument: f"*{element}"
        if argument in of_elements
        else "*i64"
        if argument == "table"
        else "i32"
        if argument == "tensors"
        else "*fp32"
        if argument in pointers | {"x", "found_inf"}
        else "fp32"
        for argument in function.arg_names
        if argument not in constants
    }
    return function, types, constants, in_triton.LIST_WARPS


# A description for an element type, and how many registers a thread may have.
KERNELS: dict[str, tuple[Callable[[str], Described], int]] = {
    "seeded dropout": (dropout, 64),
    "cross-entropy": (cross_entropy, 64),
    "statistics": (functools.partial(cross_entropy, write_gradient=False), 64),
    "gradient": (functools.partial(cross_entropy, find_stats=False), 64),
    "sum of squares": (functools.partial(on_lists, name="squares_kernel"), 96),
    "sum of gradients": (functools.partial(on_lists, name="add_kernel", ADD=True), 64),
    "AdamW": (functools.partial(on_lists, name="adamw_kernel", HAS_PARAM=True), 64),
    "AdamW in float32": (functools.partial(on_lists, name="adamw_kernel", HAS_PARAM=False), 64),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("element", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_it_spills_nothing(architecture: str, element: str, kernel: str):
    describe, registers = KERNELS[kernel]
    function, types, constants, warps = describe(element)
    aligned = [number for number, of in enumerate(types.values()) if of.startswith("*")]
    found = assembled(
        kernel,
        function,
        types | dict.fromkeys(constants, "constexpr"),
        constants,
        architecture,
        attributes={(number,): [["tt.divisibility", 16]] for number in aligned},
        options={"num_warps": warps},
    )
    print(found)
    assert not found.spilled and not found.stack and found.registers <= registers, found
