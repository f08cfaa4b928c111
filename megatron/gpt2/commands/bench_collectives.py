"""Measure the collectives, the point-to-point messages and a ring all-reduce of a cluster, and check their results:

    torchrun --nproc-per-node 2 tools/bench_collectives.py --max-bytes 1M
    srun python tools/bench_collectives.py --output collectives

docs/how-to/collectives.md explains the output, which rank 0 prints. Exit codes: 0 if all results were right, 1 if one
was wrong, 2 for bad input.
"""

import argparse
import functools
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mpu
from data_utils.command_line import Parser, how_to_call
from megatron.gpt2.commands.collective_operations import OPERATIONS, BenchGroup, is_correct, make_buffers, time_run
from megatron.gpt2.config import require
from megatron.gpt2.device import DTYPES, PRECISIONS, choose_backend, choose_device, set_threads
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.dist.rendezvous import initialize_distributed
from megatron.gpt2.dist.run_program import Log, run_program

FACTOR = 4  # from one size to the next
TIMEOUT_MINUTES = 5  # of the process group; one operation takes far less
MIN_RUNS, MAX_RUNS, RUNS_SECONDS = 5, 1000, 0.2  # of an operation at a size, without --iters
UNITS = {"G": 30, "M": 20, "K": 10, "": 0}  # powers of two
PAIRS_BYTES, PAIRS_RUNS, MAX_PAIR_RANKS = 1 << 20, 9, 16  # below 1 MB, noise looks like a slow pair
SLOW_FRACTION = 0.5  # a pair below this part of the median is reported
LINE = "{:<18} {:>9} {:>5} {:>11} {:>23} {:>10} {:>9}  {}"  # of the table
HEADER = LINE.format("operation", "bytes", "runs", "median µs", "p10 – p90 µs", "algorithm", "bus GB/s", "result")


class SkipOperation(Exception):
    """The reason why an operation, or its larger sizes, cannot be measured. All ranks raise it together."""


@dataclass(frozen=True)
class BandwidthRow:
    """An operation at one size. Times are in seconds, of the slowest rank of each run; bandwidths in 1e9 bytes per
    second, or None for a barrier."""

    operation: str
    bytes: int
    iterations: int
    seconds: float  # the median
    seconds_p10: float
    seconds_p90: float
    algorithm_bandwidth: float | None
    bus_bandwidth: float | None
    correct: bool

    def __str__(self) -> str:
        """The row of the table, under HEADER."""
        return LINE.format(
            self.operation,
            format_size(self.bytes) if self.bytes else "",
            self.iterations,
            f"{self.seconds * 1e6:,.1f}",
            f"{self.seconds_p10 * 1e6:,.1f} – {self.seconds_p90 * 1e6:,.1f}",
            *(f"{x:.3f}" if x else "" for x in (self.algorithm_bandwidth, self.bus_bandwidth)),
            "ok" if self.correct else "WRONG",
        )


def gather_objects(value: Any) -> list[Any]:
    """Return the `value` of every rank of the world, by rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def time_runs(run: Callable[[], object], device: torch.device, runs: int) -> Tensor:
    """[runs] seconds, each of the slowest rank of a run."""
    seconds = [time_run(run, device) for _ in range(runs)]
    return torch.tensor(gather_objects(seconds), dtype=torch.float64).amax(0)


def check_deadline(deadline: float, what: str) -> None:
    """Raise SkipOperation if the clock of rank 0 is past the deadline."""
    if gather_objects(time.monotonic() >= deadline)[0]:
        raise SkipOperation(f"{what} not measured within this operation's share of --limit")


def measure_operation(name: str, g: BenchGroup, size: int, iters: int | None, deadline: float) -> BandwidthRow:
    """Try, check, then time one operation at one size. Every rank calls it; rank 0's clock decides about the deadline.

    iters: runs to time (default: as many as fit into RUNS_SECONDS). Raises SkipOperation if the backend lacks the
    operation: then all ranks fail before anything is sent. Raises RuntimeError if only some ranks fail.
    """
    check_deadline(deadline, f"{format_size(size)} and above:")
    operation, failure = OPERATIONS[name], ""
    x, y = make_buffers(operation, g, size)
    run = functools.partial(operation.run, g, x, y)
    try:
        time_run(run, g.device)
    except (RuntimeError, ValueError, TypeError) as error:
        failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if any(failures := gather_objects(failure)):
        what = f"{dist.get_backend()} for {PRECISIONS[g.dtype]} of {format_size(size)}: {max(failures)[:120]}"
        raise SkipOperation(f"not offered by {what}") if all(failures) else RuntimeError(f"{name} failed by {what}")
    right = all(gather_objects(is_correct(operation, g, y)))
    y.zero_()  # a hundred sums in place would leave any range
    estimate = max(float(time_runs(run, g.device, 2)[1]), 1e-9)
    runs = iters or max(MIN_RUNS, min(MAX_RUNS, int(RUNS_SECONDS / estimate)))
    runs = gather_objects(max(1, int(min(runs, (deadline - time.monotonic()) / estimate))))[0]
    seconds = time_runs(run, g.device, runs) / max(1, operation.messages)
    p10, median, p90 = seconds.quantile(seconds.new_tensor([0.1, 0.5, 0.9])).tolist()
    if (factor := operation.busbw_factor) is None:
        return BandwidthRow(name, 0, runs, median, p10, p90, None, None, right)
    bandwidth = x.nbytes / median / 1e9
    return BandwidthRow(name, x.nbytes, runs, median, p10, p90, bandwidth, bandwidth * factor(g.size), right)


def measure_sizes(
    name: str, groups: dict[str, BenchGroup], args: argparse.Namespace, deadline: float
) -> Iterator[BandwidthRow]:
    """Measure one operation at every size. Raises SkipOperation if it, or a larger size, cannot be measured."""
    operation, world = OPERATIONS[name], groups[""]
    if operation.messages:
        check_point_to_point(world)
    if operation.over not in groups:
        raise SkipOperation(f"needs an even number of at least 4 ranks, not {world.size}")
    size = args.min_bytes
    while size <= args.max_bytes:
        yield measure_operation(name, groups[operation.over], size, args.iters, deadline)
        size = size * FACTOR if operation.busbw_factor else args.max_bytes + 1


def check_point_to_point(g: BenchGroup) -> None:
    """Raise SkipOperation if the backend has no point-to-point messages. gloo with CUDA tensors would not raise: it
    fails in the middle of a message while the peer waits."""
    if dist.get_backend() == "gloo" and g.device.type != "cpu":
        raise SkipOperation("not offered by gloo: it only sends a CPU's tensors")


def measure_pairs(g: BenchGroup, deadline: float) -> Tensor:
    """[n, n] GB/s from each rank to each other, one pair at a time, in messages of PAIRS_BYTES; 0 on the diagonal.

    The receiver answers with one element, which ends the time. The value is the median of PAIRS_RUNS.
    """
    if g.size > MAX_PAIR_RANKS:
        raise SkipOperation(f"only measured in worlds of at most {MAX_PAIR_RANKS} ranks")
    check_point_to_point(g)
    message = torch.zeros(PAIRS_BYTES // g.dtype.itemsize, device=g.device, dtype=g.dtype)
    bandwidth = torch.zeros(g.size, g.size, dtype=torch.float64)
    for pair in itertools.permutations(range(g.size), 2):
        check_deadline(deadline, "pairs:")

        def round_trip(pair: tuple[int, ...] = pair) -> None:
            for (sender, receiver), data in ((pair, message), (pair[::-1], message[:1])):
                if g.rank == sender:
                    dist.send(data, receiver)
                elif g.rank == receiver:
                    dist.recv(data, sender)

        round_trip()  # connects them
        bandwidth[pair] = PAIRS_BYTES / time_runs(round_trip, g.device, PAIRS_RUNS).median() / 1e9
    return bandwidth


def pairs_table(bandwidth: Tensor) -> str:
    """Format the matrix of all pairs."""
    lines = [
        f"GB/s from one rank (row) to another (column), {format_size(PAIRS_BYTES)} messages, one pair at a time",
        " " * 8 + "".join(f"{target:>9}" for target in range(len(bandwidth))),
    ]
    lines += [f"{source:>8}" + "".join(f"{x:>9.3f}" for x in row) for source, row in enumerate(bandwidth.tolist())]
    return "\n".join(lines)


def describe_pairs(bandwidth: Tensor, hosts: Sequence[str]) -> Iterator[str]:
    """Yield the range of all pairs, then the slow ranks and pairs. A rank is slow if most of its pairs are slow, in
    both directions. With two ranks, neither can be blamed."""
    n, values = len(bandwidth), bandwidth[bandwidth > 0]
    median = values.quantile(0.5)
    slow = (bandwidth > 0) & (bandwidth < SLOW_FRACTION * median)
    count = int(slow.sum()) or "none"
    yield f"pairs: {values.min():.3f} to {values.max():.3f} GB/s, median {median:.3f}; {count} below half of it"
    names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
    slow_ranks = [rank for rank in range(n) if n > 2 and int(slow[rank].sum() + slow[:, rank].sum()) > n - 1]
    for rank in slow_ranks:
        yield f"SLOW: {names[rank]}, in most of its pairs"
    for source, target in slow.nonzero().tolist():
        if source not in slow_ranks and target not in slow_ranks:
            yield f"SLOW: {names[source]} to {names[target]}: {bandwidth[source, target]:.3f} GB/s"


def describe_rows(rows: list[BandwidthRow], missing: dict[str, str]) -> Iterator[str]:
    """Yield the lines below the table. Do not start a training run after a line that begins with WRONG."""
    if messages := [row for row in rows if row.bus_bandwidth]:
        least = min(row.bytes for row in messages)
        latencies = [(row.seconds * 1e6, row.operation) for row in messages if row.bytes <= 1.5 * least]
        (low, first), (high, last) = min(latencies), max(latencies)
        yield f"latency of {format_size(least)} bytes: from {low:,.1f} µs ({first}) to {high:,.1f} µs ({last})"
        best = max(messages, key=lambda row: row.bus_bandwidth or 0.0)
        yield f"greatest bus bandwidth: {best.bus_bandwidth:.3f} GB/s ({best.operation} of {format_size(best.bytes)})"
    seconds = {(row.operation, row.bytes): row.seconds for row in rows}
    if both := [size for name, size in seconds if name == "ring_all_reduce" and ("all_reduce_sum", size) in seconds]:
        ratio = seconds["all_reduce_sum", both[-1]] / seconds["ring_all_reduce", both[-1]]
        yield f"our ring against the backend's all_reduce, both of {format_size(both[-1])}: {ratio:.2f} times its speed"
    if missing:
        yield f"not measured, see the table: {', '.join(missing)}"
    wrong = [f"{row.operation} of {format_size(row.bytes)}" for row in rows if not row.correct]
    if rows:
        yield f"WRONG results: {', '.join(wrong)}" if wrong else f"every result was right ({len(rows)})"


def plot_bandwidth(rows: list[BandwidthRow], path: Path, title: str) -> str:
    """Draw bus bandwidth over size into `path`. Return a line that names the plot, or the reason why it was not
    drawn."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"no plot: matplotlib is not installed; {path.with_suffix('.json').name} has the figures"
    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name, points in itertools.groupby([row for row in rows if row.bus_bandwidth], lambda row: row.operation):
        axes.loglog(*zip(*((row.bytes, row.bus_bandwidth) for row in points), strict=True), "o-", label=name)
    axes.set(xlabel="bytes", ylabel="bus bandwidth (GB/s)", title=title)
    figure.legend(loc="outside right upper")
    figure.savefig(path)
    return f"plot: {path}"


def format_size(size: int) -> str:
    """1024 -> 1K; a size that no unit divides stays a number of bytes."""
    return next(f"{size >> bits}{unit}" for unit, bits in UNITS.items() if size % (1 << bits) == 0)


def parse_size(text: str) -> int:
    """ "64K" -> 65536: a number of bytes, or of K, M or G (powers of 1024)."""
    found = re.fullmatch(r"0*([1-9]\d*)([KMG]?)(I?B)?", text.upper())
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is not a size: write 1024, 64K, 256M or 1G")
    return int(found[1]) << UNITS[found[2]]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the flags. Raises ValueError if one is wrong."""
    names = [*OPERATIONS, "pairs"]
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--min-bytes", type=parse_size, default="1K", metavar="SIZE", help="default %(default)s")
    sizes = f"default %(default)s; each size is {FACTOR} times the one before, up to this one"
    add("--max-bytes", type=parse_size, default="256M", metavar="SIZE", help=sizes)
    add("--operations", nargs="+", default=names, choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    add("--dtype", default="fp32", choices=tuple(DTYPES))
    runs = f"runs of each operation at each size (default: for {RUNS_SECONDS} s, {MIN_RUNS} to {MAX_RUNS})"
    add("--iters", type=int, metavar="N", help=runs)
    limit = "for all operations, which share it and make fewer runs if needed; omitted sizes are named (default 900)"
    add("--limit", type=float, default=900.0, metavar="SECONDS", help=limit)
    add("--output", type=Path, metavar="FOLDER", help="for collectives.json and collectives.png")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--distributed-backend", choices=("nccl", "gloo"))
    args = parser.parse_args(argv)
    least, most = format_size(args.min_bytes), format_size(args.max_bytes)
    require(args.min_bytes <= args.max_bytes, f"--min-bytes {least} is above --max-bytes {most}")
    require(args.iters is None or args.iters >= 1, f"--iters must be at least 1, not {args.iters}")
    require(args.limit > 0, f"--limit must be above 0, not {args.limit:g}")
    return args


def make_groups(device: torch.device, dtype: torch.dtype) -> dict[str, BenchGroup]:
    """Make the groups to measure: the world as "", and for an even world of at least four ranks "halves", and "across",
    which holds each rank and its partner in the other half. Every rank calls it."""
    groups = {"": dist.group.WORLD}
    if (size := dist.get_world_size()) >= 4 and size % 2 == 0:
        state = mpu.initialize_model_parallel(size // 2)
        groups |= {"halves": state.model_parallel_group, "across": state.data_parallel_group}
    return {name: BenchGroup(group, device, dtype) for name, group in groups.items() if group}


def measure_all(args: argparse.Namespace, groups: dict[str, BenchGroup], where: str) -> int:
    """Measure the operations that the flags name and report them; returns the exit code."""
    world, hosts = groups[""], gather_objects(os.uname().nodename)
    log = functools.partial(print, flush=True) if world.rank == 0 else lambda line: None
    names = [name for name in [*OPERATIONS, "pairs"] if name in args.operations]
    count = len(set(hosts))
    what = f"{world.size} ranks on {count} host{'s' * (count > 1)}; {where}; {args.dtype}"
    log(f"{what}; torch {torch.__version__}\n\n{HEADER}")
    rows: list[BandwidthRow] = []
    missing: dict[str, str] = {}
    pairs, lines = None, list[str]()
    end = time.monotonic() + args.limit
    for number, name in enumerate(names):
        now = time.monotonic()
        deadline = now + (end - now) / (len(names) - number)
        try:
            if name == "pairs":
                pairs = measure_pairs(world, deadline)
                log(f"\n{pairs_table(pairs)}")
                lines += describe_pairs(pairs, hosts)
            else:
                for row in measure_sizes(name, groups, args, deadline):
                    rows.append(row)
                    log(row)
        except SkipOperation as reason:
            missing[name] = str(reason)
            log(f"{name:<18} {reason}")
    lines += describe_rows(rows, missing)
    log("\n" + "\n".join(lines))
    if world.rank == 0 and args.output:
        record = {
            "backend": dist.get_backend(),
            "device": world.device.type,
            "dtype": args.dtype,
            "torch": torch.__version__,
            "world_size": world.size,
            "hosts": hosts,
            "rows": [asdict(row) for row in rows],
            "missing": [{"operation": name, "reason": reason} for name, reason in missing.items()],
            "pairs": None if pairs is None else {"bytes": PAIRS_BYTES, "bandwidth": pairs.tolist()},
            "verdict": lines,
        }
        (args.output / "collectives.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        log(plot_bandwidth(rows, args.output / "collectives.png", what))
    return 0 if all(row.correct for row in rows) else 1


def bench_collectives(argv: Sequence[str], rank_info: RankInfo, log: Log) -> int:
    """Start the process group and measure; returns the exit code."""
    args = parse_args(argv)
    call = f"{how_to_call('bench_collectives')} --nproc-per-node 2"
    require(rank_info.world_size > 1, f"this needs at least two ranks: {call}")
    set_threads(rank_info)
    device, device_line = choose_device(args.device, rank_info)
    backend, _ = choose_backend(args.distributed_backend, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if rank_info.rank == 0 and args.output:
        args.output.mkdir(parents=True, exist_ok=True)
    initialize_distributed(rank_info, backend, device, TIMEOUT_MINUTES)
    return measure_all(args, make_groups(device, DTYPES[args.dtype]), f"{backend}; {device_line}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    return run_program(bench_collectives, argv)
