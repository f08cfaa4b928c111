#!/usr/bin/env python3
"""The expected memory of training runs beside the measured one, on a CPU:

    python benchmarks/memory.py                        # about 15 minutes on 2 cores, 4 GB at most at once
    python benchmarks/memory.py --smoke --output DIR   # a small model: does it run?

Each run is the training program in fresh processes, 4 steps of it. Its log has what it expects, and what it had
resident at its peak, without the pages of files. Two ways of the allocator: `returned`, in which each block goes back
to the system when it is freed (MALLOC_MMAP_THRESHOLD_), so that the peak is what the step needs; and on one rank
`kept`, the program's own way, in which glibc's heap keeps it, holes and all. The machine's load changes nothing. JSON
is written after every run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

from benchmarks import report
from benchmarks.report import ROOT

SHAPES = {
    "4 × 512, 50,304 words": "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 "
    "--micro-batch-size 4 --make-vocab-size-divisible-by 50304",
    "8 × 384, long batch": "--num-layers 8 --hidden-size 384 --num-attention-heads 6 --seq-length 256 "
    "--micro-batch-size 16",
    "6 × 768, 50,304 words": "--num-layers 6 --hidden-size 768 --num-attention-heads 12 --seq-length 512 "
    "--micro-batch-size 2 --make-vocab-size-divisible-by 50304",
}
SMOKE = "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --micro-batch-size 4"
LAYOUTS = {"1 rank": "", "2 ranks, sharded": "--nproc-per-node 2 --use-distributed-optimizer"}
ALLOCATORS = {"returned": {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}, "kept": {}}
COMMON = (
    "--tokenizer-type bytes --device cpu --attention-dropout 0 --hidden-dropout 0 --train-iters 4 "
    "--log-interval 4 --eval-iters 0 --max-position-embeddings 1024"
)


def cases(smoke: bool) -> Iterator[dict[str, str]]:
    if smoke:
        yield {
            "shape": "2 × 128",
            "precision": "fp32",
            "recompute": "full",
            "layout": "1 rank",
            "allocator": "returned",
            "flags": f"{SMOKE} --precision fp32 --recompute-granularity full",
        }
        return
    for allocator, precision in itertools.product(ALLOCATORS, ("bf16", "fp32")):
        layouts = list(LAYOUTS) if allocator == "returned" else ["1 rank"]
        for shape, recompute, layout in itertools.product(SHAPES, ("none", "full"), layouts):
            yield {
                "shape": shape,
                "precision": precision,
                "recompute": recompute,
                "layout": layout,
                "allocator": allocator,
                "flags": f"{SHAPES[shape]} {LAYOUTS[layout]} --precision {precision} "
                f"--recompute-granularity {recompute}",
            }


def measure(case: dict[str, str], folder: Path) -> dict[str, Any]:
    """Expected and measured MB of rank 0, and the expected parts; {"failed": …} where the run did not end well."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **ALLOCATORS[case["allocator"]]}
    text = folder / "text.txt"
    text.write_text("any text: nothing of it changes what is held. " * 4000)
    with tempfile.TemporaryDirectory(dir=folder) as save:
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "megatron.pretrain_gpt2",
                *COMMON.split(),
                *case["flags"].split(),
                "--train-data",
                str(text),
                "--data-cache-path",
                str(folder),
                "--save",
                save,
            ],
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
    found = re.search(r"expected at the peak: ([\d.,]+).*peak resident: ([\d.,]+)", run.stdout)
    parts = re.search(r"expected memory .*\n +(.*)", run.stdout)
    if found is None or parts is None:
        return {"failed": report.without_paths(run.stdout.strip().splitlines()[-1])[:300]}
    expected, measured = (float(number.replace(",", "")) for number in found.groups())
    return {
        "expected_mb": expected,
        "measured_mb": measured,
        "ratio": round(expected / measured, 3),
        "parts_mb": parts.group(1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="DIR", help="folder of memory.json (default: benchmarks/results)")
    parser.add_argument("--smoke", action="store_true", help="a small model, one rank")
    chosen = parser.parse_args(argv)
    if chosen.smoke and not chosen.output:
        parser.error("--smoke needs --output DIR: its figures are no results")
    path = (Path(chosen.output) if chosen.output else report.RESULTS) / "memory.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {**report.header("memory"), "smoke": chosen.smoke, "runs": []}
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases(chosen.smoke):
            run = {**case, **measure(case, Path(scratch))}
            result["runs"].append(run)
            report.write(path, result)
            figures = run.get("failed") or (
                f"expected {run['expected_mb']:7,.0f} MB, measured "
                f"{run['measured_mb']:7,.0f} MB, ratio {run['ratio']:.2f}"
            )
            print(
                f"{run['allocator']:<8}  {run['precision']}  {run['shape']:<22}  {run['recompute']:<4}  "
                f"{run['layout']:<16}  {figures}",
                flush=True,
            )
    for name in ALLOCATORS:
        far = [abs(run["ratio"] - 1) for run in result["runs"] if run["allocator"] == name and "ratio" in run]
        print(f"{name}: {max(far):.0%} at most from the measured peak" if far else f"{name}: not measured")
    return 1 if any("failed" in run for run in result["runs"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
