"""torch.compile for the fake GPU: Inductor generates code for an H200, which is not run.

with FakeGPU() as gpu, fake_inductor(gpu):
    layer.compile()
    layer(x).sum().backward()
gpu.kernels             # includes the kernels of the compiled graphs
"""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
import types
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput, MultiOutputLayout, NoneLayout
from torch._inductor.scheduler import NopKernelSchedulerNode

from tests.fake_cuda.fake_gpu import H200, FakeGPU, Kernel


def driver() -> Any:
    """Return a Triton driver for an H200."""
    from triton.backends.compiler import GPUTarget

    properties = {
        "max_shared_mem": H200.shared_memory_per_block_optin,
        "multiprocessor_count": H200.multi_processor_count,
    }
    return types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=lambda device: properties),
        get_current_target=lambda: GPUTarget("cuda", 10 * H200.major + H200.minor, H200.warp_size),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
    )


@contextlib.contextmanager
def fake_inductor(gpu: FakeGPU) -> Iterator[None]:
    """Let compiled graphs return empty tensors. Each call of a graph adds the graph's kernels to `gpu.kernels`."""
    import triton

    numbers = itertools.count()

    def compile_to_module(lowering: GraphLowering) -> Any:
        lowering.codegen()
        kernels = kernels_of(lowering.scheduler.nodes)
        results = list(lowering.graph_outputs)

        def call(arguments: list[Any]) -> tuple[Any, ...]:
            made = tuple(empty(result) for result in results)
            arguments.clear()  # Clear arguments, as Inductor's code does, to free tensors early.
            gpu.kernels.extend(kernels)
            return made

        name = f"graph_{next(numbers)}"
        return types.SimpleNamespace(
            call=call, runner=None, __file__=f"{name}.py", key=name, path="", print_performance=None
        )

    interface: dict[str, Any] = {
        "get_compute_capability": lambda device=None: "90",
        "is_available": lambda: True,
        "get_device_properties": lambda device=None: H200,
        "current_device": lambda: 0,
        "get_raw_stream": lambda index: 0,
        "synchronize": lambda device=None: None,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            inductor_config.patch(
                {  # type: ignore[no-untyped-call]
                    "fx_graph_cache": False,
                    "compile_threads": 1,
                    "triton.autotune_at_compile_time": False,
                }
            )
        )
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))  # type: ignore[no-untyped-call]
        for name, value in interface.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(value)))
        for name in ("get_device_properties", "current_device"):
            stack.enter_context(mock.patch.object(CudaInterface.Worker, name, staticmethod(interface[name])))
        stack.enter_context(mock.patch("torch.utils._triton.has_triton", lambda: True))
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", compile_to_module))
        triton.runtime.driver.set_active(driver())
        torch._dynamo.reset()
        try:
            yield
        finally:
            torch._dynamo.reset()


def empty(result: Any) -> Tensor | None:
    """Return a tensor without values that is like an output of the graph."""
    try:
        size, stride = (tuple(map(int, of)) for of in (result.get_size(), result.get_stride()))
    except (AttributeError, NotImplementedError):
        return None
    return torch.empty_strided(size, stride, dtype=result.get_dtype(), device=result.get_device())


def kernels_of(nodes: list[Any]) -> tuple[Kernel, ...]:
    """Return the kernels of Inductor's schedule. Generated kernels have the name "triton"."""
    kernels = []
    for node in nodes:
        # A MultiOutput is a part of a kernel that is already counted, and a NopKernelSchedulerNode runs nothing.
        if isinstance(node.node, MultiOutput) or isinstance(node, NopKernelSchedulerNode):
            continue
        written = sum(
            int(output.node.get_layout().storage_size()) * output.node.get_dtype().itemsize
            for output in node.get_outputs()
            if not isinstance(output.node.layout, MultiOutputLayout | NoneLayout)
        )
        moved = int(node.get_read_write_buffers_sizes())
        name: str = "triton"
        shapes: tuple[tuple[int, ...], ...] = ()
        if node.is_extern():
            name = re.sub(r"extern_kernels\.|torch\.ops\.|aten\.|mpu\.", "", node.node.python_kernel_name).split(".")[0]
            shapes = tuple(
                tuple(map(int, given.get_size()))
                for given in node.node.inputs
                if not isinstance(given.layout, MultiOutputLayout)
            )
        kernels.append(Kernel(name, max(moved - written, 0), written, "compiled layer", shapes))
    return tuple(kernels)


# --- Triton kernels, compiled by Triton and ptxas as on a machine with the GPU ----------------------------------------


class Assembled(NamedTuple):
    """The report of ptxas for a kernel.

    registers: number of registers of a thread.
    spilled: bytes of register spills, stores and loads.
    stack: bytes of the stack.
    shared: bytes of shared memory of a program, according to Triton.
    """

    registers: int
    spilled: int
    stack: int
    shared: int


def assembled(
    function: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    architecture: str,
    *,
    attributes: dict[tuple[int], Any],
    **options: int,
) -> Assembled:
    """Compile a Triton function with these argument types and constants.

    options: num_warps and num_stages.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    target = GPUTarget("cuda", int(architecture.strip("sm_a")), 32)
    source = ASTSource(function, signature, constants, attributes)
    compiled = triton.compile(source, target=target, options=options)
    said = subprocess.run(
        [get_ptxas(target.arch).path, "-v", f"--gpu-name={architecture}", "-", "-o", "/dev/null"],
        input=compiled.asm["ptx"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    return Assembled(
        number(r"Used (\d+) registers", said),
        number(r"(\d+) bytes spill stores", said) + number(r"(\d+) bytes spill loads", said),
        number(r"(\d+) bytes stack frame", said),
        compiled.metadata.shared,
    )


def number(pattern: str, text: str) -> int:
    """Return the number that the pattern finds in ptxas's report `text`."""
    match = re.search(pattern, text)
    assert match, text
    return int(match[1])
