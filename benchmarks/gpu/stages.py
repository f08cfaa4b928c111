"""The stages of `benchmarks/first_minutes.py`, except `tables`: the properties of the GPU, every mode of the program,
the kernels of a step, whole steps, and the tests that need a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import harness, train_worker
from benchmarks.first_minutes import CaseRecorder
from benchmarks.gpu.tables import tables
from benchmarks.harness import ROOT, milliseconds
from benchmarks.profile_step import profile_train_step
from benchmarks.train import run_arm
from benchmarks.workload import COMPILED, MODELS, Arm, Workload, utilisation
from megatron.gpt2.device import datasheet_tflops
from megatron.gpt2.train.train_step import train_step


@dataclass(frozen=True)
class StageConfig:
    """The sizes to measure: GPT-2's models on a GPU, or with `smoke` tiny models on the CPU, whose times are
    meaningless.

    scratch: a temporary folder.
    """

    smoke: bool
    scratch: str

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.smoke else "cuda")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models."""
        return ("345M",) if self.smoke else ("345M", "774M", "1.5B")

    @property
    def repeats(self) -> int:
        """The number of timed calls of each operation."""
        return 1 if self.smoke else 20

    def workload(self, name: str, micro_batch_size: int = 32, accumulation: int = 1, **changes: Any) -> Workload:
        """Make a workload with the model `name`.

        changes: values of other fields.
        """
        workload = Workload(
            *MODELS[name], 1024, micro_batch_size, accumulation, device=self.device.type, scratch=self.scratch
        )
        workload = dataclasses.replace(workload, **changes)
        return dataclasses.replace(workload.small(), seq_length=32) if self.smoke else workload

    def with_tokens(self, workload: Workload) -> Workload:
        """Write the tokens of a workload, and return it."""
        workload.write_tokens(16 * workload.micro_batch_size * workload.accumulation)
        return workload


# --- machine: the properties of the GPU, and its speed of products and copies ----------------------------------------


def machine(cfg: StageConfig, cases: CaseRecorder) -> None:
    cases.run("versions", versions)
    cases.run("product", lambda: product(cfg))
    cases.run("copies", lambda: copies(cfg))


def versions() -> dict[str, Any]:
    """Return the versions of torch and its libraries, the device properties, the output of nvidia-smi, and the
    variables for CUDA, NCCL and torch."""
    found: dict[str, Any] = {**harness.versions(), "cudnn": torch.backends.cudnn.version()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "gpu": properties.name,
            "datasheet_tflops": datasheet_tflops(properties.name),
            "processors": properties.multi_processor_count,
            "memory_gb": properties.total_memory / 1e9,
        }
    try:
        table = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        table = [f"nvidia-smi: {type(error).__name__}"]
    prefixes = ("CUDA_", "NCCL_", "TORCH_NCCL_", "PYTORCH_", "NVIDIA_TF32", "CUBLAS")
    environment = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    return {**found, "nvidia_smi": table, "environment": environment}


def product(cfg: StageConfig) -> dict[str, Any]:
    """Time an 8192³ product in bf16. The numbers are random, because equal numbers are faster."""
    size = 64 if cfg.smoke else 8192
    a, b = (torch.randn(size, size, device=cfg.device).bfloat16() for _ in range(2))
    ms = milliseconds(lambda: a @ b, cfg.device, 5 * cfg.repeats)
    return {"size": size, "ms": ms, "tflops": 2e-9 * size**3 / ms}


def copies(cfg: StageConfig) -> dict[str, Any]:
    """Measure GB/s of a copy within the device (reads plus writes), and of pinned copies to the device and back."""
    there = torch.zeros(1 << (16 if cfg.smoke else 30), dtype=torch.uint8, device=cfg.device)
    other = torch.empty_like(there)
    host = torch.zeros(1 << (16 if cfg.smoke else 28), dtype=torch.uint8, pin_memory=not cfg.smoke)
    part = there[: host.numel()]

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        ms = milliseconds(lambda: target.copy_(source, non_blocking=True), cfg.device, cfg.repeats)
        return 1e-6 * source.numel() / ms

    within, up, down = rate(other, there), rate(part, host), rate(host, part)
    return {"device_gb_per_s": 2 * within, "to_device_gb_per_s": up, "to_host_gb_per_s": down}


# --- modes: steps of two layers in every mode of the program, with torch's warnings and tracebacks: waits of the host
# for the device, and others. A step writes no log lines, so the host may not wait, except for the gradients of the
# offloaded optimizer --------------------------------------------------------------------------------------------------

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
# These flags are added to those of a run in bf16 without dropout, with micro-batches of 2. tests/fake_cuda uses the
# same flags.
MODES = {
    "bf16": "",
    "fp16": "--precision fp16",
    "fp32": "--precision fp32",
    "constant scale": "--precision fp16 --loss-scale 1024",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full",
    "full in pairs": "--recompute-granularity full --recompute-num-layers 2",
    "full, inputs on the host": "--recompute-granularity full --checkpoint-in-cpu",
    "a layer on the host": "--cpu-offloading-num-layers 1",
    "accumulation": "--global-batch-size 6",
    "dropout": DROPOUT,
    "dropout, full": f"{DROPOUT} --recompute-granularity full",
    "dropout, fp16, accumulation": f"{DROPOUT} --precision fp16 --global-batch-size 4",
    "documents": DOCUMENTS,
    "documents, dropout": f"{DOCUMENTS} {DROPOUT}",
    "documents, fp32": f"{DOCUMENTS} --precision fp32",
    "offload": "--cpu-offload-optimizer",
    "no clipping": "--clip-grad 0",
    "exact layouts": "--exact-layouts 4 --global-batch-size 4",
    "compiled": "--compile",
    "compiled, dropout": f"--compile {DROPOUT}",
}
MAY_WAIT = {"offload": "megatron/gpt2/optimizer/optimizer.py"}
WATCHED_STEPS = 3  # number of steps


def modes(cfg: StageConfig, cases: CaseRecorder) -> None:
    for mode, flags in MODES.items():
        arm = Arm(mode, compiled="--compile" in flags, flags=tuple(flags.replace("--compile", "").split()))
        cases.run(mode, partial(measure_mode, arm, cfg))


def measure_mode(arm: Arm, cfg: StageConfig) -> dict[str, Any]:
    """Run two steps, then `WATCHED_STEPS` with recorded warnings, `WATCHED_STEPS` timed ones, and one whose kernels are
    counted."""
    on_gpu = cfg.device.type == "cuda"
    training = train_worker.build_ours(cfg.with_tokens(cfg.workload("345M", 2, num_layers=2, seq_length=256)), arm)
    training.step()
    loss, norm = None, None
    with contextlib.suppress(AssertionError):  # fp16 skips steps until it has found its loss scale.
        loss, norm = training.read()
    training.step()
    with record_warnings(cfg.device) as (waits, other):
        for _ in range(WATCHED_STEPS):
            training.step()
    ms = 1000 * harness.spread(harness.call_seconds(training.step, cfg.device, WATCHED_STEPS))["median"]
    expected = (training.expected_peak or 0) / 2**20
    found: dict[str, Any] = {"loss": loss, "grad_norm": norm, "ms": ms, "expected_peak_mb": expected}
    found |= {"waits": waits, "warnings": other}
    if on_gpu:
        peak = torch.cuda.max_memory_allocated() / 2**20
        found |= {"peak_allocated_mb": peak, "expected_over_peak": expected / peak}
    try:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        with profile(activities=activities, acc_events=True) as recorded:
            training.step()
        kind = "CUDA" if on_gpu else "CPU"
        found["kernels"] = sum(event.device_type.name == kind for event in recorded.events())
    except RuntimeError as error:  # A machine may forbid profiling; the other results are kept.
        found["kernels_failed"] = str(error).splitlines()[0]
    training.close()
    unexpected = [wait for wait in waits if not wait["place"].startswith(MAY_WAIT.get(arm.name, "nowhere"))]
    if unexpected:
        found["failed"] = f"the host waits for the device at {unexpected[0]['place']}"
    return found


@contextlib.contextmanager
def record_warnings(device: torch.device) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Record torch's warnings in two lists: waits for the device, and other warnings. Each entry has the text, the
    innermost line of this project, and the traceback."""
    waits: list[dict[str, Any]] = []
    other: list[dict[str, Any]] = []
    program = tuple(f"{ROOT}/{room}/" for room in ("mpu", "megatron", "data_utils"))

    def keep(message: Warning | str, *_: Any, **__: Any) -> None:
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(program)]
        lines = [f"{frame.filename.removeprefix(f'{ROOT}/')}:{frame.lineno} {frame.line}" for frame in frames]
        text = str(message).splitlines()[0]
        entry = {"text": text, "place": lines[-1] if lines else "outside of this project", "traceback": lines}
        (waits if "synchroniz" in text else other).append(entry)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = keep  # type: ignore[assignment]  # catch_warnings restores it
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits, other
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


# --- kernels: torch's profile of a step of 345M at micro-batch 32, eager and compiled: the time by part of the step and
# by kernel, and the time of a step without the profiler --------------------------------------------------------------


def kernels(cfg: StageConfig, cases: CaseRecorder) -> None:
    for name in ("compiled", "eager"):
        cases.run(name, partial(measure_kernels, cfg, Arm(name, compiled=name == "compiled")))


def measure_kernels(cfg: StageConfig, arm: Arm) -> dict[str, Any]:
    """Profile a step. busy: the part of its time in which the device runs kernels instead of waiting for the host."""
    trainer = train_worker.build_our_trainer(cfg.with_tokens(cfg.workload("345M")), arm)
    began = time.perf_counter()
    train_step(trainer)
    if cfg.device.type == "cuda":
        torch.cuda.synchronize()
    first = time.perf_counter() - began
    ms = milliseconds(lambda: train_step(trainer), cfg.device, 1 if cfg.smoke else 5)
    parts, recorded = profile_train_step(trainer, trainer.device)
    train_worker.close_trainer(trainer)
    device_ms, launches = (sum(kernel[key] for kernel in recorded) for key in ("ms", "calls"))
    found = {"step_ms": ms, "first_step_s": first, "device_ms": device_ms, "busy": device_ms / ms}
    return {**found, "launches": launches, "parts_ms": parts, "kernels": recorded[:60]}


# --- steps: whole training steps of the three models, compiled, 4 micro-batches of 32: tokens per second, MFU by both
# counts of FLOPs, and measured and expected peak memory -------------------------------------------------------------


def steps(cfg: StageConfig, cases: CaseRecorder, timeout: float = 150.0) -> None:
    """Measure each model.

    timeout: seconds for a model, mostly for its compilation and its initial weights.
    """
    for name in cfg.names:
        cases.run(name, partial(measure_steps, cfg, name, timeout))


def measure_steps(cfg: StageConfig, name: str, timeout: float) -> dict[str, Any]:
    """Time five steps in a new process, after two warm-up steps. `visit` is the result of
    `benchmarks/train_worker.py`."""
    workload = cfg.with_tokens(cfg.workload(name, 32, 4))
    spec: dict[str, Any] = {
        "task": "measure",
        "problem": dataclasses.asdict(workload),
        "arm": dataclasses.asdict(COMPILED),
    }
    spec |= {"nanogpt": "", "warmup": 1, "steps": 1 if cfg.smoke else 5}
    visit = run_arm(spec, Path(cfg.scratch), timeout)
    if "failed" in visit:
        return visit
    seconds = harness.spread(visit["step_s"])
    speed = visit["tokens_per_step"] / seconds["median"]
    gpu = harness.header("")["machine"]["gpu"]
    teraflops = datasheet_tflops(gpu) if gpu else None
    peak = 1e12 * teraflops if teraflops else None  # If it is None, MFU is unknown.
    expected, measured = visit["expected_peak_bytes"], visit["memory_bytes"].get("peak_allocated")
    found = {"tokens_per_s": speed, "step_s": seconds, "first_step_s": visit["first_step_s"]}
    found |= {**utilisation(speed, visit, peak), "mfu_of_flops_per_s": peak, "expected_peak_gb": expected / 1e9}
    if measured:
        found |= {"peak_allocated_gb": measured / 1e9, "expected_over_peak": expected / measured}
    return {**found, "visit": visit}


# --- tests: the tests that need a GPU, each with a time limit. pytest writes to a separate log file, which also exists
# after a timeout ------------------------------------------------------------------------------------------------------


def tests(cfg: StageConfig, cases: CaseRecorder, timeout: float = 300.0) -> None:
    """Run pytest as one case.

    timeout: the seconds of all tests together.
    """
    limits = ["-o", "faulthandler_timeout=60", *["--timeout=60"] * bool(importlib.util.find_spec("pytest_timeout"))]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *limits, "tests/gpu"]
    cases.run("pytest", lambda: run_pytest(command, cases.folder / "gpu_tests.log", timeout))


def run_pytest(command: list[str], log: Path, timeout: float) -> dict[str, Any]:
    """Run pytest and parse the outcome of each test. "failed" is set if a test failed, or after a timeout."""
    code = harness.run_limited(command, log, timeout)
    text = log.read_text(errors="replace")
    outcome = r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b"
    outcomes, last = dict(re.findall(outcome, text, re.MULTILINE)), harness.last_line(text)
    found: dict[str, Any] = {"exit_code": code, "log": log.name, "counts": dict(Counter(outcomes.values()))}
    found |= {"outcomes": outcomes, "last_line": last}
    if code is None:
        found["failed"] = f"timeout after {timeout:.0f} s; last: {last}"
    elif code:
        bad = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
        found["failed"] = f"exit code {code}: {', '.join(bad) or last}"
    return found


STAGES: dict[str, Callable[[StageConfig, CaseRecorder], None]] = {
    "machine": machine,
    "modes": modes,
    "tables": tables,
    "kernels": kernels,
    "steps": steps,
    "tests": tests,
}
