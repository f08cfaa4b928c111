#!/usr/bin/env python3
"""The losses of every layout beside those of one process, and training moved from every layout to every other.

    python benchmarks/layouts.py                      # both parts: an hour on two cores
    python benchmarks/layouts.py losses               # 30 steps in each layout
    python benchmarks/layouts.py moves                # 20 layouts, 400 moves, 5 steps after each
    python benchmarks/layouts.py --smoke --output DIR # layouts of one and two processes alone

A layout is tensor- x data-parallel size, _ppP a pipeline of P stages, vV with V chunks per rank, and sharded where the
optimizer is. fp32, learning rate 1.5e-4, dropout 0.1, 8 samples a step, worlds of 1 to 8 processes. The exit code is 1
where a loss differs by 1e-5 or more, or another sample would come next.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch

from benchmarks import report
from tests.distributed import run_ranks
from tests.megatron.gpt2.checkpoint.moved_runs import (
    AFTER,
    BEFORE,
    LAYOUTS,
    PIPELINES,
    Layout,
    begin,
    difference,
    global_batch,
    move,
)
from tests.megatron.gpt2.train.test_layouts import FULL, SEQUENCE, SHARDED, TWO_CHUNKS, ZERO_BUBBLE, train
from tests.megatron.gpt2.train.test_layouts import Layout as Trained
from tests.megatron.gpt2.train.training_runs import write_text

LIMIT = 1e-5
STEPS = 30
MOVES_OF_A_WORLD = 10  # each leaves its groups' threads behind, which end with the processes


def measure(folder: str, layouts: list[Layout]) -> dict[str, dict[str, float]]:
    """The greatest difference of a loss, by source and target."""
    write_text(Path(folder))
    worlds = sorted({layout.world_size for layout in layouts})
    unmoved = {}
    for world_size in worlds:
        here = [layout for layout in layouts if layout.world_size == world_size]
        seen = run_ranks(begin, world_size, folder, here, timeout=600)
        unmoved.update({layout: list(of_ranks) for layout, of_ranks in zip(here, zip(*seen, strict=True), strict=True)})
        print(f"worlds of {world_size}: {', '.join(map(str, here))} saved", flush=True)
    differences: dict[str, dict[str, float]] = {str(source): {} for source in layouts}
    for world_size in worlds:
        moves = [(source, target) for source in layouts for target in layouts if target.world_size == world_size]
        for start in range(0, len(moves), MOVES_OF_A_WORLD):
            some = moves[start : start + MOVES_OF_A_WORLD]
            seen = run_ranks(move, world_size, folder, some, timeout=600)
            for (source, target), of_ranks in zip(some, zip(*seen, strict=True), strict=True):
                same = torch.equal(global_batch(of_ranks, target), global_batch(unmoved[source], source))
                differences[str(source)][str(target)] = difference(of_ranks, unmoved[source]) if same else float("inf")
            print(f"worlds of {world_size}: {start + len(some)} of {len(moves)} moves", flush=True)
    return differences


def trained_layouts(smoke: bool) -> Iterator[Trained]:
    """Every size up to 8 ranks with every schedule that fits it. Micro-batches and flags take turns, so that each comes
    with each size."""
    sizes = [(t, p, d) for t, p, d in product((1, 2, 4), (1, 2, 3, 4), (1, 2, 4)) if t * p * d <= (2 if smoke else 8)]
    turn = 0
    for (t, p, d), layers, schedule in product(sizes, (4, 6), ("", TWO_CHUNKS, ZERO_BUBBLE)):
        if (p == 1 and schedule) or (schedule == TWO_CHUNKS and layers < 2 * p):
            continue
        for with_flags in (False, True):
            micro = [size for size in (1, 2, 4, 8) if 8 % (size * d) == 0]
            named = ((SEQUENCE, t > 1), (SHARDED, d > 1), (FULL, turn % 3 == 0))
            flags = " ".join(flag for flag, is_given in named if is_given and with_flags)
            if flags or not with_flags:
                yield Trained(t, p, d, micro[turn % len(micro)], f"{schedule} {flags}", layers)
                turn += 1
    for t, p in ((1, 1), (2, 1), (1, 2)):  # the compiler
        if t * p <= 2:
            yield Trained(t, p, 1, 4, "--compile")


def losses(folder: str, smoke: bool) -> dict[str, Any]:
    """Of each layout the greatest relative difference of a loss from that of one process."""
    write_text(Path(folder))
    reference = {
        layers: run_ranks(train, 1, folder, [Trained(1, 1, 1, 8, layers=layers)], STEPS)[0][0] for layers in (4, 6)
    }
    rows: list[dict[str, Any]] = []
    layouts = list(trained_layouts(smoke))
    for world_size in sorted({layout.world_size for layout in layouts}):
        for layout in (one for one in layouts if one.world_size == world_size):
            one = reference[layout.layers]
            results = [of_rank[0] for of_rank in run_ranks(train, world_size, folder, [layout], STEPS, timeout=900)]
            apart = max(abs(a - b) / b for seen in results for a, b in zip(seen["loss"], one["loss"], strict=True))
            same = all(
                torch.equal(weight, one["initial"][name])
                for seen in results
                for name, weight in seen["initial"].items()
            )
            rows.append(
                {
                    **layout._asdict(),
                    "flags": layout.flags,
                    "greatest": apart,
                    "same_start": same,
                    "tied_equal": all(all(seen["tied"]) for seen in results),
                }
            )
            print(
                f"{len(rows):>4} of {len(layouts)}  {layout.layers} layers, {layout.tensor}x{layout.pipeline}x"
                f"{layout.data}, micro-batch {layout.micro} {layout.flags}: {apart:.1e}",
                flush=True,
            )
    within = sum(row["greatest"] < LIMIT and row["same_start"] and row["tied_equal"] for row in rows)
    print(
        f"\n{within} of {len(rows)} layouts (tensor x pipeline x data) within {LIMIT:g} of one process over {STEPS} "
        f"steps; the greatest difference is {max(row['greatest'] for row in rows):.1e}"
    )
    return {
        "steps": STEPS,
        "limit": LIMIT,
        "layouts": len(rows),
        "within": within,
        "greatest": max(row["greatest"] for row in rows),
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="DIR", help="folder of layouts.json (default: benchmarks/results)")
    parser.add_argument("--smoke", action="store_true", help="layouts of one and two processes: proves the script")
    parser.add_argument("part", nargs="?", choices=("losses", "moves"), help="default: both")
    chosen = parser.parse_args()
    output = Path(chosen.output) if chosen.output else report.RESULTS
    failed = False
    if chosen.part != "moves":
        with tempfile.TemporaryDirectory() as folder:
            found = losses(folder, chosen.smoke)
        report.write(output / "layouts_losses.json", {**report.header("losses in every layout"), **found})
        failed = found["within"] < found["layouts"]
    return int(moves(output, chosen.smoke) or failed) if chosen.part != "losses" else int(failed)


def moves(output: Path, smoke: bool) -> bool:
    """Whether a loss after a move differs."""
    layouts = [layout for layout in LAYOUTS + PIPELINES if layout.world_size <= 2 or not smoke]
    with tempfile.TemporaryDirectory() as folder:
        differences = measure(folder, layouts)
    print(
        "\n"
        + report.table(
            ["from \\ to", *map(str, layouts)],
            [[source, *(f"{value:.1e}" for value in row.values())] for source, row in differences.items()],
        )
    )
    found = [value for row in differences.values() for value in row.values()]
    within = sum(value < LIMIT for value in found)
    print(f"\n{within} of {len(found)} moves within {LIMIT:g}; the greatest difference is {max(found):.1e}")
    report.write(
        output / "layouts.json",
        {
            **report.header("training moved between layouts"),
            "steps": {"before": BEFORE, "after": AFTER},
            "limit": LIMIT,
            "moves": len(found),
            "within": within,
            "greatest": max(found),
            "differences": differences,
        },
    )
    return within < len(found)


if __name__ == "__main__":
    sys.exit(main())
