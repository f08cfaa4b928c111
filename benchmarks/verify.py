#!/usr/bin/env python3
"""tools/verify.py on clean layouts: it must find nothing, and the largest difference shows how much room its bounds
have. That it finds planted faults is shown by tests/megatron/gpt2/extensions/verify/test_verification.py.

    python benchmarks/verify.py                       # 20 comparisons: 6 minutes on two cores
    python benchmarks/verify.py --smoke --output DIR  # two comparisons

The exit code is 1 if a comparison is not the same within rounding.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

from benchmarks import harness
from megatron.gpt2.extensions.verify.command import compare_layouts, parse

MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--tokenizer-type bytes --train-iters 100 --hidden-dropout 0.1 --attention-dropout 0.1 --micro-batch-size 4 "
    "--device cpu"
)
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
        f"{SPLIT} {SHARDED} --recompute-granularity selective",
        f"{SPLIT} --cpu-offload-optimizer",
        "--data-parallel-size 4 --micro-batch-size 1 --grad-reduce-in-bf16",
    ],
    "fp32 --lr 2e-3": [SEQUENCE],
    "bf16": [ACCUMULATED, SEQUENCE, SHARDED, "--model-parallel-size 4"],
    "fp16 --initial-loss-scale 4096": [ACCUMULATED, SEQUENCE, SHARDED, SPLIT],
}


def compared(command: str, precision: str, layouts: Sequence[str]) -> list[dict[str, Any]]:
    """One rank, and each of the layouts beside it, as JSON."""
    flags = [word for layout in ("", *layouts) for word in ("--layout", layout)]
    rows = []
    words = f"--steps 3 -- {command} --precision {precision}".split()
    for result in compare_layouts(parse([*flags, *words])).results:
        verdict, computed = result.verdict, result.verdict.computed
        nearest = verdict.nearest
        row = {"precision": precision.split()[0], "layout": result.layout.flags, "ranks": result.layout.world_size}
        row |= {"verdict": verdict.word, "tensors": len(verdict.tensors), "equal": computed.equal / computed.count}
        row |= {"median": computed.quantile(0.5), "quantile_99": computed.quantile(0.99)}
        row |= {"greatest": computed.greatest, "share_of_bound": nearest.share}
        rows.append({**row, "nearest": f"{nearest.row.key.name}, step {nearest.row.key.step}"})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    chosen = harness.options(harness.parser(__doc__), argv)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {**harness.header("tools/verify.py on clean layouts"), "steps": 3, "rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        text = harness.write_text(Path(folder))
        for precision, layouts in ({"fp32": [ACCUMULATED, SEQUENCE]} if chosen.smoke else CLEAN).items():
            rows += compared(f"{MODEL} --train-data {text} --data-cache-path {folder}", precision, layouts)
            harness.write(chosen.output / "verify.json", result)
    figures = ("median", "quantile_99", "greatest", "share_of_bound")
    columns = ("precision", "layout", "verdict", *figures, "nearest")
    cells = [[f"{row[name]:.2g}" if name in figures else str(row[name]) for name in columns] for row in rows]
    same = sum(row["verdict"] != "DIFFERS" for row in rows)
    print(f"{harness.table(columns, cells)}\n\n{same} of {len(rows)} comparisons find nothing")
    return int(same < len(rows))


if __name__ == "__main__":
    sys.exit(main())
