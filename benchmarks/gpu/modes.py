"""Stage `modes`: training steps of two layers in every mode of the program, with what torch reports of them: where the
host waited for the device, every other warning, every traceback.

Log lines are not in a step, so nothing in it may wait; only the offloaded optimizer does, for its gradients.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.arms import Trainer, ours
from benchmarks.gpu.cases import Cases
from benchmarks.gpu.setting import Setting
from benchmarks.problem import Arm
from benchmarks.report import ROOT
from benchmarks.timing import call_seconds

DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
DOCUMENTS = ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"]
# Flags after those of a run in bf16 without dropout, of micro-batches of 2. tests/fake_cuda runs the same ones.
MODES: dict[str, list[str]] = {
    "bf16": [],
    "fp16": ["--precision", "fp16"],
    "fp32": ["--precision", "fp32"],
    "constant scale": ["--precision", "fp16", "--loss-scale", "1024"],
    "selective": ["--recompute-granularity", "selective"],
    "full": ["--recompute-granularity", "full"],
    "full in pairs": ["--recompute-granularity", "full", "--recompute-num-layers", "2"],
    "full, inputs on the host": ["--recompute-granularity", "full", "--checkpoint-in-cpu"],
    "a layer on the host": ["--cpu-offloading-num-layers", "1"],
    "accumulation": ["--global-batch-size", "6"],
    "dropout": DROPOUT,
    "dropout, full": [*DROPOUT, "--recompute-granularity", "full"],
    "dropout, fp16, accumulation": [*DROPOUT, "--precision", "fp16", "--global-batch-size", "4"],
    "documents": DOCUMENTS,
    "documents, dropout": [*DOCUMENTS, *DROPOUT],
    "documents, fp32": [*DOCUMENTS, "--precision", "fp32"],
    "offload": ["--cpu-offload-optimizer"],
    "no clipping": ["--clip-grad", "0"],
    "exact layouts": ["--exact-layouts", "4", "--global-batch-size", "4"],
    "compiled": ["--compile"],
    "compiled, dropout": ["--compile", *DROPOUT],
}
# With the optimizer in the host's memory each step waits for its gradients, once.
MAY_WAIT = {"offload": "megatron/gpt2/optimizer/optimizer.py"}
STEPS = 3


def run(setting: Setting, cases: Cases) -> None:
    """Its cases."""
    for mode, flags in MODES.items():
        arm = Arm(mode, "ours", compiled="--compile" in flags, flags=tuple(flags))
        cases.run(mode, functools.partial(step_of, arm, setting))


def step_of(arm: Arm, setting: Setting) -> dict[str, Any]:
    """Two steps, then `STEPS` that are watched, as many that are timed, and one whose kernels are counted."""
    problem = setting.problem("345M", 2, num_layers=2, seq_length=256)
    training = ours(problem, arm)
    training.step()
    loss, norm = first_figures(training)
    training.step()
    with watched(setting.device) as (waits, other):
        for _ in range(STEPS):
            training.step()
    ms = [1000 * seconds for seconds in call_seconds(training.step, setting.device, STEPS)]
    peak = torch.cuda.max_memory_allocated() if setting.device.type == "cuda" else None
    found: dict[str, Any] = {
        "loss": loss,
        "grad_norm": norm,
        "ms": sorted(ms)[len(ms) // 2],
        "peak_allocated_mb": None if peak is None else peak / 2**20,
        "expected_peak_mb": (training.expected_peak or 0) / 2**20,
        "waits": waits,
        "warnings": other,
    }
    try:
        found["kernels"] = count_kernels(training.step, setting.device)
    except RuntimeError as error:  # the profiler may not be allowed on a machine; the rest was measured
        found["kernels_failed"] = str(error).splitlines()[0]
    training.close()
    if peak and training.expected_peak:
        found["expected_over_peak"] = training.expected_peak / peak
    unexpected = [wait for wait in waits if not wait["place"].startswith(MAY_WAIT.get(arm.name, "nowhere"))]
    if unexpected:
        found["failed"] = f"the step waits for the device at {unexpected[0]['place']}"
    return found


def first_figures(training: Trainer) -> tuple[float | None, float | None]:
    """Loss and gradient norm of the first step; None where fp16 has skipped it, to find its scale."""
    try:
        loss, norm = training.read()
    except AssertionError:
        return None, None
    return loss, norm


@contextlib.contextmanager
def watched(device: torch.device) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Inside, torch warns of every wait for the device. Two lists are filled: the waits, and the other warnings. Each
    entry has its text, the innermost line of this project, and the traceback."""
    waits: list[dict[str, Any]] = []
    other: list[dict[str, Any]] = []

    def keep(message: Warning | str, *_: Any, **__: Any) -> None:
        frames = [frame for frame in traceback.extract_stack() if is_ours(frame.filename)]
        lines = [f"{frame.filename.removeprefix(f'{ROOT}/')}:{frame.lineno} {frame.line}" for frame in frames]
        text = str(message).splitlines()[0]
        entry = {"text": text, "place": lines[-1] if lines else "outside of this project", "traceback": lines}
        (waits if "synchroniz" in text else other).append(entry)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = keep  # type: ignore[assignment]  # which catch_warnings puts back
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits, other
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def is_ours(file: str) -> bool:
    """Whether the line belongs to the program that trains."""
    return file.startswith((f"{ROOT}/mpu/", f"{ROOT}/megatron/", f"{ROOT}/data_utils/"))


def count_kernels(step: Any, device: torch.device) -> int:
    """Kernels and copies that a step starts on the GPU; on a CPU operators."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu, acc_events=True) as recorded:
        step()
    kind = "CUDA" if on_gpu else "CPU"
    return sum(event.device_type.name == kind for event in recorded.events())
