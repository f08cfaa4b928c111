"""The reference replaces a kernel that fails or computes different results, and the log reports the kernel once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mpu.kernels import cross_entropy, dropout, layer, optimizer, triton_kernel
from mpu.kernels.triton_kernel import Examples, TritonKernel, example_tensor

KERNELS = list(
    dict.fromkeys(
        value
        for module in (dropout, cross_entropy, layer, optimizer)
        for value in vars(module).values()
        if isinstance(value, TritonKernel)
    )
)


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


def examples(dtype: torch.dtype) -> Examples:
    yield example_tensor(dtype, 2, 7), [example_tensor(torch.float32, size) for size in (3, 5)], 0.3


def unsupported(x: Tensor, others: list[Tensor], factor: float) -> None:
    return right(x, others, factor) if factor == 0.3 else NotImplemented


def kernel_of_test(name: str, kernel: Callable[..., None]) -> TritonKernel[Any, Any]:
    """Return an operator that adds 1 to `others` and multiplies x by `factor`, with this name and kernel."""

    def reference(x: Tensor, others: list[Tensor], factor: float) -> None:
        x.mul_(factor)
        for other in others:
            other.add_(1)

    reference.__name__ = name
    tested = TritonKernel(reference, examples, mutates_args=("x", "others"))
    tested.kernel = kernel
    return tested


@pytest.mark.parametrize(
    "kernel, reason",
    [
        (right, None),
        (unsupported, None),
        (wrong, r"it differs from its reference by \d.\de-02 of the largest value \(5,\)"),
        (nan, "it differs from its reference by nan"),
        (missing, r"it raised ImportError: No module named 'triton' \(in two lines\)"),
    ],
)
def test_a_kernel_is_compared_before_its_first_use(
    kernel: Callable[..., None], reason: str | None, caplog: pytest.LogCaptureFixture
):
    tested = kernel_of_test(f"test_{kernel.__name__}", kernel)
    before = torch.get_rng_state()
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        x, others = torch.ones(4, 4, dtype=dtype), [torch.zeros(2), torch.zeros(3)]
        tested.run(x, others, 0.5)
        assert torch.equal(x, torch.full_like(x, 0.5)) and all((other == 1).all() for other in others)
    assert torch.equal(torch.get_rng_state(), before)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (0 if reason is None else 2), "one for each dtype"
    for line, name in zip(lines, ("float32", "bfloat16"), strict=False):
        assert "\n" not in line and f"the Triton kernel {tested.name} is not used for {name}: " in line
        assert re.search(reason, line)


def test_the_operator_calls_only_the_reference_on_a_cpu(caplog: pytest.LogCaptureFixture):
    tested, x = kernel_of_test("test_on_a_cpu", missing), torch.ones(2, 2)
    tested.operator(x, [torch.zeros(1)], 0.5)
    assert x.sum() == 2 and not caplog.records


def test_a_wrong_returned_tensor_is_found():
    def test_double(x: Tensor) -> Tensor:
        return 2 * x

    tested = TritonKernel(test_double, lambda dtype: iter([(example_tensor(dtype, 3),)]))
    tested.kernel = lambda x: 2.1 * x
    assert "it differs from its reference" in tested.compare(torch.device("cpu"), torch.float32)


def test_a_measured_kernel_is_used_for_the_shapes_for_which_it_is_faster(monkeypatch: pytest.MonkeyPatch):
    def test_triple(x: Tensor, factor: float) -> Tensor:
        return 3 * x

    def kernel(x: Tensor, factor: float) -> Any:
        return 3 * x + 1e-6 if factor == 1.0 else NotImplemented

    timed: list[Tensor] = []
    times = {3: (1.0, 1.1), 4: (1.0, 1.04), 5: (1.1, 1.0)}  # {size: milliseconds of the kernel and the reference}

    def milliseconds(work: Callable[[], Tensor]) -> float:
        result = work()
        timed.append(result)
        return times[len(result)][bool((result == 3).all())]

    tested = TritonKernel(test_triple, lambda dtype: iter([(example_tensor(dtype, 3), 1.0)]), is_measured=True)
    tested.kernel = kernel
    monkeypatch.setattr(triton_kernel, "milliseconds", milliseconds)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: True))
    for size, is_kernel in ((3, True), (4, False), (3, True), (5, False)):
        assert (tested.run(torch.ones(size), 1.0) > 3).all() == is_kernel
    assert len(timed) == 2 * len(times), "each shape is timed once"
    assert tested.faster(torch.ones(3), 2.0) is test_triple, "the kernel does not support the arguments"
    torch.use_deterministic_algorithms(True)
    try:
        assert (tested.run(torch.ones(3), 1.0) == 3).all()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [line.partition(",")[0] for line in triton_kernel.new_choices()] == [
        f"test_triple: {name}" for name in ("Triton", "PyTorch", "PyTorch")
    ]
    assert not triton_kernel.new_choices() and len(timed) == 2 * len(times)


def test_a_kernel_that_supports_no_example_is_not_used(caplog: pytest.LogCaptureFixture):
    def test_quadruple(x: Tensor) -> Tensor:
        return 4 * x

    tested = TritonKernel(test_quadruple, lambda dtype: iter([(example_tensor(dtype, 3),)]), is_measured=True)
    tested.kernel = lambda x: NotImplemented
    assert (tested.run(torch.ones(2)) == 4).all() and not caplog.records
