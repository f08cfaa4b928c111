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
    """Each configuration of a kernel that Inductor would measure, for "sm_80" or "sm_90a". most_registers: of a
    thread."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    found = []
    target = GPUTarget("cuda", int(architecture.strip("sm_a")), 32)
    for config in kernel.configs:
        meta = kernel._create_compile_meta(config)
        binary = triton.compile(ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0]),
                                target=target, options=kernel._create_compile_options(config, meta))
        code = binary.asm["ptx"].replace(".reqntid", f".maxnreg {most_registers}\n.reqntid")
        said = subprocess.run([get_ptxas(target.arch).path, "-v", f"--gpu-name={architecture}", "-", "-o", "/dev/null"],
                              input=code, capture_output=True, text=True, check=True).stderr
        found.append(Assembled(
            f"{kernel.inductor_meta['kernel_name']} {config}", architecture, number(r"Used (\d+) registers", said),
            number(r"(\d+) bytes spill stores", said) + number(r"(\d+) bytes spill loads", said),
            number(r"(\d+) bytes stack frame", said)))
    return found


def number(pattern: str, text: str) -> int:
    """What the pattern's group holds. AssertionError where ptxas said nothing of it."""
    match = re.search(pattern, text)
    assert match, text
    return int(match[1])
