"""The Triton code of compiled layers, made for two kinds of GPU: every value of a kernel stays in registers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda.program import running, steps
from tests.fake_cuda.ptxas import assemble, triton_kernels

ARCHITECTURES = ("sm_80", "sm_90a")
SHAPE = ["--compile", "--seq-length", "1024", "--max-position-embeddings", "1024"]
MODELS: dict[str, list[str]] = {
    "345M": ["--micro-batch-size", "32"],
    "1.5B, fp16, dropout": [
        "--hidden-size",
        "1600",
        "--num-attention-heads",
        "25",
        "--micro-batch-size",
        "16",
        "--precision",
        "fp16",
        "--attention-dropout",
        "0.1",
        "--hidden-dropout",
        "0.1",
    ],
}


@pytest.mark.parametrize("model", MODELS)
def test_no_kernel_of_a_compiled_layer_spills(text: Path, tmp_path: Path, model: str):
    with running(text, tmp_path, [*SHAPE, *MODELS[model]]) as (run, gpu):
        steps(run, gpu)
    kernels = [kernel for source in gpu.sources for kernel in triton_kernels(source, tmp_path).values()]
    assembled = [found for kernel in kernels for name in ARCHITECTURES for found in assemble(kernel, name)]
    assert len(assembled) > 20 and not [kernel for kernel in assembled if kernel.spilled or kernel.stack]
    needed = {found.name.split()[0]: found.registers for found in assembled}
    kernels.sort(key=lambda kernel: needed[kernel.inductor_meta["kernel_name"]], reverse=True)
    assert any(found.spilled for kernel in kernels for found in assemble(kernel, "sm_80", most_registers=16)), (
        "none would be seen"
    )
