#!/usr/bin/env python3
"""What --exact-layouts shows and what it costs.

    python benchmarks/exact_layouts.py                       # all parts: an hour on two cores
    python benchmarks/exact_layouts.py layouts               # 50 steps in each of 25 layouts, in fp32, bf16 and fp16;
                                                             # the same line goes on where it was interrupted
    python benchmarks/exact_layouts.py moves                 # stopped at random steps, continued elsewhere, 20 times
    python benchmarks/exact_layouts.py cost                  # 124M on one rank and on two, beside plain sums
    python benchmarks/exact_layouts.py layouts --smoke --output DIR

The exit code is 1 where a bit differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch

from benchmarks import report
from benchmarks.problem import MODELS, Problem
from benchmarks.step_pairs import beside, steps_in_turns
from benchmarks.train import write_tokens
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.test_exact_layouts import FP16, LARGE, QUICK, WIDE, Layout, go_on, train, whole
from tests.megatron.gpt2.train.training_runs import write_text

PRECISIONS = {"fp32": ["--precision", "fp32"], "bf16": ["--precision", "bf16"], "fp16": FP16}
STEPS, MOVES = 50, 20
EXACT = ("--exact-layouts", "4")


def layouts(folder: Path, smoke: bool, output: Path) -> dict[str, Any]:
    """Of each layout and precision whether losses, norms, weights and Adam's state equal those of one process. A call
    that was interrupted left its rows in the file `output`: another one at the same commit goes on."""
    steps = 3 if smoke else STEPS
    head = {**report.header("--exact-layouts: layouts"), "steps": steps}
    rows: list[dict[str, Any]] = (report.earlier(output, head, "commit", "steps") or {}).get("rows", [])
    chosen = [layout for layout in QUICK + WIDE + LARGE if not smoke or layout.world_size == 1]
    for name, flags in PRECISIONS.items():
        lacking = [
            layout
            for layout in chosen
            if not any(
                {**layout._asdict(), "flags": " ".join(layout.flags), "precision": name}.items() <= row.items()
                for row in rows
            )
        ]
        if not lacking:
            continue
        (one,) = run_ranks(train, 1, str(folder), [Layout()], flags, steps)[0]
        tensors = whole([one])
        for layout in lacking:
            results = [
                of_rank[0]
                for of_rank in run_ranks(train, layout.world_size, str(folder), [layout], flags, steps, timeout=900)
            ]
            found = whole(results)
            said = [
                key
                for key in ("loss", "norm", "skipped", "evaluation")
                if any(result[key] != one[key] for result in results)
            ]
            differing = [
                f"{kind} {tensor}"
                for (kind, tensor), values in tensors.items()
                if not torch.equal(found[kind, tensor], values)
            ]
            rows.append(
                {
                    **layout._asdict(),
                    "flags": " ".join(layout.flags),
                    "precision": name,
                    "skipped": sum(one["skipped"]),
                    "differing": said + differing,
                }
            )
            report.write(output, {**head, "rows": rows})
            print(
                f"{len(rows):>4} of {len(chosen) * len(PRECISIONS)}  {name}, {layout.tensor}x{layout.pipeline}x"
                f"{layout.data} {' '.join(layout.flags)}: {(said + differing) or 'equal to the bit'}",
                flush=True,
            )
    equal = sum(not row["differing"] for row in rows)
    print(f"\n{equal} of {len(rows)} equal to the bit over {steps} steps")
    return {"steps": steps, "layouts": len(rows), "equal": equal, "rows": rows}


def moves(folder: Path, smoke: bool, output: Path) -> dict[str, Any]:
    """A run that goes through `MOVES` layouts, stopped after a random number of steps in each."""
    draw = random.Random(1)
    lengths = [draw.randint(1, 4) for _ in range(2 if smoke else MOVES)]
    ways = [draw.choice([layout for layout in QUICK + WIDE if not smoke or layout.world_size == 1]) for _ in lengths]
    flags = PRECISIONS["bf16"]
    (one,) = run_ranks(train, 1, str(folder), [Layout()], flags, sum(lengths))[0]
    rows, results = [], []
    for number, (layout, length) in enumerate(zip(ways, lengths, strict=True)):
        results = run_ranks(go_on, layout.world_size, str(folder), layout, flags, length, number > 0, timeout=600)
        rows.append({**layout._asdict(), "flags": " ".join(layout.flags), "steps": length})
        print(
            f"{number + 1:>4} of {len(ways)}  {length} steps in {layout.tensor}x{layout.pipeline}x{layout.data} "
            f"{' '.join(layout.flags)}",
            flush=True,
        )
    found, expected = whole(results), whole([one])
    differing = [
        f"{kind} {name}" for (kind, name), values in expected.items() if not torch.equal(found[kind, name], values)
    ]
    print(
        f"\nafter {sum(lengths)} steps in {len(ways)} layouts: {differing or 'equal to the bit'} beside the run that "
        "was never stopped"
    )
    return {"moves": len(ways), "steps": sum(lengths), "differing": differing, "rows": rows}


def problem(scratch: Path, smoke: bool) -> Problem:
    layers, hidden, heads = (2, 64, 4) if smoke else MODELS["124M"]
    return Problem(
        layers,
        hidden,
        heads,
        64 if smoke else 1024,
        8,
        vocab_size=512 if smoke else 50257,
        tokens=str(scratch / "tokens"),
        scratch=str(scratch),
    )


def cost(folder: Path, smoke: bool, output: Path) -> dict[str, Any]:
    """The time of a step of 124M, 8 x 1,024 tokens, bf16, eager, over that with plain sums, and the bytes that a rank
    sends in it."""
    shape, rows = problem(folder, smoke), {}
    write_tokens(shape, 64)
    ways = (
        ("1 rank", 1, ()),
        ("2 tensor-parallel", 2, ("--model-parallel-size", "2")),
        ("2 data-parallel", 2, ("--micro-batch-size", "4")),
    )
    for name, world_size, flags in ways[:1] if smoke else ways:
        found = run_ranks(
            steps_in_turns,
            world_size,
            shape,
            {"plain": flags, "exact": (*flags, *EXACT)},
            1 if smoke else 5,
            timeout=1200,
        )[0]
        rows[name] = {
            "clock": beside(found, "clock"),
            "processor": beside(found, "processor"),
            **{f"{way}_megabytes": of_way["sent"][0] / 1e6 for way, of_way in found.items()},
        }
    print(
        report.table(
            ["", "median ratio", "best of each", "processor time", "best", "MB sent, plain", "exact"],
            [
                [
                    name,
                    f"{row['clock']['ratio']['median']:.3f}",
                    f"{row['clock']['of_best']:.3f}",
                    f"{row['processor']['ratio']['median']:.3f}",
                    f"{row['processor']['of_best']:.3f}",
                    f"{row['plain_megabytes']:,.0f}",
                    f"{row['exact_megabytes']:,.0f}",
                ]
                for name, row in rows.items()
            ],
        )
    )
    return {"threads": torch.get_num_threads(), "rows": rows}


PARTS: dict[str, Callable[[Path, bool, Path], dict[str, Any]]] = {"layouts": layouts, "moves": moves, "cost": cost}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder of the JSON (default: benchmarks/results)")
    parser.add_argument("--smoke", action="store_true", help="a few steps of one process: proves the script")
    parser.add_argument("part", nargs="?", choices=tuple(PARTS), help="default: all")
    chosen = parser.parse_args()
    failed = False
    for name in [chosen.part] if chosen.part else PARTS:
        output = (chosen.output or report.RESULTS) / f"exact_{name}.json"
        with tempfile.TemporaryDirectory() as folder:
            write_text(Path(folder))
            found = PARTS[name](Path(folder), chosen.smoke, output)
        report.write(output, {**report.header(f"--exact-layouts: {name}"), **found})
        failed |= bool(found.get("differing")) or found.get("equal", 0) < found.get("layouts", 0)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
