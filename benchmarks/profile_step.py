#!/usr/bin/env python3
"""Profile a training step with torch's profiler:

    python benchmarks/profile_step.py            # GPT-2 124M, s 1,024, b 2, bf16, on the CPU

The program builds a run from flags, and profiles one call of `train_step` after three warm-up steps. The self
times of all operators are summed by part of the step. The times include the profiler's own cost.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # The project need not be installed.

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import harness, train_worker
from benchmarks.workload import MODELS, Arm, Workload
from megatron.gpt2.device import set_threads
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.train.train_step import train_step
from megatron.gpt2.train.trainer import Trainer

# An operator belongs to the first part of which a string is in the name of the operator or of one of its callers. The
# matrix products of a part are counted separately.
PARTS = {
    "optimizer: norm, AdamW, rounding": ("our optimizer",),
    "head and loss": ("LinearCrossEntropy",),
    "attention": ("blockwise_attention", "_BlockwiseBackward", "scaled_dot_product"),
    "gradients into buckets": ("AccumulateGrad",),
    "layers and embeddings": ("",),
}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")


def classify_event(event: Any) -> str:
    is_product, callers = event.name in PRODUCTS, ""
    while event is not None:
        callers, event = f"{callers} {event.name}", event.cpu_parent
    part = next(part for part, signs in PARTS.items() if any(sign in callers for sign in signs))
    return f"{part}: products" if is_product else part


def profile_train_step(trainer: Trainer, device: torch.device) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Profile one step. Return milliseconds by part, and the kernels (on a CPU the operators) with their milliseconds
    and calls, the slowest first. On a GPU, times are those of the device."""
    step, kind = trainer.state.optimizer.step, "CUDA" if device.type == "cuda" else "CPU"

    def marked() -> None:
        with record_function("our optimizer"):
            step()

    def ms(event: Any) -> float:  # On a GPU, the result is the time of the kernels that the operator started.
        return (event.self_device_time_total if kind == "CUDA" else event.self_cpu_time_total) / 1000

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (kind == "CUDA")
    with (
        mock.patch.object(trainer.state.optimizer, "step", marked),
        profile(activities=activities, acc_events=True) as recorded,
    ):
        train_step(trainer)
        if kind == "CUDA":
            torch.cuda.synchronize(device)
    times: defaultdict[str, float] = defaultdict(float)
    for event in recorded.events():
        if event.device_type.name == "CPU":
            times[classify_event(event)] += ms(event)
    kernels = [
        {"name": event.key[:200], "calls": event.count, "ms": ms(event)}
        for event in recorded.key_averages()
        if event.device_type.name == kind and not event.is_user_annotation
    ]
    return dict(sorted(times.items())), sorted(kernels, key=lambda kernel: -kernel["ms"])


def main() -> None:
    args = harness.parse_args(harness.make_parser(__doc__))
    with tempfile.TemporaryDirectory() as folder:
        workload = Workload(*MODELS["124M"], 1024, 2, scratch=folder)
        workload = workload.small() if args.smoke else workload
        workload.write_tokens(16)
        set_threads(RankInfo())
        trainer = train_worker.build_our_trainer(workload, Arm("ours eager"))
        for _ in range(3):
            train_step(trainer)
        times, _ = profile_train_step(trainer, trainer.device)
        trainer.close()
    whole = sum(times.values())
    rows = [[part, f"{ms:.1f}", f"{ms / whole:.1%}"] for part, ms in {**times, "all operators": whole}.items()]
    print("\n" + harness.format_table(["part of a step", "ms", "share"], rows))
    result = {**harness.header("profile of a step, 124M on a CPU"), "milliseconds": times}
    harness.write_json(args.output / "profile_cpu.json", result)


if __name__ == "__main__":
    main()
