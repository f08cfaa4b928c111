"""Kernels in Triton for GPUs, each with a function in plain PyTorch as its reference.

A GPU kernel consists of a reference, examples and a function in `in_triton.py`. The function has the arguments of the
reference, and its name without the first underscore. `in_triton.py` is imported only when a GPU uses a kernel, because
Triton is a part of torch's builds for GPUs.

    def _halve_(x: Tensor, factor: float) -> None:  # The annotations of the reference give the operator's schema.
        x.mul_(factor)

    def _examples(dtype: torch.dtype) -> Examples:
        yield example_tensor(dtype, 3, 100), 0.5

    halve_ = TritonKernel(_halve_, _examples, mutates_args=("x",))
    halve_(x, 0.5)

A call on a CPU calls the reference. A call on a GPU or in a compiled layer calls the custom operator `mpu::halve_`,
which torch.compile does not trace into. In a run, the operator's first call with a dtype on a GPU compares the Triton
kernel with the reference on the examples. If the results differ, or if the kernel cannot be compiled, Python's
`logging` gets one line about it, and the run uses the reference. An operator with `is_measured` also compares the
times, and uses the faster of the two.

To test a Triton kernel without a GPU, call `TritonKernel.run` with CPU tensors in Triton's interpreter
(TRITON_INTERPRET=1); see `tests/fake_cuda/interpreted.py`.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R", bound="Tensor | tuple[Tensor, ...] | None")
Examples = Iterator[tuple[Any, ...]]

# This difference of a kernel from its reference is always allowed. It is relative to the reference's largest value.
MIN_TOLERANCE = 1e-5
# A choice that differs from the preferred one must be faster by this factor, so that few runs on one machine choose
# differently.
MIN_SPEEDUP = 1.05
REPEATS = 10  # timed calls

_choices: list[str] = []


class TritonKernel(Generic[P, R]):
    """An operation with a Triton kernel for GPUs. See the module's docstring.

    reference: the operation in plain PyTorch, for every device. The first argument is a tensor, or a list of tensors
        with at least one, which decides device and dtype. An operator either returns new tensors, or writes into
        arguments and returns None.
    examples: dtype -> lists of small arguments on the CPU for the comparison. Use `example_tensor` for random numbers,
        because torch's generators belong to the run.
    mutates_args: names of the arguments that the operation writes into.
    fake: returns tensors of the results' shapes and dtypes, for tensors without values (default: the reference). A
        reference that reads values or uses the CPU needs a fake.
    is_measured: the first call with arguments of these shapes on a GPU times the kernel and the reference, and later
        calls use the faster one. With torch's deterministic algorithms the reference is always used, because measured
        times differ between runs. The operator must not write into its arguments.

    name: the name of the operator in torch.ops.mpu, and of the kernel.
    written: the positions of the arguments that the operation writes into.
    operator: the custom operator. On a CPU it calls the reference.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        examples: Callable[[torch.dtype], Examples],
        mutates_args: Sequence[str] = (),
        fake: Callable[..., R] | None = None,
        is_measured: bool = False,
    ) -> None:
        self.name, self.reference, self.examples = reference.__name__.removeprefix("_"), reference, examples
        self.fake, self.is_measured = fake or reference, is_measured
        assert not (is_measured and mutates_args)
        names = list(inspect.signature(reference).parameters)
        self.written = [names.index(name) for name in mutates_args]
        self._chosen: dict[torch.dtype, Callable[P, R]] = {}
        self._faster: dict[tuple[Any, ...], Callable[P, R]] = {}
        self.operator = torch.library.custom_op(
            f"mpu::{self.name}",
            reference,
            mutates_args=mutates_args,
            schema=torch.library.infer_schema(reference, mutates_args=mutates_args),
        )
        self.operator.register_kernel("cuda")(self.run)
        self.operator.register_fake(self.fake)

    @functools.cached_property
    def kernel(self) -> Callable[P, R]:
        """The operation in Triton. The function returns NotImplemented for arguments that it does not support."""
        from mpu.kernels import in_triton

        found: Callable[P, R] = getattr(in_triton, self.name)
        return found

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # Else call the reference directly: a call of the operator loads torch's compiler, which takes 1 s and 70 MB.
        is_operator = _first_tensor(args).is_cuda or torch.compiler.is_compiling()
        function: Callable[P, R] = self.operator if is_operator else self.reference
        return function(*args, **kwargs)

    def run(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the Triton kernel, or the reference if their comparison has failed or the kernel does not support the
        arguments. The first call compares the kernel with the reference."""
        if self.is_measured and torch.are_deterministic_algorithms_enabled():
            return self.reference(*args, **kwargs)
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
        function = self._chosen[dtype]
        if self.is_measured and first.is_cuda and function is self.kernel:
            key = device, dtype, *(x.shape if isinstance(x, Tensor) else x for x in args)
            if key not in self._faster:
                self._faster[key] = self.faster(*args, **kwargs)
            function = self._faster[key]
        output = function(*args, **kwargs)
        return self.reference(*args, **kwargs) if output is NotImplemented else output

    def compare(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return how the kernel differs from its reference on the examples, or "" if they agree. Examples that the
        kernel does not support are skipped."""
        for example in self.examples(dtype):
            expected = self._results(self.reference, example, device)
            try:
                results = self._results(self.kernel, example, device)
            except Exception as error:  # If the kernel fails in any way, the reference replaces it.
                reason = " ".join(str(error).split())
                return f"it raised {type(error).__name__}: {reason[:200]}"
            if results is None:
                continue
            assert expected is not None
            for x, y in zip(expected, results, strict=True):
                difference = (y.double() - x.double()).abs().max() / x.double().abs().max().clamp_min(1e-30)
                # The condition is also true if the difference is NaN.
                if not difference <= max(2 * torch.finfo(x.dtype).eps, MIN_TOLERANCE):
                    return f"it differs from its reference by {difference:.1e} of the largest value {tuple(x.shape)}"
        return ""

    def faster(self, *args: P.args, **kwargs: P.kwargs) -> Callable[P, R]:
        """Return the kernel if it is faster than the reference for these arguments, else the reference."""
        if self.kernel(*args, **kwargs) is NotImplemented:
            return self.reference
        kernel, reference = (
            milliseconds(functools.partial(function, *args, **kwargs)) for function in (self.kernel, self.reference)
        )
        is_faster = kernel * MIN_SPEEDUP < reference
        chosen = "Triton" if is_faster else "PyTorch"
        _choices.append(f"{self.name}: {chosen}, the faster (ms: Triton {kernel:.2f}, PyTorch {reference:.2f})")
        return self.kernel if is_faster else self.reference

    def _results(
        self, function: Callable[..., Any], example: Sequence[Any], device: torch.device
    ) -> list[Tensor] | None:
        """Call a function with a copy of `example` on `device`, and return its results and the arguments that it
        changes. Return None if the function does not support the example."""

        def copied(value: Any) -> Any:
            if isinstance(value, list):
                return [copied(x) for x in value]
            return value.to(device, copy=True) if isinstance(value, Tensor) else value

        args = [copied(value) for value in example]
        output = function(*args)
        if output is NotImplemented:
            return None
        results = [output, *(args[index] for index in self.written)]
        flat = [x for result in results for x in (result if isinstance(result, tuple | list) else [result])]
        return [x for x in flat if isinstance(x, Tensor) and x.numel()]


def new_choices() -> list[str]:
    """Return a line for each choice of an `is_measured` operator since the last call."""
    lines = _choices[:]
    _choices.clear()
    return lines


def milliseconds(work: Callable[[], object]) -> float:
    """Return the median time of `work` on the current stream of the GPU."""
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return sorted(times)[REPEATS // 2]


def example_tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return normally distributed numbers, the same in each call, without torch's default generator."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _first_tensor(args: Sequence[Any]) -> Tensor:
    first: Tensor = args[0] if isinstance(args[0], Tensor) else args[0][0]
    return first
