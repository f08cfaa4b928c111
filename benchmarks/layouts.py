#!/usr/bin/env python3
"""The losses of every layout beside those of one process, and training moved from every layout to every other.

    python benchmarks/layouts.py                      # all parts: hours on two cores
    python benchmarks/layouts.py losses               # 30 steps in each layout, within rounding
    python benchmarks/layouts.py exact                # the same under --exact-layouts, losses and norms to the bit
    python benchmarks/layouts.py moves                # 20 layouts, 400 moves, 5 steps after each
    python benchmarks/layouts.py --smoke --output DIR # only layouts of one and two processes

A layout is tensor- x pipeline- x data-parallel size, with its flags. Learning rate 1.5e-4, dropout 0.1, worlds of 1 to 8
processes. The exit code is 1 if a loss differs by 1e-5 or more (exact: in a bit).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

from benchmarks import harness
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.gathering import sum_over_replicas
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.train.run import build_run
from megatron.gpt2.train.setup import prepare_run
from megatron.gpt2.train.train_step import train_step

LIMIT = 1e-5
STEPS = 30
HALF = 5  # steps before a move, and after it
RUN = (
    "--max-position-embeddings 32 --seq-length 32 --tokenizer-type bytes --split 90,10 --device cpu --precision fp32 "
    "--train-iters 1000 --eval-iters 0 --lr 1.5e-4 --lr-decay-style constant --warmup 0 --attention-dropout 0.1 "
    "--hidden-dropout 0.1 --global-batch-size 8 --hidden-size 64 --num-attention-heads 4"
)
EXACT = "--exact-layouts 4 --global-batch-size 12 --micro-batch-size 1"
# The bytes tokenizer's 257 ids are padded to 258 and 516 rows: of 4 ranks two hold only padding.
MOVED = (
    "--num-layers 4 --hidden-size 48 --make-vocab-size-divisible-by 129 --ddp-bucket-size 10000 --micro-batch-size 2"
)
SEQUENCE, SHARDED, FULL = "--sequence-parallel", "--use-distributed-optimizer", "--recompute-granularity full"
ZERO_BUBBLE, TWO_CHUNKS = "--pipeline-schedule zero-bubble", "--num-virtual-stages-per-pipeline-rank 2"


class Layout(NamedTuple):
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    flags: str = ""

    def __str__(self) -> str:
        return f"{self.tensor}x{self.pipeline}x{self.data} {self.flags}".strip()

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def command(self) -> str:
        return f"--model-parallel-size {self.tensor} --pipeline-model-parallel-size {self.pipeline} {self.flags}"


MOVES = [Layout(t, 1, d, flags) for t, d, flags in product((1, 2, 4), (1, 2), ("", SHARDED))] + [
    Layout(1, 2),
    Layout(1, 2, 1, TWO_CHUNKS),
    Layout(2, 2),
    Layout(1, 2, 2, SHARDED),
    Layout(1, 4),
    Layout(2, 2, 2, f"{SHARDED} {TWO_CHUNKS}"),
    Layout(1, 3),
    Layout(2, 3),
]


def trained(rank: int, world_size: int, folder: str, flags: str, save_at: int, steps: int) -> list[float]:
    """Losses and gradient norms of `steps` steps of the text in `folder`, with a checkpoint before step `save_at`."""
    data = f"--train-data {folder}/text.txt --data-cache-path {folder}/cache"
    arguments, ranks = parse(f"{RUN} {data} {flags}".split()), Ranks(rank, world_size, rank, world_size)
    prepared = prepare_run(arguments, ranks, lambda line: None)
    run = build_run(prepared, lambda line: None)
    seen: list[float] = []
    run.engine.model.train()
    for step in range(steps):
        if step == save_at:
            run.save()
        run.progress.loss_sum.zero_()
        train_step(run)
        run.progress.step(run.samples_of_step)
        seen += [sum_over_replicas([run.progress.loss_sum], run.parallel).item(), run.engine.optimizer.grad_norm.item()]
    run.engine.gatherer.wait()
    run.close()
    return seen


def train(layout: Layout, folder: str, flags: str, save_at: int = -1, steps: int = STEPS) -> list[list[float]]:
    """As `trained`, of each rank of a layout."""
    return harness.on_ranks(trained, layout.world_size, folder, f"{flags} {layout.command}", save_at, steps)


def apart(by_rank: Sequence[Sequence[float]], expected: Sequence[float]) -> float:
    """The greatest relative difference of a loss, over all ranks."""
    pairs = [(a, b) for seen in by_rank for a, b in zip(seen[::2], expected[::2], strict=True)]
    return max(abs(a - b) / b for a, b in pairs)


def layouts(smoke: bool) -> Iterator[tuple[Layout, int, int]]:
    """Every size up to 8 ranks with every schedule that fits it, with layers and micro-batch size. Micro-batches and
    flags take turns, so that each comes with each size."""
    sizes = [(t, p, d) for t, p, d in product((1, 2, 4), (1, 2, 3, 4), (1, 2, 4)) if t * p * d <= (2 if smoke else 8)]
    turn = 0
    for (t, p, d), layers, schedule in product(sizes, (4, 6), ("", TWO_CHUNKS, ZERO_BUBBLE)):
        if (p == 1 and schedule) or (schedule == TWO_CHUNKS and layers < 2 * p):
            continue
        for with_flags in (False, True):
            micro = [size for size in (1, 2, 4, 8) if 8 % (size * d) == 0]
            flags = [SEQUENCE] * (t > 1) + [SHARDED] * (d > 1) + [FULL] * (turn % 3 == 0) if with_flags else []
            if flags or not with_flags:
                yield Layout(t, p, d, " ".join([schedule, *flags]).strip()), layers, micro[turn % len(micro)]
                turn += 1
    for t, p in ((1, 1), (2, 1), (1, 2)):  # the compiler
        yield Layout(t, p, 1, "--compile"), 4, 4


def losses(folder: str, smoke: bool, exact: bool = False) -> dict[str, Any]:
    """Of each layout the greatest relative difference of a loss from that of one process; exact: whether losses and
    norms are equal."""
    chosen = [one for one in layouts(smoke) if not exact or (one[1] == 4 and "--compile" not in one[0].flags)]
    references: dict[int, list[float]] = {}
    rows: list[dict[str, Any]] = []
    for layout, layers, micro in sorted(chosen, key=lambda one: one[0].world_size):
        common = (
            f"--num-layers {layers} {EXACT if exact else f'--micro-batch-size {micro}'} --save {folder}/{len(rows)}"
        )
        if layers not in references:
            references[layers] = train(Layout(), folder, f"{common}_one")[0]
        seen, one = train(layout, folder, common), references[layers]
        greatest = apart(seen, one)
        good = all(of_rank == one for of_rank in seen) if exact else greatest < LIMIT
        rows.append({**layout._asdict(), "layers": layers, "micro": micro, "greatest": greatest, "good": good})
        print(f"{len(rows):>4} of {len(chosen)}  {layers} layers, {layout}: {greatest:.1e}", flush=True)
    return {"steps": STEPS, "limit": 0.0 if exact else LIMIT, "rows": rows}


def moves(folder: str, smoke: bool) -> dict[str, Any]:
    """For each pair of layouts, the difference of the losses after a move from those of the run that stayed."""
    chosen = [layout for layout in MOVES if layout.world_size <= (2 if smoke else 8)]
    rows: list[dict[str, Any]] = []
    for number, source in enumerate(chosen):
        saved = f"{folder}/from_{number}"
        stayed = train(source, folder, f"{MOVED} --save {saved}", HALF, 2 * HALF)[0][2 * HALF :]
        for target in chosen:
            flags = f"{MOVED} --load {saved} --save {folder}/to_{len(rows)}"
            greatest = apart(train(target, folder, flags, steps=HALF), stayed)
            rows.append({"from": f"{source}", "to": f"{target}", "greatest": greatest, "good": greatest < LIMIT})
            print(f"{len(rows):>4} of {len(chosen) ** 2}  {source} to {target}: {greatest:.1e}", flush=True)
    return {"steps": HALF, "limit": LIMIT, "rows": rows}


PARTS = {"losses": losses, "exact": lambda folder, smoke: losses(folder, smoke, exact=True), "moves": moves}


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("part", nargs="?", choices=tuple(PARTS), help="default: all")
    chosen = harness.options(parser, argv)
    bad = 0
    for part in [chosen.part] if chosen.part else PARTS:
        with tempfile.TemporaryDirectory() as folder:
            harness.write_text(Path(folder))
            found = PARTS[part](folder, chosen.smoke)
        within, greatest = sum(row["good"] for row in found["rows"]), max(row["greatest"] for row in found["rows"])
        print(f"\n{part}: {within} of {len(found['rows'])} good; the greatest difference is {greatest:.1e}")
        result = {**harness.header(f"layouts: {part}"), **found, "within": within, "greatest": greatest}
        harness.write(chosen.output / f"layouts_{part}.json", result)
        bad += within < len(found["rows"])
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
