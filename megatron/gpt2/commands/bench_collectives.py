"""Measure what a run will be built on: every collective, point-to-point messages, subgroups, and a ring all-reduce of
our own, each checked for right values before it is timed. Rank 0 prints.

    torchrun --nproc-per-node 2 tools/bench_collectives.py --max-bytes 1M
    srun python tools/bench_collectives.py --output collectives

docs/how-to/collectives.md says how to read the figures. Exit codes: 0 where all results were right, 1 where one was
wrong, 2 for bad input.
"""

import argparse
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from data_utils.command_line import Parser, how_to_call, program, progress_bar
from megatron.gpt2.commands.collectives import measuring, report
from megatron.gpt2.commands.collectives.operations import OPERATIONS, World, make_world
from megatron.gpt2.commands.collectives.report import Missing, Row, size_name
from megatron.gpt2.config import require
from megatron.gpt2.device import DTYPES, choose_backend, choose_device, set_threads
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.dist.rendezvous import initialize_distributed
from megatron.gpt2.dist.run_program import Log, run_program

FACTOR = 4  # between the sizes
PAIRS_BYTES = 1 << 20  # below it noise looks like a slow pair
TIMEOUT_MINUTES = 5  # until a rank that hangs ends the others; far above any one operation


def size_of(text: str) -> int:
    """ "64K" -> 65536: a number of bytes, or of K, M or G (powers of 1024)."""
    found = re.fullmatch(r"(\d+)([KMG]?)", text.upper().removesuffix("IB").removesuffix("B"))
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text} is not a size: write 1024, 64K, 256M or 1G")
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked. ValueError where one cannot be."""
    names = [*OPERATIONS, "pairs"]
    parser = Parser(description=__doc__)
    parser.add_argument("--min-bytes", type=size_of, default=size_of("1K"), metavar="SIZE", help="default 1K")
    parser.add_argument(
        "--max-bytes",
        type=size_of,
        default=size_of("256M"),
        metavar="SIZE",
        help=f"default 256M; sizes grow {FACTOR} times each, up to this one",
    )
    parser.add_argument(
        "--operations", nargs="+", default=names, choices=names, metavar="NAME", help=f"default all: {', '.join(names)}"
    )
    parser.add_argument("--dtype", default="fp32", choices=tuple(DTYPES))
    parser.add_argument(
        "--iters",
        type=int,
        metavar="N",
        help="runs of each operation at each size (default: for "
        f"{measuring.RUNS_SECONDS} s, {measuring.LEAST_RUNS} to {measuring.MOST_RUNS})",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="of the whole measurement, "
        "shared among the operations, which make fewer runs to keep it; what does not fit is "
        "named (default 900)",
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for collectives.json and collectives.png")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--distributed-backend", choices=("nccl", "gloo"))
    options = parser.parse_args(argv)
    require(
        options.min_bytes <= options.max_bytes,
        f"--min-bytes {size_name(options.min_bytes)} is above --max-bytes {size_name(options.max_bytes)}",
    )
    require(options.iters is None or options.iters >= 1, f"--iters must be at least 1, not {options.iters}")
    require(options.limit > 0, f"--limit must be above 0, not {options.limit:g}")
    return options


def sizes_between(least: int, most: int) -> list[int]:
    """least, 4 least, 16 least, … up to most."""
    sizes = [least]
    while sizes[-1] * FACTOR <= most:
        sizes.append(sizes[-1] * FACTOR)
    return sizes


def bench(options: argparse.Namespace, world: World, where: str) -> int:
    """Measure all that is asked for and report it; returns the exit code."""
    hosts = [""] * world.size
    dist.all_gather_object(hosts, os.uname().nodename)
    bar = progress_bar(seen=world.rank == 0, total=len(set(options.operations)), unit="operation", leave=False)

    def log(line: str) -> None:
        if world.rank == 0:
            bar.clear()
            print(line, flush=True)

    log(
        f"{world.size} ranks on {len(set(hosts))} host{'s' * (len(set(hosts)) > 1)}; {where}; {options.dtype}; "
        f"torch {torch.__version__}"
    )
    log(f"\n{report.HEADER}")
    sizes = sizes_between(options.min_bytes, options.max_bytes)
    rows: list[Row] = []
    missing: list[Missing] = []
    pairs = None
    chosen = [name for name in [*OPERATIONS, "pairs"] if name in options.operations]
    end = time.monotonic() + options.limit
    for number, name in enumerate(chosen):
        now = time.monotonic()
        deadline = now + (end - now) / (len(chosen) - number)
        if name == "pairs":
            pairs, without = measuring.measure_pairs(world, PAIRS_BYTES, deadline)
            if pairs:
                log("\n" + "\n".join(report.pairs_table(pairs)))
        else:
            more, without = measuring.measure_sizes(
                name, OPERATIONS[name], world, sizes, iters=options.iters, deadline=deadline, log=log
            )
            rows += more
        if without:
            missing.append(without)
            log(report.missing_line(without))
        bar.update()
    bar.close()
    lines = list(report.verdict(rows, missing, pairs, hosts))
    log("\n" + "\n".join(lines))
    if world.rank == 0 and options.output:
        record = {
            "backend": dist.get_backend(),
            "device": world.device.type,
            "dtype": options.dtype,
            "torch": torch.__version__,
            "world_size": world.size,
            "hosts": hosts,
            "rows": [asdict(row) for row in rows],
            "missing": [asdict(one) for one in missing],
            "pairs": pairs and asdict(pairs),
            "verdict": lines,
        }
        title = f"{world.size} ranks, {dist.get_backend()} on {world.device.type}, {options.dtype}"
        (options.output / "collectives.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        log(report.plot(rows, options.output / "collectives.png", title))
    return 0 if all(row.correct for row in rows) else 1


def measure(argv: Sequence[str], ranks: Ranks, log: Log) -> int:
    """Measure what the flags ask for on all ranks; returns the exit code."""
    options = parse(argv)
    require(
        ranks.world_size > 1,
        "one rank has nobody to talk to, at least two are needed: "
        f"{how_to_call('bench_collectives')} --nproc-per-node 2",
    )
    set_threads(ranks)
    device, device_line = choose_device(options.device, ranks)
    backend, _ = choose_backend(options.distributed_backend, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks.rank == 0 and options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    initialize_distributed(ranks, backend, device, TIMEOUT_MINUTES)
    return bench(options, make_world(device, DTYPES[options.dtype]), f"{backend}; {device_line}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    return run_program(measure, argv)


cli = program(main)

if __name__ == "__main__":
    cli()
