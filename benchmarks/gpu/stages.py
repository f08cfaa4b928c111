"""The stages of `benchmarks/first_minutes.py`, but for the tables: what this GPU is, every mode of the program, the
kernels of a step, whole steps, and the project's own tests that need a GPU."""

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

from benchmarks import arms, harness
from benchmarks.first_minutes import Cases
from benchmarks.gpu.tables import tables
from benchmarks.harness import ROOT, milliseconds
from benchmarks.problem import COMPILED, MODELS, Arm, Problem, utilisation
from benchmarks.profile_step import profiled
from benchmarks.train import run_arm
from megatron.gpt2.device import datasheet
from megatron.gpt2.train.train_step import train_step


@dataclass(frozen=True)
class Setting:
    """What the stages measure: GPT-2's models on a GPU, or with `smoke` tiny ones on the CPU, whose figures mean
    nothing. scratch: a folder for what nobody keeps."""

    smoke: bool
    scratch: str

    @property
    def device(self) -> torch.device:
        """The device of every stage."""
        return torch.device("cpu" if self.smoke else "cuda")

    @property
    def names(self) -> tuple[str, ...]:
        """The models."""
        return ("345M",) if self.smoke else ("345M", "774M", "1.5B")

    @property
    def repeats(self) -> int:
        """Calls that are timed, of each operation."""
        return 1 if self.smoke else 20

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of a micro-batch, for the tables."""
        return (32,) if self.smoke else (8192, 16384, 32768)

    def problem(self, name: str, micro_batch_size: int = 32, accumulation: int = 1, **changes: Any) -> Problem:
        """A training problem of the model `name`. changes: other fields of it."""
        problem = Problem(
            *MODELS[name], 1024, micro_batch_size, accumulation, device=self.device.type, scratch=self.scratch
        )
        problem = dataclasses.replace(problem, **changes)
        return dataclasses.replace(problem.small(), seq_length=32) if self.smoke else problem

    def written(self, problem: Problem) -> Problem:
        """The same, whose tokens are there."""
        problem.write_tokens(16 * problem.micro_batch_size * problem.accumulation)
        return problem


# --- machine: what this GPU is, and how fast it multiplies and copies. All later figures are read against it ---------


def machine(setting: Setting, cases: Cases) -> None:
    """Its cases."""
    cases.run("versions", versions)
    cases.run("product", lambda: product(setting))
    cases.run("copies", lambda: copies(setting))


def versions() -> dict[str, Any]:
    """torch and its libraries, the device's properties, nvidia-smi's table, and the variables that CUDA, NCCL and torch
    read."""
    found: dict[str, Any] = {**harness.versions(), "cudnn": torch.backends.cudnn.version()}
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
    environment = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    return {**found, "nvidia_smi": table, "environment": environment}


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
    part = there[: host.numel()]

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        ms = milliseconds(lambda: target.copy_(source, non_blocking=True), setting.device, setting.repeats)
        return 1e-6 * source.numel() / ms

    within, up, down = rate(other, there), rate(part, host), rate(host, part)
    return {"device_gb_per_s": 2 * within, "to_device_gb_per_s": up, "to_host_gb_per_s": down}


# --- modes: steps of two layers in every mode of the program, with what torch reports of them: where the host waited
# for the device, every other warning, every traceback. Log lines are not in a step, so nothing in it may wait; only the
# offloaded optimizer does, for its gradients -------------------------------------------------------------------------

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
# Flags after those of a run in bf16 without dropout, of micro-batches of 2. tests/fake_cuda runs the same ones.
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
WATCHED = 3  # steps


def modes(setting: Setting, cases: Cases) -> None:
    """Its cases."""
    for mode, flags in MODES.items():
        arm = Arm(mode, compiled="--compile" in flags, flags=tuple(flags.replace("--compile", "").split()))
        cases.run(mode, partial(step_of, arm, setting))


def step_of(arm: Arm, setting: Setting) -> dict[str, Any]:
    """Two steps, then `WATCHED` that are watched, as many that are timed, and one whose kernels are counted."""
    on_gpu = setting.device.type == "cuda"
    training = arms.ours(setting.written(setting.problem("345M", 2, num_layers=2, seq_length=256)), arm)
    training.step()
    loss, norm = None, None
    with contextlib.suppress(AssertionError):  # fp16 skips the first steps, to find its scale
        loss, norm = training.read()
    training.step()
    with watched(setting.device) as (waits, other):
        for _ in range(WATCHED):
            training.step()
    ms = 1000 * harness.spread(harness.call_seconds(training.step, setting.device, WATCHED))["median"]
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
    except RuntimeError as error:  # the profiler may not be allowed on a machine; the rest was measured
        found["kernels_failed"] = str(error).splitlines()[0]
    training.close()
    unexpected = [wait for wait in waits if not wait["place"].startswith(MAY_WAIT.get(arm.name, "nowhere"))]
    if unexpected:
        found["failed"] = f"the step waits for the device at {unexpected[0]['place']}"
    return found


@contextlib.contextmanager
def watched(device: torch.device) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Inside, torch warns of every wait for the device. Two lists are filled: the waits, and the other warnings. Each
    entry has its text, the innermost line of this project, and the traceback."""
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
        warnings.showwarning = keep  # type: ignore[assignment]  # which catch_warnings puts back
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits, other
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


# --- kernels: torch's profile of a step of 345M at micro-batch 32, eager and compiled: the time by part of a step and by
# kernel, beside the time of a step that nobody watches --------------------------------------------------------------


def kernels(setting: Setting, cases: Cases) -> None:
    """Its cases."""
    for name in ("compiled", "eager"):
        cases.run(name, partial(profile_of, setting, Arm(name, compiled=name == "compiled")))


def profile_of(setting: Setting, arm: Arm) -> dict[str, Any]:
    """busy: the part of the step in which the device has a kernel; the rest waits for the host."""
    run = arms.our_run(setting.written(setting.problem("345M")), arm)
    began = time.perf_counter()
    train_step(run)
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
    first = time.perf_counter() - began
    ms = milliseconds(lambda: train_step(run), setting.device, 1 if setting.smoke else 5)
    parts, recorded = profiled(run, run.device)
    arms.close(run)
    device_ms, launches = (sum(kernel[key] for kernel in recorded) for key in ("ms", "calls"))
    found = {"step_ms": ms, "first_step_s": first, "device_ms": device_ms, "busy": device_ms / ms}
    return {**found, "launches": launches, "parts_ms": parts, "kernels": recorded[:60]}


# --- steps: whole training steps of the three models, compiled, 4 micro-batches of 32: tokens a second, MFU by both
# counts of FLOPs, and the peak of the memory beside what the planner expects of it ----------------------------------


def steps(setting: Setting, cases: Cases, timeout: float = 150.0) -> None:
    """Its cases. timeout: seconds of a model, most of which are its compilation and the drawing of its weights."""
    for name in setting.names:
        cases.run(name, partial(steps_of, setting, name, timeout))


def steps_of(setting: Setting, name: str, timeout: float) -> dict[str, Any]:
    """Five steps in a process of their own, after two others. `visit` is what `benchmarks/arms.py` gives."""
    problem = setting.written(setting.problem(name, 32, 4))
    spec: dict[str, Any] = {
        "task": "measure",
        "problem": dataclasses.asdict(problem),
        "arm": dataclasses.asdict(COMPILED),
    }
    spec |= {"nanogpt": "", "warmup": 1, "steps": 1 if setting.smoke else 5}
    visit = run_arm(spec, Path(setting.scratch), timeout)
    if "failed" in visit:
        return visit
    seconds = harness.spread(visit["step_s"])
    speed = visit["tokens_per_step"] / seconds["median"]
    gpu = harness.header("")["machine"]["gpu"]
    teraflops = datasheet(gpu) if gpu else None
    peak = 1e12 * teraflops if teraflops else None  # without it there is no MFU
    expected, measured = visit["expected_peak_bytes"], visit["memory_bytes"].get("peak_allocated")
    found = {"tokens_per_s": speed, "step_s": seconds, "first_step_s": visit["first_step_s"]}
    found |= {**utilisation(speed, visit, peak), "mfu_of_flops_per_s": peak, "expected_peak_gb": expected / 1e9}
    if measured:
        found |= {"peak_allocated_gb": measured / 1e9, "expected_over_peak": expected / measured}
    return {**found, "visit": visit}


# --- tests: the project's own tests that need a GPU, each with a time limit. pytest's output is in a log of its own,
# which a test that never ends leaves behind as well -----------------------------------------------------------------


def tests(setting: Setting, cases: Cases, timeout: float = 300.0) -> None:
    """Its one case. timeout: of all tests, in seconds; without a GPU every test is skipped, which is quick."""
    limits = ["-o", "faulthandler_timeout=60", *["--timeout=60"] * bool(importlib.util.find_spec("pytest_timeout"))]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *limits, "tests/gpu"]
    cases.run("pytest", lambda: own_tests(command, cases.folder / "gpu_tests.log", timeout))


def own_tests(command: list[str], log: Path, timeout: float) -> dict[str, Any]:
    """The outcome of each test by pytest's own lines; "failed" if one failed, or if they did not end in time."""
    code = harness.run_limited(command, log, timeout)
    text = log.read_text(errors="replace")
    outcome = r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b"
    outcomes, last = dict(re.findall(outcome, text, re.MULTILINE)), harness.last_line(text)
    found: dict[str, Any] = {"exit_code": code, "log": log.name, "counts": dict(Counter(outcomes.values()))}
    found |= {"outcomes": outcomes, "last_line": last}
    if code is None:
        found["failed"] = f"no end after {timeout:.0f} s; last: {last}"
    elif code:
        bad = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
        found["failed"] = f"exit code {code}: {', '.join(bad) or last}"
    return found


STAGES: dict[str, Callable[[Setting, Cases], None]] = {
    "machine": machine,
    "modes": modes,
    "tables": tables,
    "kernels": kernels,
    "steps": steps,
    "tests": tests,
}
