#!/usr/bin/env python3
"""The expected memory of each stage of a pipeline beside the measured one, on a CPU:

    python benchmarks/stage_memory.py                        # about 5 minutes on 2 cores, 3 GB at most at once
    python benchmarks/stage_memory.py --smoke --output DIR   # a small model on two stages: does it run?

As `benchmarks/memory.py`, but each rank of a run says what it expects and what it had resident at its peak. Blocks go
back to the system when they are freed, so that the peak is what the step needs. The machine's load changes nothing.
JSON is written after every run.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks import report
from benchmarks.memory import ALLOCATORS, SMOKE
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.extensions.plan.hook import setting_of
from megatron.gpt2.extensions.plan.step import expected
from megatron.gpt2.monitor.reporting import resident_memory
from megatron.gpt2.train.run import build_run
from megatron.gpt2.train.setup import prepare_run
from megatron.gpt2.train.train_step import train_step

BOUND, STEPS = 0.1, 2
SHAPE = (
    "--num-layers 8 --hidden-size 384 --num-attention-heads 6 --seq-length 256 --micro-batch-size 4 "
    "--make-vocab-size-divisible-by 16384 --global-batch-size 24"
)
SCHEDULES = {
    "1f1b": "",
    "interleaved": "--num-layers-per-virtual-pipeline-stage 1",
    "zero-bubble": "--pipeline-schedule zero-bubble",
}
COMMON = (
    "--tokenizer-type bytes --device cpu --attention-dropout 0 --hidden-dropout 0 --train-iters 10 "
    "--eval-iters 0 --max-position-embeddings 1024"
)


def cases(smoke: bool) -> Iterator[dict[str, Any]]:
    if smoke:
        yield {
            "schedule": "1f1b",
            "p": 2,
            "precision": "fp32",
            "recompute": "none",
            "flags": f"{SMOKE} --global-batch-size 12",
        }
        return
    for p, schedule, (precision, recompute) in itertools.product(
        (2, 4), SCHEDULES, (("fp32", "none"), ("bf16", "full"))
    ):
        yield {
            "schedule": schedule,
            "p": p,
            "precision": precision,
            "recompute": recompute,
            "flags": f"{SHAPE} {SCHEDULES[schedule]}",
        }


def run_rank(rank: int, case: dict[str, Any], folder: str, results: Any) -> None:
    """Train for `STEPS` steps as stage `rank`, and put (stage, expected bytes, bytes at the peak) into `results`."""
    torch.set_num_threads(1)
    p = case["p"]
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=p)
    arguments = parse(
        [
            *COMMON.split(),
            *case["flags"].split(),
            "--precision",
            case["precision"],
            "--recompute-granularity",
            case["recompute"],
            "--pipeline-model-parallel-size",
            str(p),
            "--train-data",
            f"{folder}/text.txt",
            "--data-cache-path",
            folder,
            "--save",
            f"{folder}/save",
        ]
    )
    prepared = prepare_run(arguments, Ranks(rank, p, rank, p), lambda line: None)
    run = build_run(prepared, lambda line: None)
    run.engine.model.train()
    for _ in range(STEPS):
        train_step(run)
    results.put((rank, expected(setting_of(prepared), rank).total, resident_memory()["peak resident"]))
    dist.barrier()
    run.close()


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each stage the expected and the measured MB."""
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_text("any text: nothing of it changes what is held. " * 4000)
        spawn(run_rank, (case, folder, results), nprocs=case["p"])
    found = sorted(results.get() for _ in range(case["p"]))
    return [
        {
            "stage": stage,
            "expected_mb": round(asked / 2**20, 1),
            "measured_mb": round(peak / 2**20, 1),
            "ratio": round(asked / peak, 3),
        }
        for stage, asked, peak in found
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="DIR", help="folder of stage_memory.json (default: benchmarks/results)")
    parser.add_argument("--smoke", action="store_true", help="a small model, two stages")
    chosen = parser.parse_args(argv)
    if chosen.smoke and not chosen.output:
        parser.error("--smoke needs --output DIR: its figures are no results")
    path = (Path(chosen.output) if chosen.output else report.RESULTS) / "stage_memory.json"
    result: dict[str, Any] = {**report.header("stage_memory"), "smoke": chosen.smoke, "runs": []}
    os.environ.update(ALLOCATORS["returned"])  # of the ranks, which read it when they start
    for case in cases(chosen.smoke):
        stages = measure(case)
        result["runs"].append({**case, "stages": stages})
        report.write(path, result)
        print(
            f"{case['schedule']:<11}  p {case['p']}  {case['precision']}  {case['recompute']:<4}  "
            + "  ".join(
                f"{stage['expected_mb']:,.0f}/{stage['measured_mb']:,.0f} MB {stage['ratio']:.2f}" for stage in stages
            ),
            flush=True,
        )
    ratios = [stage["ratio"] for run in result["runs"] for stage in run["stages"]]
    near = sum(abs(ratio - 1) <= BOUND for ratio in ratios)
    print(f"expected/measured: {near} of {len(ratios)} stages within 10 %, from {min(ratios)} to {max(ratios)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
