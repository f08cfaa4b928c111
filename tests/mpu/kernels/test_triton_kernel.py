"""A kernel that differs from its reference, or fails, is replaced by the reference, and the log says so once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mpu.kernels.triton_kernel import TritonKernel, example_tensor


def scaled(x: Tensor, others: list[Tensor], factor: float) -> None:
    x.mul_(factor)
    for other in others:
        other.add_(1)


def right(x: Tensor, others: list[Tensor], factor: float) -> None:
    x.copy_(x.float() * factor)
    torch._foreach_add_(others, 1.0)


def wrong(x: Tensor, others: list[Tensor], factor: float) -> None:
    right(x, others, factor)
    others[1].view(-1)[-1] += 0.1


def nan(x: Tensor, others: list[Tensor], factor: float) -> None:
    right(x, others, factor)
    x[0, 0] = torch.nan


def missing(x: Tensor, others: list[Tensor], factor: float) -> None:
    raise ImportError("No module named 'triton'\n(in two lines)")


def examples(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    parts = [example_tensor(size, dtype=torch.float32, device=device) for size in (3, 5)]
    yield example_tensor(2, 7, dtype=dtype, device=device), parts, 0.3


@pytest.mark.parametrize(
    "kernel, reason",
    [
        (right, None),
        (wrong, r"it differs from its reference by \d.\de-02 of the largest value \(5,\)"),
        (nan, "it differs from its reference by nan"),
        (missing, r"it raised ImportError: No module named 'triton' \(in two lines\)"),
    ],
)
def test_a_kernel_is_compared_before_its_first_use(
    kernel: Callable[..., None], reason: str | None, caplog: pytest.LogCaptureFixture
):
    tested = TritonKernel(f"test_{kernel.__name__}", scaled, kernel, examples, mutates_args=("x", "others"))
    before = torch.get_rng_state()
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        x, others = torch.ones(4, 4, dtype=dtype), [torch.zeros(2), torch.zeros(3)]
        tested.operator(x, others, 0.5)
        assert torch.equal(x, torch.full_like(x, 0.5)) and all((other == 1).all() for other in others)
    assert torch.equal(torch.get_rng_state(), before)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (0 if reason is None else 2), "one for each dtype"
    for line, name in zip(lines, ("float32", "bfloat16"), strict=False):
        assert "\n" not in line and f"the Triton kernel {tested.name} is not used for {name}: " in line
        assert re.search(reason, line)


def test_a_cpu_takes_the_reference():
    tested = TritonKernel("test_on_a_cpu", scaled, missing, examples, mutates_args=("x", "others"))
    x = torch.ones(2, 2)
    tested(x, [torch.zeros(1)], 0.25)
    assert torch.equal(x, torch.full_like(x, 0.25))
