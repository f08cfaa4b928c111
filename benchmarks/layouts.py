#!/usr/bin/env python3
"""Train one small GPT-2 in many parallel layouts and compare their losses with those of one process.

    python benchmarks/layouts.py                       # train all layouts, then draw (minutes on two cores)
    python benchmarks/layouts.py --draw                # draw the results that exist

All runs share the seed, the text (the project's licence) and 16 samples per step: fp32, dropout 0.1 (attention and
hidden), gloo on CPU. The script writes all losses to layouts.json, and layouts_light.svg and layouts_dark.svg to
docs/figures (with --output, next to layouts.json). The exit code is 1 if a loss differs from that of one process by
1e-5 (relative) or more.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

from benchmarks import harness
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.gathering import all_reduce_over_data_and_pipeline
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.train.setup import build_context
from megatron.gpt2.train.train_step import train_step
from megatron.gpt2.train.trainer import build_trainer

STEPS, LIMIT = 50, 1e-5
FLAGS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 "
    "--tokenizer-type bytes --split 95,5 --device cpu --precision fp32 --global-batch-size 16 --train-iters 1000 "
    "--eval-iters 0 --lr 5e-4 --lr-decay-style constant --warmup 0 --attention-dropout 0.1 --hidden-dropout 0.1 "
    "--make-vocab-size-divisible-by 8"
)
SEQUENCE, SHARDED, ZERO_2 = "--sequence-parallel", "--use-distributed-optimizer", "--zero-stage 2"
RECOMPUTE, ZERO_BUBBLE = "--recompute-granularity full", "--pipeline-schedule zero-bubble"
INTERLEAVED = "--num-virtual-stages-per-pipeline-rank 2"
WORDS = {SEQUENCE: "sequence-parallel", SHARDED: "ZeRO-1", ZERO_2: "ZeRO-2", RECOMPUTE: "recompute"}
WORDS |= {ZERO_BUBBLE: "zero-bubble", INTERLEAVED: "interleaved"}
# (tensor-, pipeline- and data-parallel size, samples per micro-batch, flags); the first is the reference.
Layout = tuple[int, int, int, int, str]
LAYOUTS: list[Layout] = [
    (1, 1, 1, 16, ""),
    (1, 1, 1, 2, RECOMPUTE),
    (2, 1, 1, 16, ""),
    (2, 1, 1, 8, SEQUENCE),
    (1, 2, 1, 4, ""),
    (1, 2, 1, 2, INTERLEAVED),
    (1, 2, 1, 2, f"{ZERO_BUBBLE} {RECOMPUTE}"),
    (1, 1, 2, 8, ""),
    (1, 1, 2, 4, SHARDED),
    (1, 1, 2, 2, ZERO_2),
    (4, 1, 1, 8, f"{SEQUENCE} {RECOMPUTE}"),
    (2, 2, 1, 4, f"{SEQUENCE} {INTERLEAVED}"),
    (2, 1, 2, 4, f"{SEQUENCE} {SHARDED}"),
    (1, 4, 1, 2, ZERO_BUBBLE),
    (1, 2, 2, 2, f"{SHARDED} {INTERLEAVED}"),
    (1, 1, 4, 4, ZERO_2),
    (8, 1, 1, 16, SEQUENCE),
    (4, 2, 1, 4, ""),
    (2, 2, 2, 2, f"{SEQUENCE} {SHARDED}"),
    (2, 4, 1, 2, f"{SEQUENCE} {ZERO_BUBBLE}"),
    (4, 1, 2, 4, f"{SEQUENCE} {ZERO_2}"),
    (1, 8, 1, 2, ""),
    (1, 4, 2, 2, f"{SHARDED} {INTERLEAVED}"),
    (1, 1, 8, 2, SHARDED),
]
# Losses at steps 1, 5 and 10 of 18 layouts, 1 to 8 GPUs, from a comment of 2026-08-04 in
# github.com/pytorch/torchtitan/issues/3029 (a Kimi K3 debug model in development, seed 42, deterministic).
TORCHTITAN = """
12.05575 10.89670 9.81530, 12.07003 11.09161 9.97418, 12.04905 10.87594 9.81217, 12.06936 11.05554 9.97089,
12.05239 11.01701 9.95286, 12.05729 10.63687 9.73056, 12.04102 11.00072 9.93129, 12.04419 10.64952 9.74151,
12.07969 10.77366 9.77886, 12.07003 11.10597 9.96939, 12.03851 10.82012 9.80058, 12.05770 11.02899 9.92700,
12.06318 10.81674 9.77785, 12.03346 10.88771 9.86456, 12.06240 11.10712 9.93111, 12.04408 10.81012 9.81014,
12.03252 11.02760 9.93343, 12.07386 11.02728 9.94493"""


def ranks_of(layout: Layout) -> int:
    return layout[0] * layout[1] * layout[2]


def name_of(layout: Layout) -> str:
    """For example `TP 2 x DP 2, micro-batch 4, sequence-parallel, ZeRO-1`."""
    sizes = [f"{kind} {size}" for kind, size in zip(("TP", "PP", "DP"), layout[:3], strict=True) if size > 1]
    words = [word for flag, word in WORDS.items() if flag in layout[4]]
    return ", ".join([" x ".join(sizes) or "one process", f"micro-batch {layout[3]}", *words])


def train_layouts(rank: int, world_size: int, folder: str, layouts: Sequence[Layout], steps: int) -> list[list[float]]:
    """Train each of `layouts`. Return the loss of each step."""
    found: list[list[float]] = []
    for number, (tensor, pipeline, _, micro_batch, flags) in enumerate(layouts):
        sizes = f"--model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"
        files = f"--train-data {folder}/text.txt --data-cache-path {folder}/cache --save {folder}/{world_size}_{number}"
        words = f"{FLAGS} {files} {sizes} --micro-batch-size {micro_batch} {flags}".split()
        context = build_context(parse(words), RankInfo(rank, world_size, rank, world_size), lambda line: None)
        trainer = build_trainer(context, lambda line: None)
        trainer.state.model.train()
        found.append([])
        for _ in range(steps):
            trainer.progress.loss_sum.zero_()
            train_step(trainer)
            trainer.progress.count_step(trainer.current_global_batch_size)
            found[-1].append(all_reduce_over_data_and_pipeline([trainer.progress.loss_sum], trainer.parallel).item())
        trainer.state.param_gather.wait()
        trainer.close()
    return found


def measure_layouts(layouts: Sequence[Layout], steps: int) -> list[dict[str, Any]]:
    """Train each layout. `difference`: of each step, the greatest relative difference of a rank's loss."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(harness.ROOT / "LICENSE", f"{folder}/text.txt")
        for world_size, group in groupby(layouts, key=ranks_of):
            same_size = list(group)
            by_rank = harness.run_on_ranks(train_layouts, world_size, folder, same_size, steps)
            for layout, *curves in zip(same_size, *by_rank, strict=True):
                reference = rows[0]["losses"] if rows else curves[0]
                difference = [
                    max(abs(loss / one - 1) for loss in seen) for one, *seen in zip(reference, *curves, strict=True)
                ]
                rows.append(
                    {"layout": name_of(layout), "ranks": world_size, "losses": curves[0], "difference": difference}
                )
                print(f"{len(rows):>3} of {len(layouts)}: {rows[-1]['layout']}", flush=True)
    return rows


# Text, grid, and the colours of 1, 2, 4 and 8 ranks; the other project is grey.
THEMES = {
    "light": ("#1f2328", "#d1d9e0", ("#0b3d91", "#1f83d6", "#12a594", "#e5751f"), "#6e7781"),
    "dark": ("#e6edf3", "#30363d", ("#a5c8ff", "#4ea1f3", "#2fd0b5", "#ff9d4d"), "#9198a1"),
}


def draw(rows: Sequence[dict[str, Any]], caption: str, folder: Path) -> None:
    """Write layouts_light.svg and layouts_dark.svg: all losses, their differences, and the losses of TORCHTITAN."""
    import matplotlib
    from matplotlib.figure import Figure

    theirs = [[float(loss) for loss in curve.split()] for curve in TORCHTITAN.split(",")]
    steps = range(1, len(rows[0]["losses"]) + 1)
    greatest = max(max(row["difference"]) for row in rows)
    for theme, (ink, grid, colours, grey) in THEMES.items():
        style: Any = {
            "text.color": ink,
            "axes.labelcolor": ink,
            "xtick.color": ink,
            "ytick.color": ink,
            "grid.color": grid,
        }
        style |= {"axes.edgecolor": grid, "font.size": 10.5, "svg.hashsalt": "layouts", "axes.grid": True}
        style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}
        with matplotlib.rc_context(style):
            figure = Figure(figsize=(10, 4.6), layout="constrained")
            panels = figure.subplot_mosaic("aab;aab;ccb", width_ratios=[1, 1, 0.95])
            colour = dict(zip(sorted({row["ranks"] for row in rows}), colours, strict=False))
            for number, row in enumerate(rows):
                shown, place = colour[row["ranks"]], 7 * number % len(rows)  # neighbouring markers differ in ranks
                panels["a"].plot(steps, row["losses"], color=grey, linewidth=0.8, zorder=1)
                marked = (steps[place :: len(rows)], row["losses"][place :: len(rows)])
                panels["a"].scatter(*marked, color=shown, s=34, zorder=2)
                panels["c"].plot(steps, [1e6 * value for value in row["difference"]], color=shown, linewidth=0.9)
            for ranks, shown in colour.items():
                panels["a"].scatter([], [], color=shown, s=34, label=f"{ranks} process{'es' * (ranks > 1)}")
            for curve in theirs:
                panels["b"].plot((1, 5, 10), curve, color=grey, linewidth=1, marker="o", markersize=4, alpha=0.8)
            last, their_last = [row["losses"][-1] for row in rows], [curve[-1] for curve in theirs]
            panels["a"].set_title(f"This project: {len(rows)} layouts, one curve", fontweight="bold", fontsize=12)
            panels["a"].legend(frameon=False, title="each marker is a different layout", ncols=2)
            panels["a"].set_ylabel("loss")
            for panel, step, ends, digits in (("a", steps[-1], last, 5), ("b", 10, their_last, 2)):
                words = f"step {step}: {min(ends):.{digits}f} to {max(ends):.{digits}f}"
                panels[panel].text(0.04, 0.06, words, transform=panels[panel].transAxes)
            panels["c"].set_ylabel("difference\n× 10⁻⁶")
            panels["c"].set_ylim(0, 1.25e6 * greatest or 1)
            panels["c"].set_xlabel(f"step (greatest relative difference from one process: {greatest:.1e})")
            panels["b"].set_title(f"torchtitan #3029: {len(theirs)} layouts", fontweight="bold", fontsize=12)
            panels["b"].set_xlabel("step (different model, data, GPUs)")
            panels["b"].set_xticks((1, 5, 10))
            figure.supxlabel(caption, fontsize=8.5, color=grey)
            picture = folder / f"layouts_{theme}.svg"
            figure.savefig(picture, transparent=True, metadata={"Date": None})
            picture.write_text(re.sub(r"(\d\d\.\d\d)\d+", r"\1", picture.read_text()))  # a third smaller


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--draw", action="store_true", help="only draw the results in layouts.json")
    args = harness.parse_args(parser, argv)
    path = args.output / "layouts.json"
    if not args.draw:
        layouts, steps = (LAYOUTS[:4:3] if args.smoke else LAYOUTS), (5 if args.smoke else STEPS)
        harness.write_json(path, {**harness.header("layouts"), "flags": FLAGS, "rows": measure_layouts(layouts, steps)})
    result = json.loads(path.read_text())
    rows = result["rows"]
    cells = [
        [r["layout"], f"{r['losses'][0]:.6f}", f"{r['losses'][-1]:.6f}", f"{max(r['difference']):.1e}"] for r in rows
    ]
    print(harness.format_table(["layout", "first loss", "last loss", "greatest difference"], cells))
    folder = harness.ROOT / "docs" / "figures" if args.output == harness.RESULTS else args.output
    draw(rows, f"fp32, dropout 0.1, gloo, {harness.machine_line(result)}", folder)
    return int(max(max(row["difference"]) for row in rows) >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
