#!/usr/bin/env python3
"""tools/verify.py on clean layouts: it must find nothing, and the largest difference shows how much room its bounds
have. Then 124M parameters on two layouts, with time and memory.

    python benchmarks/verify.py                       # 20 comparisons, then 124M: 10 minutes on two cores
    python benchmarks/verify.py --smoke --output DIR  # two comparisons of a small model

The exit code is 1 where a comparison is not the same within rounding. 124M needs GPT-2's vocabulary, in the folder of
test data.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

from benchmarks import report
from megatron.gpt2.extensions.verify.command import compare_layouts, parse
from megatron.gpt2.extensions.verify.report import Result
from tests.conftest import TEST_DATA
from tests.megatron.gpt2.train.training_runs import write_text

MODEL = [
    "--num-layers",
    "4",
    "--hidden-size",
    "128",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "128",
    "--max-position-embeddings",
    "128",
    "--tokenizer-type",
    "bytes",
    "--train-iters",
    "100",
    "--hidden-dropout",
    "0.1",
    "--attention-dropout",
    "0.1",
    "--micro-batch-size",
    "4",
    "--device",
    "cpu",
]
SPLIT, SEQUENCE = "--model-parallel-size 2", "--model-parallel-size 2 --sequence-parallel"
SHARDED = "--data-parallel-size 2 --micro-batch-size 2 --use-distributed-optimizer"
ACCUMULATED, RECOMPUTED = "--micro-batch-size 1", "--recompute-granularity full"
# By the flags of both sides, the layouts that are compared with one rank. At a learning rate of 2e-3 AdamW moves
# weights by a tenth of their size.
CLEAN = {
    "fp32": [
        ACCUMULATED,
        RECOMPUTED,
        SPLIT,
        SEQUENCE,
        SHARDED,
        f"{SEQUENCE} {ACCUMULATED} {RECOMPUTED}",
        "--model-parallel-size 4",
        "--data-parallel-size 2 --micro-batch-size 1 --DDP-impl torch",
        "--model-parallel-size 2 --data-parallel-size 2 --micro-batch-size 2 --use-distributed-optimizer "
        "--recompute-granularity selective",
        f"{SPLIT} --cpu-offload-optimizer",
        "--data-parallel-size 4 --micro-batch-size 1 --grad-reduce-in-bf16",
    ],
    "fp32 --lr 2e-3": [SEQUENCE],
    "bf16": [ACCUMULATED, SEQUENCE, SHARDED, "--model-parallel-size 4"],
    "fp16 --initial-loss-scale 4096": [ACCUMULATED, SEQUENCE, SHARDED, SPLIT],
}
LARGE = [
    "--model",
    "117m",
    "--micro-batch-size",
    "1",  # its recipe has dropout 0.1
    "--global-batch-size",
    "2",
    "--precision",
    "fp32",
    "--train-iters",
    "10",
    "--split",
    "100,0,0",
    "--vocab-file",
    str(TEST_DATA / "gpt2" / "encoder.json"),
    "--merge-file",
    str(TEST_DATA / "gpt2" / "vocab.bpe"),
]


def compared(command: Sequence[str], layouts: Sequence[str], steps: int) -> list[Result]:
    """One rank, and each of the layouts beside it."""
    flags = [word for layout in ("", *layouts) for word in ("--layout", layout)]
    return compare_layouts(parse([*flags, "--steps", str(steps), "--", *command])).results


def row(precision: str, result: Result) -> dict[str, Any]:
    """A comparison as JSON."""
    verdict, computed = result.verdict, result.verdict.computed
    nearest = verdict.nearest
    return {
        "precision": precision.split()[0],
        "layout": result.layout.flags,
        "ranks": result.layout.world_size,
        "verdict": verdict.word,
        "tensors": len(verdict.tensors),
        "equal": computed.equal / computed.count,
        "median": computed.quantile(0.5),
        "quantile_99": computed.quantile(0.99),
        "greatest": computed.greatest,
        "share_of_bound": nearest.share,
        "nearest": f"{nearest.row.key.name}, step {nearest.row.key.step}",
    }


class Memory(threading.Thread):
    """The most memory of this process and those that it started, in bytes: shared pages count once."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self._over = 0, threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.3):
            self.most = max(self.most, sum(map(_proportional, [os.getpid(), *_descendants(os.getpid())])))

    def stop(self) -> int:
        self._over.set()
        self.join()
        return self.most


def _descendants(process: int) -> list[int]:
    try:
        own = [
            int(number)
            for path in Path(f"/proc/{process}/task").glob("*/children")
            for number in path.read_text().split()
        ]
    except OSError:
        return []
    return own + [number for child in own for number in _descendants(child)]


def _proportional(process: int) -> int:
    try:
        found = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def large(text: str) -> dict[str, Any]:
    """124M parameters, two steps of two samples of 1,024 tokens, split in two against whole."""
    memory, began = Memory(), time.perf_counter()
    memory.start()
    (result,) = compared([*LARGE, "--train-data", text, "--data-cache-path", str(Path(text).parent)], [SEQUENCE], 2)
    seconds = time.perf_counter() - began
    return {
        **row("fp32", result),
        "seconds": seconds,
        "most_memory_bytes": memory.stop(),
        "parameters": 124_439_808,
        "load_before": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="DIR", help="folder of verify.json (default: benchmarks/results)")
    parser.add_argument("--smoke", action="store_true", help="two comparisons alone: proves the script")
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {**report.header("tools/verify.py on clean layouts"), "steps": 3, "rows": rows}
    output = (Path(chosen.output) if chosen.output else report.RESULTS) / "verify.json"
    with tempfile.TemporaryDirectory() as folder:
        text = str(write_text(Path(folder)))
        for precision, layouts in ({"fp32": [ACCUMULATED, SEQUENCE]} if chosen.smoke else CLEAN).items():
            command = [*MODEL, "--train-data", text, "--data-cache-path", folder, "--precision", *precision.split()]
            rows += [row(precision, found) for found in compared(command, layouts, 3)]
            report.write(output, result)
        if not chosen.smoke and (TEST_DATA / "gpt2").is_dir():
            result["large"] = large(text)
    print(
        report.table(
            ["precision", "layout", "verdict", "median", "99 %", "greatest", "of bound", "nearest"],
            [
                [
                    each["precision"],
                    each["layout"],
                    each["verdict"],
                    *(f"{each[name]:.2g}" for name in ("median", "quantile_99", "greatest", "share_of_bound")),
                    str(each["nearest"]),
                ]
                for each in rows
            ],
        )
    )
    same = sum(each["verdict"] != "DIFFERS" for each in rows)
    print(f"\n{same} of {len(rows)} comparisons find nothing")
    if "large" in result:
        print(
            f"124M: {result['large']['verdict']}, {result['large']['seconds']:.0f} s, "
            f"{result['large']['most_memory_bytes'] / 2**30:.1f} GiB"
        )
    report.write(output, result)
    return int(same < len(rows))


if __name__ == "__main__":
    sys.exit(main())
