#!/usr/bin/env python3
"""Where the time of our training step goes, by torch's profiler:

    python benchmarks/profile_step.py            # GPT-2 124M, s 1,024, b 2, bf16, on the CPU

The step is `megatron.gpt2.train.train_step.train_step` of a run made from flags, after three warm-up steps.
Self times of all operators are added up by what they belong to; the profiler's own cost is in them.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import arms, harness
from benchmarks.problem import MODELS, Arm, Problem
from megatron.gpt2.device import set_threads
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.train_step import train_step

# The first part whose sign stands in the name of an operator or of one that called it; matrix products apart.
PARTS = {
    "optimizer: norm, AdamW, rounding": ("our optimizer",),
    "head and loss": ("LinearCrossEntropy",),
    "attention": ("blockwise_attention", "_BlockwiseBackward", "scaled_dot_product"),
    "gradients into buckets": ("AccumulateGrad",),
    "layers and embeddings": ("",),
}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")


def part_of(event: Any) -> str:
    is_product, callers = event.name in PRODUCTS, ""
    while event is not None:
        callers, event = f"{callers} {event.name}", event.cpu_parent
    part = next(part for part, signs in PARTS.items() if any(sign in callers for sign in signs))
    return f"{part}: products" if is_product else part


def profiled(run: Run, device: torch.device) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Of one step: milliseconds by part, and the kernels (on a CPU the operators) with their milliseconds and calls,
    the costliest first. On a GPU the time is the device's own."""
    step, kind = run.engine.optimizer.step, "CUDA" if device.type == "cuda" else "CPU"

    def marked() -> None:
        with record_function("our optimizer"):
            step()

    def ms(event: Any) -> float:  # what its kernels take counts for the operator that has started them
        return (event.self_device_time_total if kind == "CUDA" else event.self_cpu_time_total) / 1000

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (kind == "CUDA")
    with (
        mock.patch.object(run.engine.optimizer, "step", marked),
        profile(activities=activities, acc_events=True) as recorded,
    ):
        train_step(run)
        if kind == "CUDA":
            torch.cuda.synchronize(device)
    times: defaultdict[str, float] = defaultdict(float)
    for event in recorded.events():
        if event.device_type.name == "CPU":
            times[part_of(event)] += ms(event)
    kernels = [
        {"name": event.key[:200], "calls": event.count, "ms": ms(event)}
        for event in recorded.key_averages()
        if event.device_type.name == kind and not event.is_user_annotation
    ]
    return dict(sorted(times.items())), sorted(kernels, key=lambda kernel: -kernel["ms"])


def main() -> None:
    chosen = harness.options(harness.parser(__doc__))
    with tempfile.TemporaryDirectory() as folder:
        problem = Problem(*MODELS["124M"], 1024, 2, scratch=folder)
        problem = problem.small() if chosen.smoke else problem
        problem.write_tokens(16)
        set_threads(Ranks())
        run = arms.our_run(problem, Arm("ours eager"))
        for _ in range(3):
            train_step(run)
        times, _ = profiled(run, run.device)
        arms.close(run)
    whole = sum(times.values())
    rows = [[part, f"{ms:.1f}", f"{ms / whole:.1%}"] for part, ms in {**times, "all operators": whole}.items()]
    print("\n" + harness.table(["part of a step", "ms", "share"], rows))
    result = {**harness.header("profile of a step, 124M on a CPU"), "milliseconds": times}
    harness.write(chosen.output / "profile_cpu.json", result)


if __name__ == "__main__":
    main()
