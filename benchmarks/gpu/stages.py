"""The stages of `benchmarks/gpu_first_minutes.py`, except `tables`: the properties of the GPU, losses that must be
those of a CPU, whole steps, and the kernels of a step."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness, train_worker
from benchmarks.gpu.tables import tables
from benchmarks.gpu_first_minutes import CaseRecorder, free_memory
from benchmarks.harness import ROOT, milliseconds
from benchmarks.profile_step import profile_train_step
from benchmarks.train import run_arm
from benchmarks.workload import COMPILED, MODELS, Arm, Workload
from megatron.gpt2.device import datasheet_tflops, synchronize
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
        workload = replace(workload, **changes)
        return replace(workload.small(), seq_length=32) if self.smoke else workload

    def with_tokens(self, workload: Workload) -> Workload:
        """Write the tokens of a workload, and return the workload."""
        workload.write_tokens(16 * workload.micro_batch_size * workload.accumulation)
        return workload


# --- machine: the properties of the GPU, and its speed of products and copies ----------------------------------------


def machine(cfg: StageConfig, cases: CaseRecorder) -> None:
    cases.run("versions", versions)
    cases.run("product", lambda: product(cfg))
    cases.run("product for 10 s", lambda: product_with_clocks(cfg))
    cases.run("copies", lambda: copies(cfg))
    cases.run("allocation", lambda: allocation(cfg))


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


def product_with_clocks(cfg: StageConfig) -> dict[str, Any]:
    """Repeat `product` for 10 s. clocks: lines of nvidia-smi with MHz, watts and degrees, one per second."""
    query = "nvidia-smi --id=0 --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv,noheader --loop=1"
    found: list[float] = []
    smi = None
    with contextlib.suppress(OSError):
        smi = subprocess.Popen(query.split(), stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + (0.1 if cfg.smoke else 10)
    while time.monotonic() < end:
        found.append(product(cfg)["tflops"])
    if smi is not None:
        smi.terminate()
    clocks = smi.communicate()[0].splitlines() if smi is not None else []
    return {"last_tflops": found[-1], "tflops": harness.spread(found), "clocks": clocks}


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


def allocation(cfg: StageConfig) -> dict[str, Any]:
    """Time the allocation of 4 GiB twice. The second allocation reuses the memory of the first one."""
    free_memory()

    def allocate() -> None:
        torch.ones(1 << (16 if cfg.smoke else 32), dtype=torch.uint8, device=cfg.device)

    first_ms, second_ms = (1000 * harness.call_seconds(allocate, cfg.device, 1)[0] for _ in range(2))
    return {"settings": os.environ.get("PYTORCH_ALLOC_CONF", ""), "first_ms": first_ms, "second_ms": second_ms}


# --- expandable: the allocation of stage `machine` with expandable segments, which some drivers do not have -----------


def expandable(cfg: StageConfig, cases: CaseRecorder) -> None:
    cases.run("allocation", lambda: allocation(cfg))


# --- modes: steps of two layers in the main modes of the program, with torch's warnings and tracebacks. The first loss
# and gradient norm must be those of a CPU. A step writes no log lines, so the host may not wait for the device --------

DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
# Only dropout of hidden states has the same masks on a CPU and on a GPU.
MODES = {"bf16": "", "compiled": "--compile", "dropout": "--hidden-dropout 0.1", "documents": DOCUMENTS}
EXPECTED = harness.RESULTS / "first_minutes_expected.json"
# On a CPU, the relative differences between bf16 and fp32 are at most 2⁻¹⁴ (loss) and 2⁻¹² (gradient norm).
TOLERANCE = {"loss": 2**-11, "grad_norm": 2**-8}
WATCHED_STEPS = 3  # number of steps


def modes(cfg: StageConfig, cases: CaseRecorder) -> None:
    for mode in MODES:
        cases.run(mode, partial(measure_mode, mode, cfg))


def build_mode(mode: str, workload: Workload, precision: str) -> train_worker.TimedStep:
    words = MODES[mode].split()
    arm = Arm(
        mode, compiled="--compile" in words, precision=precision, flags=tuple(w for w in words if w[2:] != "compile")
    )
    return train_worker.build_ours(workload, arm)


def write_expected_losses(folder: Path) -> int:
    """Write the first loss and gradient norm of each mode in fp32 on this CPU. Return the exit code."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        cfg = StageConfig(smoke=False, scratch=scratch)
        workload = replace(cfg.with_tokens(small_workload(cfg)), device="cpu", compiler="eager")
        for mode in MODES:
            training = build_mode(mode, workload, "fp32")
            training.step()
            found[mode] = dict(zip(TOLERANCE, training.read(), strict=True))
            training.close()
    harness.write_json(folder / EXPECTED.name, {**harness.header("first steps on a CPU, fp32"), "modes": found})
    return 0


def small_workload(cfg: StageConfig) -> Workload:
    return cfg.workload("345M", 2, num_layers=2, seq_length=256)


def measure_mode(mode: str, cfg: StageConfig) -> dict[str, Any]:
    """Run two steps, then `WATCHED_STEPS` steps with recorded warnings, then as many timed steps."""
    training = build_mode(mode, cfg.with_tokens(small_workload(cfg)), "bf16")
    with contextlib.closing(training):
        training.step()
        found: dict[str, Any] = dict(zip(TOLERANCE, training.read(), strict=True))
        training.step()
        with record_warnings(cfg.device) as (waits, other):
            for _ in range(WATCHED_STEPS):
                training.step()
        found["ms"] = 1000 * harness.spread(harness.call_seconds(training.step, cfg.device, WATCHED_STEPS))["median"]
        found |= {"waits": waits, "warnings": other}
        if cfg.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
            found["expected_over_peak"] = (training.expected_peak or 0) / peak
    if waits:
        found["failed"] = f"the host waits for the device at {waits[0]['place']}"
    expected = {} if cfg.smoke else json.loads(EXPECTED.read_text())["modes"][mode]
    for name, value in expected.items():
        found[f"{name}_over_cpu"] = found[name] / value
        if abs(found[name] / value - 1) > TOLERANCE[name]:
            found["failed"] = f"{name} is {found[name]:.6g}, on a CPU {value:.6g}"
    return found


@contextlib.contextmanager
def record_warnings(device: torch.device) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Record torch's warnings in two lists: waits for the device, and other warnings. Each warning has the text, the
    innermost line of this project, and the traceback."""
    waits: list[dict[str, Any]] = []
    other: list[dict[str, Any]] = []
    program = tuple(f"{ROOT}/{package}/" for package in ("mpu", "megatron", "data_utils"))

    def keep(message: Warning | str, *_: Any, **__: Any) -> None:
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(program)]
        lines = [f"{frame.filename.removeprefix(f'{ROOT}/')}:{frame.lineno} {frame.line}" for frame in frames]
        text = str(message).splitlines()[0]
        entry = {"text": text, "place": lines[-1] if lines else "outside of this project", "traceback": lines}
        (waits if "called a synchronizing" in text else other).append(entry)

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
    """Profile a step. busy: the part of the step's time in which the device runs kernels."""
    trainer = train_worker.build_our_trainer(cfg.with_tokens(cfg.workload("345M")), arm)
    with contextlib.closing(trainer):
        began = time.perf_counter()
        train_step(trainer)
        synchronize(cfg.device)
        first = time.perf_counter() - began
        ms = milliseconds(lambda: train_step(trainer), cfg.device, 1 if cfg.smoke else 5)
        parts, recorded = profile_train_step(trainer, trainer.device)
    device_ms, launches = (sum(kernel[key] for kernel in recorded) for key in ("ms", "calls"))
    found = {"step_ms": ms, "first_step_s": first, "device_ms": device_ms, "busy": device_ms / ms}
    return {**found, "launches": launches, "parts_ms": parts, "kernels": recorded[:60]}


# --- steps: whole training steps of the three models, compiled, 4 micro-batches of 32: tokens per second, MFU by both
# counts of FLOPs, and measured and expected peak memory -------------------------------------------------------------

# An arm of kind "rank" draws its weights on the device, which saves up to a minute, and its process group sends
# nothing.
RANDOM_WEIGHTS = replace(COMPILED, kind="rank")


def steps(cfg: StageConfig, cases: CaseRecorder, timeout: float = 90.0) -> None:
    """Measure each model.

    timeout: the seconds for a model, mostly for its compilation.
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
        "arm": dataclasses.asdict(RANDOM_WEIGHTS),
    }
    spec |= {"nanogpt": "", "warmup": 1, "steps": 1 if cfg.smoke else 5}
    visit = run_arm(spec, Path(cfg.scratch), timeout)
    if "failed" in visit:
        return visit
    seconds = harness.spread(visit["step_s"])
    speed = visit["tokens_per_step"] / seconds["median"]
    gpu = harness.header("")["machine"]["gpu"]
    teraflops = datasheet_tflops(gpu) if gpu else None
    peak = 1e12 * teraflops if teraflops else None  # Without a datasheet, MFU is unknown.
    expected, measured = visit["expected_peak_bytes"], visit["memory_bytes"].get("peak_allocated")
    found = {"tokens_per_s": speed, "step_s": seconds, "first_step_s": visit["first_step_s"]}
    found |= {
        "mfu": peak and speed * visit["flops_per_token"] / peak,
        "mfu_of_flops_per_s": peak,
        "expected_peak_gb": expected / 1e9,
    }
    if measured:
        found |= {"peak_allocated_gb": measured / 1e9, "expected_over_peak": expected / measured}
    return {**found, "visit": visit}


# --- tests: the tests that compare fp32, masks and NCCL with the CPU. NCCL has a group of one rank, which also sends a
# message to itself. pytest writes to a separate log file, which also exists after a timeout ---------------------------

COMPARED = "fp32_equals or mask_that_follows or group_of_one or sends_to_itself"


def tests(cfg: StageConfig, cases: CaseRecorder, timeout: float = 40.0) -> None:
    """Run pytest, and record the result as one case.

    timeout: the seconds of all tests together.
    """
    limits = ["-o", "faulthandler_timeout=30", *["--timeout=30"] * bool(importlib.util.find_spec("pytest_timeout"))]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *limits, "tests/gpu", "-k", COMPARED]
    cases.run("pytest", lambda: run_pytest(command, cases.folder / "gpu_tests.log", timeout))


def run_pytest(command: list[str], log: Path, timeout: float) -> dict[str, Any]:
    """Run pytest and return the outcome of each test. The key "failed" exists after a failed test or a timeout."""
    code = harness.run_limited(command, log, timeout)
    text = log.read_text(errors="replace")
    outcomes = dict(re.findall(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", text, re.MULTILINE))
    found = {"log": log.name, "counts": dict(Counter(outcomes.values())), "outcomes": outcomes}
    return found | ({"failed": f"exit code {code}: {harness.last_line(text)}"} if code != 0 else {})


STAGES: dict[str, Callable[[StageConfig, CaseRecorder], None]] = {
    "machine": machine,
    "expandable": expandable,
    "modes": modes,
    "tests": tests,
    "steps": steps,
    "kernels": kernels,
    "tables": tables,
}
