"""Stage `machine`: what this GPU is, and how fast it multiplies and copies. All later figures are read against it."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import torch

from benchmarks import report
from benchmarks.gpu.cases import Cases
from benchmarks.gpu.setting import Setting
from benchmarks.timing import milliseconds
from megatron.gpt2.device import datasheet


def run(setting: Setting, cases: Cases) -> None:
    """Its cases."""
    cases.run("versions", versions)
    cases.run("product", lambda: product(setting))
    cases.run("copies", lambda: copies(setting))


def versions() -> dict[str, Any]:
    """torch and its libraries, the device's properties, nvidia-smi's table, and the variables that CUDA, NCCL and torch
    read."""
    found: dict[str, Any] = {**report.versions(), "cudnn": torch.backends.cudnn.version()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "gpu": properties.name,
            "datasheet_tflops": datasheet(properties.name),
            "processors": properties.multi_processor_count,
            "memory_gb": properties.total_memory / 1e9,
        }
    try:
        table = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        table = [f"nvidia-smi: {type(error).__name__}"]
    prefixes = ("CUDA_", "NCCL_", "TORCH_NCCL_", "PYTORCH_", "NVIDIA_TF32", "CUBLAS")
    return {
        **found,
        "nvidia_smi": table,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(prefixes)},
    }


def product(setting: Setting) -> dict[str, Any]:
    """An 8192³ product in bf16: of random numbers, since equal ones multiply faster."""
    size = 64 if setting.smoke else 8192
    a, b = (torch.randn(size, size, device=setting.device).bfloat16() for _ in range(2))
    ms = milliseconds(lambda: a @ b, setting.device, 5 * setting.repeats)
    return {"size": size, "ms": ms, "tflops": 2e-9 * size**3 / ms}


def copies(setting: Setting) -> dict[str, Any]:
    """GB/s of a copy within the device, which reads and writes each byte, and of pinned copies to it and back."""
    there = torch.zeros(1 << (16 if setting.smoke else 30), dtype=torch.uint8, device=setting.device)
    other = torch.empty_like(there)
    host = torch.zeros(1 << (16 if setting.smoke else 28), dtype=torch.uint8, pin_memory=not setting.smoke)
    part, gigabytes = there[: host.numel()], 1e-6  # of bytes per ms

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        ms = milliseconds(lambda: target.copy_(source, non_blocking=True), setting.device, setting.repeats)
        return gigabytes * source.numel() / ms

    return {
        "device_gb_per_s": 2 * rate(other, there),
        "to_device_gb_per_s": rate(part, host),
        "to_host_gb_per_s": rate(host, part),
    }
