"""The Triton kernels of a compiled graph, taken through Triton and ptxas as on a machine with the GPU."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Assembled:
    """What ptxas says of a kernel in one of the configurations that Inductor would try. spilled: bytes of registers
    that go to memory, stores and loads. stack: bytes."""

    name: str
    architecture: str
    registers: int
    spilled: int
    stack: int


def triton_kernels(source: str, folder: Path) -> dict[str, Any]:
    """The kernels in a module that Inductor wrote, by name, ready to be compiled. folder: for a file of each, since
    Triton reads the source again."""
    kernels = {}
    for name, code in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", source, re.DOTALL):
        path = folder / f"{name}.py"
        path.write_text(code)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with mock.patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu"):  # there is none
            spec.loader.exec_module(module)
        kernels[name] = getattr(module, name)
    return kernels


def assemble(kernel: Any, architecture: str, most_registers: int = 255) -> list[Assembled]:
    """Each configuration of a kernel of Inductor's that it would measure, for "sm_80" or "sm_90a"."""
    found = []
    for config in kernel.configs:
        meta = kernel._create_compile_meta(config)
        found.append(
            assembled(
                f"{kernel.inductor_meta['kernel_name']} {config}",
                kernel.fn,
                meta["signature"],
                meta["constants"],
                architecture,
                attributes=meta["configs"][0],
                options=kernel._create_compile_options(config, meta),
                most_registers=most_registers,
            )
        )
    return found


def assembled(
    name: str,
    function: Any,
    signature: dict[str, str],
    constants: dict[Any, Any],
    architecture: str,
    *,
    attributes: Any = None,
    options: Any = None,
    most_registers: int = 255,
) -> Assembled:
    """A function of Triton, whose arguments have these types and constants. most_registers: of a thread."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    target = GPUTarget("cuda", int(architecture.strip("sm_a")), 32)
    binary = triton.compile(ASTSource(function, signature, constants, attributes), target=target, options=options)
    code = binary.asm["ptx"].replace(".reqntid", f".maxnreg {most_registers}\n.reqntid")
    said = subprocess.run(
        [get_ptxas(target.arch).path, "-v", f"--gpu-name={architecture}", "-", "-o", "/dev/null"],
        input=code,
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    return Assembled(
        name,
        architecture,
        number(r"Used (\d+) registers", said),
        number(r"(\d+) bytes spill stores", said) + number(r"(\d+) bytes spill loads", said),
        number(r"(\d+) bytes stack frame", said),
    )


def number(pattern: str, text: str) -> int:
    """What the pattern's group holds. AssertionError where ptxas said nothing of it."""
    match = re.search(pattern, text)
    assert match, text
    return int(match[1])
