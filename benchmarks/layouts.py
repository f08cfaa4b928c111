#!/usr/bin/env python3
"""Training moved from every layout to every other: the losses of 5 more steps beside those of the unmoved run.

    python benchmarks/layouts.py                      # 12 layouts, 144 moves, worlds of 1 to 8 processes: 3 minutes
    python benchmarks/layouts.py --smoke --output DIR # layouts of one and two processes alone

A layout is model-parallel x data-parallel size, with the optimizer sharded or not. fp32, learning rate 1.5e-4, dropout
0.1, 8 samples a step. The exit code is 1 where a loss differs by 1e-5 or more, or another sample would come next.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch

from benchmarks import report
from tests.distributed import run_ranks
from tests.megatron.gpt2.checkpoint.moved_runs import (
    AFTER,
    BEFORE,
    LAYOUTS,
    Layout,
    begin,
    difference,
    global_batch,
    move,
)
from tests.megatron.gpt2.training.training_runs import write_text

LIMIT = 1e-5


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
        seen = run_ranks(move, world_size, folder, moves, timeout=600)
        for (source, target), of_ranks in zip(moves, zip(*seen, strict=True), strict=True):
            same = torch.equal(global_batch(of_ranks, target), global_batch(unmoved[source], source))
            differences[str(source)][str(target)] = difference(of_ranks, unmoved[source]) if same else float("inf")
        print(f"worlds of {world_size}: {len(moves)} moves", flush=True)
    return differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="DIR", help="folder of layouts.json (default: benchmarks/results)")
    parser.add_argument("--smoke", action="store_true", help="layouts of one and two processes: proves the script")
    chosen = parser.parse_args()
    layouts = [layout for layout in LAYOUTS if layout.world_size <= 2 or not chosen.smoke]
    with tempfile.TemporaryDirectory() as folder:
        differences = measure(folder, layouts)
    print("\n" + report.table(["from \\ to", *map(str, layouts)], [
        [source, *(f"{value:.1e}" for value in row.values())] for source, row in differences.items()]))
    found = [value for row in differences.values() for value in row.values()]
    within = sum(value < LIMIT for value in found)
    print(f"\n{within} of {len(found)} moves within {LIMIT:g}; the greatest difference is {max(found):.1e}")
    output = Path(chosen.output) if chosen.output else report.RESULTS
    report.write(output / "layouts.json", {
        **report.header("training moved between layouts"), "steps": {"before": BEFORE, "after": AFTER}, "limit": LIMIT,
        "moves": len(found), "within": within, "greatest": max(found), "differences": differences})
    return int(within < len(found))


if __name__ == "__main__":
    sys.exit(main())
