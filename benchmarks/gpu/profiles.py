"""Stage `kernels`: torch's profile of a step of 345M at micro-batch 32, eager and compiled: the time by part of a step
and by kernel, beside the time of a step that nobody watches.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

from benchmarks.arms import built
from benchmarks.gpu.cases import Cases
from benchmarks.gpu.setting import Setting
from benchmarks.problem import Arm
from benchmarks.profile_step import profiled
from benchmarks.timing import milliseconds
from megatron.gpt2.train.train_step import train_step

KERNELS = 60  # in the JSON


def run(setting: Setting, cases: Cases) -> None:
    """Its cases."""
    for arm in (Arm("compiled", "ours", compiled=True), Arm("eager", "ours")):
        cases.run(arm.name, functools.partial(profile_of, setting, arm))


def profile_of(setting: Setting, arm: Arm) -> dict[str, Any]:
    """busy: the part of the step in which the device has a kernel; the rest waits for the host."""
    problem = setting.problem("345M", 32)
    training = built(problem, arm)
    training.engine.model.train()
    began = time.perf_counter()
    train_step(training)
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
    first = time.perf_counter() - began
    ms = milliseconds(lambda: train_step(training), setting.device, 1 if setting.smoke else 5)
    parts, kernels = profiled(training, training.device)
    training.data.loader.close()
    training.stop.close()
    training.close()
    device_ms = sum(kernel["ms"] for kernel in kernels)
    return {
        "step_ms": ms,
        "first_step_s": first,
        "device_ms": device_ms,
        "busy": device_ms / ms,
        "launches": sum(kernel["calls"] for kernel in kernels),
        "parts_ms": parts,
        "kernels": kernels[:KERNELS],
    }
