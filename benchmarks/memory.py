#!/usr/bin/env python3
"""Compare the expected and the measured memory of training runs on a CPU:

    python benchmarks/memory.py                        # about 15 minutes on 2 cores, at most 4 GB
    python benchmarks/memory.py --smoke --output DIR   # a quick check with a small model
    python benchmarks/memory.py --stages               # each stage of a pipeline: 5 minutes, at most 3 GB

Each run is a few steps of the training program in new processes. benchmarks/memory.py prints the expected memory and
the peak of resident memory, without the pages of files. The allocator has two modes. With `returned`, each freed block
is returned to the system (MALLOC_MMAP_THRESHOLD_), so that the peak is what the step needs. With `kept`, the program's
default, the heap of glibc keeps freed blocks, and the peak includes fragmentation. The mode `kept` is measured only on
one rank, and pipeline stages only in the mode `returned`. Other processes on the machine do not change the results. The
JSON file is written after every run.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # The project need not be installed.

from benchmarks import harness

SHAPES = {
    "4 × 512, 50,304 words": "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 "
    "--micro-batch-size 4 --make-vocab-size-divisible-by 50304",
    "8 × 384, long batch": "--num-layers 8 --hidden-size 384 --num-attention-heads 6 --seq-length 256 "
    "--micro-batch-size 16",
    "6 × 768, 50,304 words": "--num-layers 6 --hidden-size 768 --num-attention-heads 12 --seq-length 512 "
    "--micro-batch-size 2 --make-vocab-size-divisible-by 50304",
}
STAGED = (
    "--num-layers 8 --hidden-size 384 --num-attention-heads 6 --seq-length 256 --micro-batch-size 4 "
    "--make-vocab-size-divisible-by 16384 --global-batch-size 24"
)
SMALL = "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --micro-batch-size 4"
LAYOUTS = {"1 rank": "", "2 ranks, sharded": "--nproc-per-node 2 --use-distributed-optimizer"}
SCHEDULES = {
    "1f1b": "",
    "interleaved": "--num-layers-per-virtual-pipeline-stage 1",
    "zero-bubble": "--pipeline-schedule zero-bubble",
}
ALLOCATORS = {"returned": {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}, "kept": {}}
COMMON = (
    "--tokenizer-type bytes --device cpu --attention-dropout 0 --hidden-dropout 0 --train-iters 4 --log-interval 4 "
    "--eval-iters 0 --max-position-embeddings 1024"
)
NEAR, STAGE_STEPS = 0.1, 2


def case(flags: str, allocator: str, precision: str, recompute: str, **names: Any) -> dict[str, Any]:
    flags = f"{flags} --precision {precision} --recompute-granularity {recompute}"
    return {"allocator": allocator, "precision": precision, "recompute": recompute, **names, "flags": flags}


def cases(smoke: bool) -> Iterator[dict[str, Any]]:
    if smoke:
        yield case(SMALL, "returned", "fp32", "full", shape="2 × 128", layout="1 rank")
        return
    for allocator, precision in itertools.product(ALLOCATORS, ("bf16", "fp32")):
        layouts = list(LAYOUTS) if allocator == "returned" else ["1 rank"]
        for shape, recompute, layout in itertools.product(SHAPES, ("none", "full"), layouts):
            flags = f"{SHAPES[shape]} {LAYOUTS[layout]}"
            yield case(flags, allocator, precision, recompute, shape=shape, layout=layout)


def stage_cases(smoke: bool) -> Iterator[dict[str, Any]]:
    staged = "--pipeline-model-parallel-size"
    if smoke:
        yield case(f"{SMALL} --global-batch-size 12 {staged} 2", "returned", "fp32", "none", schedule="1f1b", p=2)
        return
    settings = (("fp32", "none"), ("bf16", "full"))
    for p, schedule, (precision, recompute) in itertools.product((2, 4), SCHEDULES, settings):
        flags = f"{STAGED} {SCHEDULES[schedule]} {staged} {p}"
        yield case(flags, "returned", precision, recompute, schedule=schedule, p=p)


def expected_and_measured(expected: float, measured: float) -> dict[str, float]:
    """Return expected and measured memory, in MB of 2^20 bytes, and their ratio."""
    return {
        "expected_mb": round(expected, 1),
        "measured_mb": round(measured, 1),
        "ratio": round(expected / measured, 3),
    }


def command(flags: str, folder: Path) -> list[str]:
    files = f"--train-data {folder}/text.txt --data-cache-path {folder} --save {tempfile.mkdtemp(dir=folder)}"
    return f"{COMMON} {flags} {files}".split()


def measure_run(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return expected and measured MB of rank 0, and the expected parts, or {"failed": …}."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment |= {"PYTHONPATH": str(harness.ROOT), "OMP_NUM_THREADS": "1", **ALLOCATORS[run["allocator"]]}
    words = [sys.executable, "-m", "megatron.pretrain_gpt2", *command(run["flags"], folder)]
    process = subprocess.run(words, env=environment, text=True, capture_output=True, timeout=300)
    found = re.search(r"expected at the peak: ([\d.,]+).*peak resident: ([\d.,]+)", process.stdout)
    parts = re.search(r"expected memory .*\n +(.*)", process.stdout)
    if found is None or parts is None:
        return {"failed": harness.last_line(process.stdout + process.stderr)}
    expected, measured = (float(number.replace(",", "")) for number in found.groups())
    return {**expected_and_measured(expected, measured), "parts_mb": parts.group(1)}


def measure_stage(rank: int, world_size: int, words: list[str]) -> dict[str, float]:
    """Run a few steps as pipeline stage `rank`. Return expected and measured MB."""
    from megatron.gpt2.config.arguments import parse
    from megatron.gpt2.dist.ranks import RankInfo
    from megatron.gpt2.extensions.plan.hook import memory_inputs
    from megatron.gpt2.extensions.plan.memory import estimate_memory
    from megatron.gpt2.monitor.log_lines import resident_memory
    from megatron.gpt2.train.setup import build_context
    from megatron.gpt2.train.train_step import train_step
    from megatron.gpt2.train.trainer import build_trainer

    context = build_context(parse(words), RankInfo(rank, world_size, rank, world_size), lambda line: None)
    trainer = build_trainer(context, lambda line: None)
    trainer.state.model.train()
    for _ in range(STAGE_STEPS):
        train_step(trainer)
    peak = resident_memory()["peak resident"]
    trainer.close()
    return expected_and_measured(estimate_memory(memory_inputs(context), rank).total / 2**20, peak / 2**20)


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--stages", action="store_true", help="measure each stage of a pipeline")
    args = harness.parse_args(parser, argv)
    name = "stage_memory" if args.stages else "memory"
    result: dict[str, Any] = {**harness.header(name), "smoke": args.smoke, "runs": []}
    if args.stages:
        os.environ.update(ALLOCATORS["returned"])  # The ranks read MALLOC_MMAP_THRESHOLD_ when they start.
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "text.txt").write_text("any text: nothing of it changes what is held. " * 4000)
        for run in (stage_cases if args.stages else cases)(args.smoke):
            if args.stages:
                run["stages"] = found = harness.run_on_ranks(measure_stage, run["p"], command(run["flags"], folder))
            else:
                found = [measure_run(run, folder)]
                run |= found[0]
            result["runs"].append(run)
            harness.write_json(args.output / f"{name}.json", result)
            texts = (
                f"{measured['expected_mb']:,.0f} / {measured['measured_mb']:,.0f} MB = {measured['ratio']:.2f}"
                for measured in found
            )
            print(f"{run['allocator']} {run['flags']}: {run.get('failed') or ',  '.join(texts)}", flush=True)
    for allocator in ALLOCATORS:
        runs = [run for run in result["runs"] if run["allocator"] == allocator and "failed" not in run]
        ratios = [measured["ratio"] for run in runs for measured in run.get("stages", [run])]
        if ratios:
            close = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
            print(f"{allocator}: {close} of {len(ratios)} within 10 %, from {min(ratios)} to {max(ratios)}")
    return int(any("failed" in run for run in result["runs"]))


if __name__ == "__main__":
    raise SystemExit(main())
