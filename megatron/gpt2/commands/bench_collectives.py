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
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import mpu
from data_utils.command_line import Log, Parser, align_columns, how_to_call, plural, positive_int, require
from megatron.gpt2.device import PRECISION_DTYPES, choose_backend, choose_device, set_threads, synchronize
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.dist.rendezvous import initialize_distributed
from megatron.gpt2.dist.run_program import run_program
from mpu.mappings import all_gather_single, reduce_scatter_single

PERIOD = 375  # The values of a tensor repeat after this number of elements.
# These relative tolerances allow any order of summation.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TIMEOUT_MINUTES = 5  # The time limit of a collective, which is much longer than an operation takes.
# Without --iters, an operation runs for RUNS_SECONDS at each size, at least MIN_RUNS and at most MAX_RUNS times.
MIN_RUNS, MAX_RUNS, RUNS_SECONDS = 5, 1000, 0.2
UNITS = {"G": 30, "M": 20, "K": 10, "": 0}  # {unit of a size: exponent of two}
PAIRS_BYTES, PAIRS_RUNS, MAX_PAIR_RANKS = 1 << 20, 9, 16  # Times of smaller messages are too noisy.
LINE = "{:<18} {:>9} {:>5} {:>11} {:>23} {:>10} {:>9}  {}"  # a row of the table
HEADER = LINE.format("operation", "bytes", "runs", "median µs", "p10 – p90 µs", "algorithm", "bus GB/s", "result")


class SkipOperation(Exception):
    """Raised by all ranks together if an operation cannot be measured, or not at larger sizes. The message gives the
    reason."""


def exchange(target: int, sent: Tensor, source: int, received: Tensor) -> None:
    """Send `sent` to rank `target` while `received` arrives from rank `source`. Batch the send and the receive, because
    NCCL runs separate calls in order."""
    both = dist.P2POp(dist.isend, sent, target), dist.P2POp(dist.irecv, received, source)
    ops = [op for op in both if op.tensor.numel()]
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()


def ring_all_reduce(tensor: Tensor) -> None:
    """Sum a contiguous tensor over all ranks, in place. Every rank gets the same bits.

    The N elements are cut into n chunks. In step t = 0 … 2(n-1)-1, rank r

        sends     chunk (r - t)     mod n  to rank r + 1,
        receives  chunk (r - t - 1) mod n  from rank r - 1.

    In the first n-1 steps the received chunk is added to the local chunk. Then rank r has the complete sum of chunk
    r + 1. In the last n-1 steps the received chunk replaces the local chunk. Each rank sends 2(n-1)/n · N elements.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    chunks = tensor.view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        chunk, adds = chunks[(rank - step - 1) % n], step < n - 1
        received = torch.empty_like(chunk) if adds else chunk
        exchange((rank + 1) % n, chunks[(rank - step) % n], (rank - 1) % n, received)
        if adds:
            chunk.add_(received)


def partner_of(group: ProcessGroup) -> int:
    """Return the rank with which this rank exchanges messages: its counterpart in the other half of the group. In a
    group of odd size, the partner of the last rank is the last rank."""
    rank, half = group.rank(), group.size() // 2
    return rank if rank == 2 * half else (rank + half) % (2 * half)


def send_recv(group: ProcessGroup, x: Tensor, y: Tensor) -> None:
    """Send x to the partner, and then receive y from the partner."""
    rank, partner = group.rank(), partner_of(group)
    for sends in (rank < partner, rank > partner) if rank != partner else ():
        dist.send(x, partner) if sends else dist.recv(y, partner)


def isend_irecv(group: ProcessGroup, x: Tensor, y: Tensor) -> None:
    """Send x to the partner, and at the same time receive y from the partner."""
    if (partner := partner_of(group)) != group.rank():
        exchange(partner, x, partner, y)


class BenchOperation(NamedTuple):
    """A collective, or messages between pairs of ranks. The input x [blocks, count] has the values of `sample_values`.
    The result is y [blocks, count].

    run: the operation, called with the group, x and y.
    expected: returns the right first blocks of y, given the x of all n ranks, [n, blocks, PERIOD], and the group; None
        if this rank gets no result.
    bus: returns bus bandwidth / algorithm bandwidth for n ranks, as in nccl-tests' doc/PERFORMANCE.md. A barrier has
        None.
    has_blocks: x and y have a block for each rank, and y is NaN at first; otherwise y begins as a copy of x.
    over: name of the subgroup.
    messages: number of consecutive point-to-point messages in a run.
    """

    run: Callable[[ProcessGroup, Tensor, Tensor], object]
    expected: Callable[[Tensor, ProcessGroup], Tensor | None]
    bus: Callable[[int], float] | None = lambda n: 1.0
    has_blocks: bool = False
    over: str = ""
    messages: int = 0


def all_reduce(kind: Any, combine: Callable[[Tensor], Tensor] = lambda x: x.sum(0), over: str = "") -> BenchOperation:
    """Return the operation of an all-reduce. `combine` computes the right result from the values x [ranks, ...]."""
    return BenchOperation(
        lambda g, x, y: dist.all_reduce(y, kind, group=g), lambda x, g: combine(x), ring_factor, over=over
    )


def ring_factor(n: int) -> float:
    """Return the bus factor of a ring, in which each element is summed over n ranks and sent back to all ranks."""
    return 2 * (n - 1) / n


# Each rank keeps one of n blocks, so a link carries n - 1 of n blocks.
block_operation = functools.partial(BenchOperation, bus=lambda n: (n - 1) / n, has_blocks=True)
# {name: operation}, in the order of the printed table.
OPERATIONS = {
    "broadcast": BenchOperation(lambda g, x, y: dist.broadcast(y, group=g, group_src=0), lambda x, g: x[0]),
    "all_reduce_sum": all_reduce(dist.ReduceOp.SUM),
    "all_reduce_product": all_reduce(dist.ReduceOp.PRODUCT, lambda x: x.prod(0)),
    "all_reduce_min": all_reduce(dist.ReduceOp.MIN, lambda x: x.amin(0)),
    "all_reduce_max": all_reduce(dist.ReduceOp.MAX, lambda x: x.amax(0)),
    "ring_all_reduce": BenchOperation(
        lambda g, x, y: ring_all_reduce(y), lambda x, g: x.sum(0), ring_factor, messages=1
    ),
    "all_reduce_halves": all_reduce(dist.ReduceOp.SUM, over="halves"),
    "all_reduce_across": all_reduce(dist.ReduceOp.SUM, over="across"),
    "reduce": BenchOperation(
        lambda g, x, y: dist.reduce(y, group=g, group_dst=0), lambda x, g: None if g.rank() else x.sum(0)
    ),
    "all_gather": block_operation(lambda g, x, y: all_gather_single(y.view(-1), x[0], g), lambda x, g: x[:, 0]),
    "reduce_scatter": block_operation(
        lambda g, x, y: reduce_scatter_single(y[0], x.view(-1), group=g), lambda x, g: x.sum(0)[g.rank() :][:1]
    ),
    "gather": block_operation(
        lambda g, x, y: dist.gather(x[0], None if g.rank() else list(y), group=g, group_dst=0),
        lambda x, g: None if g.rank() else x[:, 0],
    ),
    "scatter": block_operation(
        lambda g, x, y: dist.scatter(y[0], None if g.rank() else list(x), group=g, group_src=0),
        lambda x, g: x[0, g.rank() :][:1],
    ),
    "all_to_all": block_operation(lambda g, x, y: dist.all_to_all_single(y, x, group=g), lambda x, g: x[:, g.rank()]),
    "send_recv": BenchOperation(send_recv, lambda x, g: x[partner_of(g)], messages=2),
    "isend_irecv": BenchOperation(isend_irecv, lambda x, g: x[partner_of(g)], messages=1),
    "barrier": BenchOperation(lambda g, x, y: dist.barrier(g), lambda x, g: None, None),
}


def sample_values(rank: int, blocks: int) -> Tensor:
    """Return the random values of a global rank, each 1/2, 1 or 2: [blocks, PERIOD]. The values of ranks 2k and 2k + 1
    are reciprocal, so that products over many ranks stay in the range of every dtype."""
    exponents = torch.randint(-1, 2, (blocks, PERIOD), generator=torch.Generator().manual_seed(rank // 2))
    return torch.pow(2.0, exponents * (-1) ** rank).double()


def run_and_check(
    operation: BenchOperation, group: ProcessGroup, size: int, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[], object], int, float, bool]:
    """Run an operation once, with buffers of at most `size` bytes. Return a function that repeats the run, the bytes of
    a buffer, the seconds on this rank, and whether this rank's result is right within the rounding of the dtype."""
    blocks = group.size() if operation.has_blocks else 1
    count = max(1, size // dtype.itemsize // blocks)

    def repeated(values: Tensor) -> Tensor:  # [blocks, PERIOD] -> [blocks, count]
        return values.to(device, dtype).repeat(1, -(-count // PERIOD))[:, :count].contiguous()

    x = repeated(sample_values(dist.get_rank(), blocks))
    y = torch.full_like(x, torch.nan) if operation.has_blocks else x.clone()
    run = functools.partial(operation.run, group, x, y)
    seconds = time_run(run, device, group)
    everything = torch.stack([sample_values(rank, blocks) for rank in dist.get_process_group_ranks(group)])
    expected = operation.expected(everything, group)
    right = expected is None or torch.allclose(y[: len(expected)], repeated(expected), rtol=TOLERANCE[dtype], atol=0)
    y.zero_()  # Values other than 0 would overflow after a hundred sums in place.
    return run, x.nbytes, seconds, right


def time_run(run: Callable[[], object], device: torch.device, group: ProcessGroup | None = None) -> float:
    """Call `run` after a barrier. Return the seconds until this rank's device has the result."""
    dist.barrier(group)
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def gather_objects(value: Any) -> list[Any]:
    """Return the `value` of every rank of the world, in the order of the ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def time_runs(run: Callable[[], object], device: torch.device, runs: int) -> Tensor:
    """Return [runs] seconds: for each run, the time of the slowest rank."""
    return torch.tensor(gather_objects([time_run(run, device) for _ in range(runs)]), dtype=torch.float64).amax(0)


def check_deadline(deadline: float, what: str) -> None:
    """Raise SkipOperation on all ranks if the clock of rank 0 is past the deadline."""
    if gather_objects(time.monotonic() >= deadline)[0]:
        raise SkipOperation(f"{what} not measured within this operation's share of --limit")


def check_point_to_point(device: torch.device) -> None:
    """Raise SkipOperation if the backend has no point-to-point messages. With CUDA tensors, gloo would fail in the
    middle of a message while the peer waits."""
    if dist.get_backend() == "gloo" and device.type != "cpu":
        raise SkipOperation("not offered by gloo: it only sends a CPU's tensors")


class BandwidthRow(NamedTuple):
    """The results of an operation at one size. Times are seconds of the slowest rank of each run. Bandwidths are in 1e9
    bytes per second, or None for a barrier."""

    operation: str
    bytes: int
    iterations: int
    seconds: float  # the median of the runs
    seconds_p10: float
    seconds_p90: float
    algorithm_bandwidth: float | None
    bus_bandwidth: float | None
    correct: bool

    def __str__(self) -> str:
        """Return the row of the table, under HEADER."""
        size, times = format_size(self.bytes) if self.bytes else "", [f"{s * 1e6:,.1f}" for s in self[3:6]]
        speeds = [f"{x:.3f}" if x else "" for x in self[6:8]]
        result = "ok" if self.correct else "WRONG"
        return LINE.format(self.operation, size, self.iterations, times[0], " – ".join(times[1:]), *speeds, result)


def measure_sizes(
    name: str, groups: dict[str, ProcessGroup], device: torch.device, args: argparse.Namespace, deadline: float
) -> Iterator[BandwidthRow]:
    """Try, check and time one operation at every size. Every rank must call this function. Rank 0's clock decides about
    the deadline.

    Raises SkipOperation after the deadline, or if all ranks fail because the backend does not offer the operation.
    Raises RuntimeError if only some ranks fail."""
    operation, size = OPERATIONS[name], args.min_bytes
    if operation.messages:
        check_point_to_point(device)
    if operation.over not in groups:
        raise SkipOperation(f"needs an even number of at least 4 ranks, not {dist.get_world_size()}")
    group = groups[operation.over]
    while size <= args.max_bytes:
        check_deadline(deadline, f"{format_size(size)} and above:")
        failure, right, nbytes = "", False, 0
        try:
            run, nbytes, _, right = run_and_check(operation, group, size, device, PRECISION_DTYPES[args.dtype])
        except (RuntimeError, ValueError, TypeError) as error:
            failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if any(failures := gather_objects(failure)):
            what = f"{dist.get_backend()} for {args.dtype} of {format_size(size)}: {max(failures)[:120]}"
            raise SkipOperation(f"not offered by {what}") if all(failures) else RuntimeError(f"{name} failed by {what}")
        estimate = max(float(time_runs(run, device, 2)[1]), 1e-9)
        runs = args.iters or max(MIN_RUNS, min(MAX_RUNS, int(RUNS_SECONDS / estimate)))
        runs = gather_objects(max(1, int(min(runs, (deadline - time.monotonic()) / estimate))))[0]
        seconds = time_runs(run, device, runs) / max(1, operation.messages)
        p10, median, p90 = seconds.quantile(seconds.new_tensor([0.1, 0.5, 0.9])).tolist()
        algorithm = nbytes / median / 1e9 if operation.bus else None
        bus = algorithm * operation.bus(group.size()) if algorithm and operation.bus else None
        right = all(gather_objects(right))
        yield BandwidthRow(name, nbytes * bool(operation.bus), runs, median, p10, p90, algorithm, bus, right)
        size = 4 * size if operation.bus else args.max_bytes + 1


def measure_pairs(device: torch.device, dtype: torch.dtype, deadline: float) -> Tensor:
    """Return [n, n] GB/s: entry [i, j] is the bandwidth of messages of PAIRS_BYTES from rank i to rank j, 0 if i = j.

    Only one pair is measured at a time. A run ends when the receiver's answer, one element, has arrived. The median of
    PAIRS_RUNS runs counts."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if size > MAX_PAIR_RANKS:
        raise SkipOperation(f"only measured in worlds of at most {MAX_PAIR_RANKS} ranks")
    check_point_to_point(device)
    message = torch.zeros(PAIRS_BYTES // dtype.itemsize, device=device, dtype=dtype)
    bandwidth = torch.zeros(size, size, dtype=torch.float64)
    for pair in itertools.permutations(range(size), 2):
        check_deadline(deadline, "pairs:")

        def round_trip(source: int = pair[0], target: int = pair[1]) -> None:
            for sender, receiver, data in ((source, target, message), (target, source, message[:1])):
                if rank == sender:
                    dist.send(data, receiver)
                elif rank == receiver:
                    dist.recv(data, sender)

        round_trip()  # Connect the two ranks before the measurement.
        bandwidth[pair] = PAIRS_BYTES / time_runs(round_trip, device, PAIRS_RUNS).median() / 1e9
    return bandwidth


def pairs_table(bandwidth: Tensor) -> str:
    """Format the bandwidths of `measure_pairs` as a table."""
    names = [str(rank) for rank in range(len(bandwidth))]
    cells = [[name, *(f"{x:.3f}" for x in row)] for name, row in zip(names, bandwidth.tolist(), strict=True)]
    title = f"GB/s from one rank (row) to another (column), {format_size(PAIRS_BYTES)} messages, one pair at a time"
    return "\n".join([title, *align_columns([["", *names], *cells], ">" * (1 + len(names)))])


def describe_pairs(bandwidth: Tensor, hosts: Sequence[str]) -> Iterator[str]:
    """Yield a line with the range of all bandwidths, then a line for each slow rank or pair. A pair is slow if its
    bandwidth is below half of the median. A rank is slow if most of its pairs are slow. With two ranks, only the pair
    is reported."""
    n, values = len(bandwidth), bandwidth[bandwidth > 0]
    median = values.quantile(0.5)
    slow = (bandwidth > 0) & (bandwidth < median / 2)
    count = int(slow.sum()) or "none"
    yield f"pairs: {values.min():.3f} to {values.max():.3f} GB/s, median {median:.3f}; {count} below half of it"
    names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
    slow_ranks = {rank for rank in range(n) if n > 2 and int(slow[rank].sum() + slow[:, rank].sum()) > n - 1}
    yield from (f"SLOW: {names[rank]}, in most of its pairs" for rank in sorted(slow_ranks))
    for source, target in slow.nonzero().tolist():
        if not slow_ranks & {source, target}:
            yield f"SLOW: {names[source]} to {names[target]}: {bandwidth[source, target]:.3f} GB/s"


def plot_bandwidth(rows: list[BandwidthRow], path: Path, title: str) -> str:
    """Draw bus bandwidth over size into `path`. Return a line that names the plot, or says why there is no plot."""
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
    """Format a number of bytes: 1024 becomes 1K. A size that no unit divides stays a number of bytes."""
    return next(f"{size >> bits}{unit}" for unit, bits in UNITS.items() if size % (1 << bits) == 0)


def parse_size(text: str) -> int:
    """Parse a number of bytes, or of K, M or G (powers of 1024): "64K" becomes 65536."""
    found = re.fullmatch(r"0*([1-9]\d*)([KMG]?)(I?B)?", text.upper())
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is not a size: write 1024, 64K, 256M or 1G")
    return int(found[1]) << UNITS[found[2]]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the flags. Raises ValueError if a flag is invalid."""
    names = [*OPERATIONS, "pairs"]
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--min-bytes", type=parse_size, default="1K", metavar="SIZE", help="default %(default)s")
    sizes = "default %(default)s; each size is 4 times the one before, up to this one"
    add("--max-bytes", type=parse_size, default="256M", metavar="SIZE", help=sizes)
    add("--operations", nargs="+", default=names, choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    add("--dtype", default="fp32", choices=tuple(PRECISION_DTYPES))
    runs = f"runs of each operation at each size (default: for {RUNS_SECONDS} s, {MIN_RUNS} to {MAX_RUNS})"
    add("--iters", type=positive_int, metavar="N", help=runs)
    limit = "for all operations, which share it and make fewer runs if needed; omitted sizes are named (default 900)"
    add("--limit", type=float, default=900.0, metavar="SECONDS", help=limit)
    add("--output", type=Path, metavar="FOLDER", help="for collectives.json and collectives.png")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--distributed-backend", choices=("nccl", "gloo"))
    args = parser.parse_args(argv)
    least, most = format_size(args.min_bytes), format_size(args.max_bytes)
    require(args.min_bytes <= args.max_bytes, f"--min-bytes {least} is above --max-bytes {most}")
    require(args.limit > 0, f"--limit must be above 0, not {args.limit:g}")
    return args


def make_groups() -> dict[str, ProcessGroup]:
    """Make the groups to measure, by name. "" has all ranks. With an even number of at least four ranks, "halves" has
    this rank's half, and "across" has this rank and its partner in the other half. Every rank must call this
    function."""
    groups = {"": dist.group.WORLD}
    if (size := dist.get_world_size()) >= 4 and size % 2 == 0:
        state = mpu.initialize_model_parallel(size // 2)
        groups |= {"halves": state.model_parallel_group, "across": state.data_parallel_group}
    return {name: group for name, group in groups.items() if group}


def measure_all(args: argparse.Namespace, device: torch.device, where: str) -> int:
    """Measure and report the operations that the flags name. Return the exit code, 1 if a result was wrong."""
    rank, hosts, groups = dist.get_rank(), gather_objects(os.uname().nodename), make_groups()
    log = functools.partial(print, flush=True) if rank == 0 else lambda line: None
    count = len(set(hosts))
    what = f"{plural(len(hosts), 'rank')} on {plural(count, 'host')}; {where}; {args.dtype}"
    log(f"{what}; torch {torch.__version__}\n\n{HEADER}")
    rows, missing, lines, pairs = list[BandwidthRow](), dict[str, str](), list[str](), None
    names = [name for name in [*OPERATIONS, "pairs"] if name in args.operations]
    end = time.monotonic() + args.limit
    for number, name in enumerate(names):
        now = time.monotonic()
        deadline = now + (end - now) / (len(names) - number)
        try:
            if name == "pairs":
                pairs = measure_pairs(device, PRECISION_DTYPES[args.dtype], deadline)
                log(f"\n{pairs_table(pairs)}")
                lines += describe_pairs(pairs, hosts)
            else:
                for row in measure_sizes(name, groups, device, args, deadline):
                    rows.append(row)
                    log(row)
        except SkipOperation as reason:
            missing[name] = str(reason)
            log(f"{name:<18} {reason}")
    wrong = [f"{row.operation} of {format_size(row.bytes)}" for row in rows if not row.correct]
    if missing:
        lines.append(f"not measured, see the table: {', '.join(missing)}")
    if rows:
        lines.append(f"WRONG results: {', '.join(wrong)}" if wrong else f"every result was right ({len(rows)})")
    log("\n" + "\n".join(lines))
    if rank == 0 and args.output:
        record = {
            "backend": dist.get_backend(),
            "device": device.type,
            "dtype": args.dtype,
            "torch": torch.__version__,
            "world_size": len(hosts),
            "hosts": hosts,
            "rows": [row._asdict() for row in rows],
            "missing": [{"operation": name, "reason": reason} for name, reason in missing.items()],
            "pairs": None if pairs is None else {"bytes": PAIRS_BYTES, "bandwidth": pairs.tolist()},
            "verdict": lines,
        }
        (args.output / "collectives.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        log(plot_bandwidth(rows, args.output / "collectives.png", what))
    return 1 if wrong else 0


def bench_collectives(argv: Sequence[str], rank_info: RankInfo, log: Log) -> int:
    """Start the process group and measure. Return the exit code."""
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
    return measure_all(args, device, f"{backend}; {device_line}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
    return run_program(bench_collectives, argv)
