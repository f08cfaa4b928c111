#!/usr/bin/env python3
"""Where the time of our training step goes, by torch's profiler:

    python benchmarks/profile_step.py            # GPT-2 124M, s 1,024, b 2, bf16, on the CPU

The step is `megatron.gpt2.train.train_step.train_step` of a run made from flags, after three warm-up steps.
Self times of all operators are added up by what they belong to; the profiler's own cost is in them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import report
from benchmarks.arms import our_run
from benchmarks.problem import MODELS, Arm, Problem
from benchmarks.train import write_tokens
from megatron.gpt2.device import set_threads
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.train.run import Run, build_run
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
    step, on_gpu = run.engine.optimizer.step, device.type == "cuda"

    def marked() -> None:
        with record_function("our optimizer"):
            step()

    run.engine.optimizer.step = marked  # type: ignore[method-assign]
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu, acc_events=True) as recorded:
        train_step(run)
        if on_gpu:
            torch.cuda.synchronize(device)
    run.engine.optimizer.step = step  # type: ignore[method-assign]
    times: defaultdict[str, float] = defaultdict(float)
    for event in recorded.events():
        if event.device_type.name == "CPU":  # what its kernels take counts for the operator that has started them
            times[part_of(event)] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000
    kernels = [
        {
            "name": event.key[:200],
            "calls": event.count,
            "ms": (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000,
        }
        for event in recorded.key_averages()
        if event.device_type.name == ("CUDA" if on_gpu else "CPU") and not event.is_user_annotation
    ]
    return dict(sorted(times.items())), sorted(kernels, key=lambda kernel: -kernel["ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="DIR", help="folder of profile_cpu.json (default: benchmarks/results)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: proves the script")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        layers, hidden, heads = (2, 64, 4) if chosen.smoke else MODELS["124M"]
        problem = Problem(
            layers,
            hidden,
            heads,
            64 if chosen.smoke else 1024,
            2,
            scratch=folder,
            tokens=f"{folder}/tokens",
            vocab_size=500 if chosen.smoke else 50257,
        )
        write_tokens(problem, 16)
        set_threads(Ranks())
        run = build_run(our_run(problem, Arm("ours eager", "ours")), lambda line: None)
        run.engine.model.train()
        for _ in range(3):
            train_step(run)
        times, _ = profiled(run, run.device)
        run.data.loader.close()
        run.stop.close()
        run.log.close()
    whole = sum(times.values())
    print(f"\n{'part of a step':42}{'ms':>9}{'share':>8}")
    for part, ms in times.items():
        print(f"{part:42}{ms:9.1f}{ms / whole:8.1%}")
    print(f"{'all operators':42}{whole:9.1f}")
    output = Path(chosen.output) if chosen.output else report.RESULTS
    report.write(
        output / "profile_cpu.json", {**report.header("profile of a step, 124M on a CPU"), "milliseconds": times}
    )


if __name__ == "__main__":
    main()
