"""Kernels in Triton for GPUs, each with a function in plain PyTorch as its reference.

A GPU kernel consists of three functions and a line. The Triton code is in a separate file, which is imported only when
a GPU uses it. Triton is a part of torch's builds for GPUs.

    def _halve_(x: Tensor, factor: float) -> None:  # the reference. Its annotations give the operator's schema.
        x.mul_(factor)

    def _in_triton(x: Tensor, factor: float) -> None:
        from mpu.kernels.in_triton import halve_on_gpu
        halve_on_gpu(x, factor)

    def _examples(device: torch.device, dtype: torch.dtype) -> Iterable[tuple[Any, ...]]:
        yield example_tensor(3, 100, dtype=dtype, device=device), 0.5

    halve_ = TritonKernel("halve_", _halve_, _in_triton, _examples, mutates_args=("x",))
    halve_(x, 0.5)

A call on a CPU calls the reference. A call on a GPU calls the custom operator `mpu::halve_`, which torch.compile does
not trace into. In a run, the operator's first call with a dtype compares the Triton kernel with the reference on the
examples. If they differ, or if the kernel cannot be compiled, one line in the log of Python's `logging` says so, and
the run uses the reference. A GPU or a compiler that was never tested can therefore make a run slower, but cannot change
its results.

To test a Triton kernel without a GPU, call it, or `TritonKernel.run`, with CPU tensors in Triton's interpreter
(TRITON_INTERPRET=1); see `tests/fake_cuda/interpreted.py`.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R", bound="Tensor | tuple[Tensor, ...] | None")

MIN_TOLERANCE = 1e-5


class TritonKernel(Generic[P, R]):
    """An operation with a Triton kernel for GPUs. See the module's docstring.

    name: the name of the operator in torch.ops.mpu.
    reference: the operation in plain PyTorch, for every device. Its first argument is a tensor, or a list of
        tensors with at least one, which decides device and dtype. An operator either returns new tensors, or
        writes into arguments and returns None.
    kernel: the operation in Triton, with the same arguments.
    examples: (device, dtype) -> lists of small arguments for the comparison. They must not use torch's
        generators, whose states belong to the run: see `example_tensor`.
    mutates_args: names of the arguments that the operation writes into.
    fake: returns tensors of the results' shapes and dtypes, for tensors without values (default: the reference). A
        reference that reads values or uses the CPU needs such a function.

    written: the positions of the arguments that the operation writes into.
    operator: the custom operator, for callers that must not be traced by torch.compile on a CPU either.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[P, R],
        kernel: Callable[P, R],
        examples: Callable[[torch.device, torch.dtype], Iterable[tuple[Any, ...]]],
        mutates_args: Sequence[str] = (),
        fake: Callable[..., R] | None = None,
    ) -> None:
        self.name, self.reference, self.kernel, self.examples = name, reference, kernel, examples
        self.fake = fake or reference
        names = list(inspect.signature(reference).parameters)
        self.written = [names.index(name) for name in mutates_args]
        self._chosen: dict[torch.dtype, Callable[P, R]] = {}
        self.operator = torch.library.custom_op(
            f"mpu::{name}",
            self.run,
            mutates_args=mutates_args,
            schema=torch.library.infer_schema(reference, mutates_args=mutates_args),
        )
        self.operator.register_fake(self.fake)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # On a CPU, call the reference directly: a call of the operator loads torch's compiler, which takes 1 s and 70
        # MB.
        function: Callable[P, R] = self.operator if _first_tensor(args).is_cuda else self.reference
        return function(*args, **kwargs)

    def run(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the Triton kernel, or the reference if their comparison has failed. The first call compares the kernel
        with the reference."""
        first = _first_tensor(args)
        device, dtype = first.device, first.dtype
        if dtype not in self._chosen:
            problem = self.compare(device, dtype)
            if problem:
                logging.getLogger(__name__).warning(
                    "WARNING: the Triton kernel %s is not used for %s: %s; its PyTorch reference is used, which is "
                    "slower",
                    self.name,
                    str(dtype).removeprefix("torch."),
                    problem,
                )
            self._chosen[dtype] = self.reference if problem else self.kernel
        return self._chosen[dtype](*args, **kwargs)

    def compare(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return how the kernel differs from its reference on the examples, or "" if they agree."""
        for example in self.examples(device, dtype):
            expected = self._results(self.reference, example)
            try:
                results = self._results(self.kernel, example)
            except Exception as error:  # If the kernel fails in any way, the reference replaces it.
                reason = " ".join(str(error).split())
                return f"it raised {type(error).__name__}: {reason[:200]}"
            for x, y in zip(expected, results, strict=True):
                difference = (y.double() - x.double()).abs().max() / x.double().abs().max().clamp_min(1e-30)
                if not difference <= tolerance(x.dtype):  # The condition is also true if the difference is NaN.
                    return f"it differs from its reference by {difference:.1e} of the largest value {tuple(x.shape)}"
        return ""

    def _results(self, function: Callable[..., Any], example: Sequence[Any]) -> list[Tensor]:
        """Return what a function returns and writes, without a change of `example`."""
        args = [
            value.clone()
            if isinstance(value, Tensor)
            else [x.clone() for x in value]
            if isinstance(value, list)
            else value
            for value in example
        ]
        made = function(*args)
        found = [made] if isinstance(made, Tensor) else [*(made or ())]
        for index in self.written:
            found += [args[index]] if isinstance(args[index], Tensor) else args[index]
        return [x for x in found if x.numel()]


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest difference between two ways to compute a tensor, relative to its largest value."""
    return max(2 * torch.finfo(dtype).eps, MIN_TOLERANCE) if dtype.is_floating_point else 0.0


def example_tensor(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return normally distributed numbers, the same in each call. This does not use torch's default generator."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


def _first_tensor(args: Sequence[Any]) -> Tensor:
    first: Tensor = args[0] if isinstance(args[0], Tensor) else args[0][0]
    return first
