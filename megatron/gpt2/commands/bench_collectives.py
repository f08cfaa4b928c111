"""Measure what a run will be built on: every collective, point-to-point messages, subgroups, and a ring all-reduce of
our own, each checked for right values before it is timed. Rank 0 prints.

    torchrun --nproc-per-node 2 tools/bench_collectives.py --max-bytes 1M
    srun python tools/bench_collectives.py --output collectives

docs/how-to/collectives.md says how to read the figures. Exit codes: 0 if all results were right, 1 if one was wrong, 2
for bad input.

Legend: n ranks, r a rank, i an element's index. Bytes are those that nccl-tests counts: the whole buffer of one rank,
and all n blocks if an operation has n blocks. The values to check are exact in every dtype, and periodic: PERIOD of
them stand for a block of any length.
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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import mpu
from data_utils.command_line import Parser, how_to_call
from megatron.gpt2.config import require
from megatron.gpt2.device import DTYPES, PRECISIONS, choose_backend, choose_device, set_threads
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.dist.rendezvous import initialize_distributed
from megatron.gpt2.dist.run_program import Log, run_program
from mpu.mappings import all_gather_single, reduce_scatter_single

FACTOR = 4  # between the sizes
TIMEOUT_MINUTES = 5  # until a rank that hangs ends the others; far above any one operation
LEAST_RUNS, MOST_RUNS, RUNS_SECONDS = 5, 1000, 0.2  # of an operation at a size, if --iters does not say
UNITS = {"G": 30, "M": 20, "K": 10, "": 0}  # powers of two
PAIRS_BYTES, PAIRS_RUNS, MOST_PAIRED_RANKS = 1 << 20, 9, 16  # below 1 MB noise looks like a slow pair
FAR_BELOW = 0.5  # of the median of all pairs: a pair or a rank under it is named
SEGMENT_BYTES, MOST_SEGMENTS = 1 << 19, 8  # of the ring: below, messages cost more than their overlap gains
PERIOD = 375  # elements; the least that holds both 3 and 125
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative; for the order of summation
LINE = "{:<18} {:>9} {:>5} {:>11} {:>23} {:>10} {:>9}  {}"  # of the table
HEADER = LINE.format("operation", "bytes", "runs", "median µs", "p10 – p90 µs", "algorithm", "bus GB/s", "result")


class NotMeasured(Exception):
    """Why an operation has no figure, or none from some size on. Every rank raises it alike."""


class Members(NamedTuple):
    """The ranks of a group, and what their buffers are made of."""

    group: ProcessGroup
    device: torch.device
    dtype: torch.dtype

    @property
    def n(self) -> int:
        """The number of ranks."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.group.rank()

    @property
    def partner(self) -> int:
        """The place of this rank's counterpart in the other half; the last of an odd number has itself."""
        half = self.n // 2
        return self.rank if self.rank == 2 * half else (self.rank + half) % (2 * half)


def moved(rank: int, block: int) -> Tensor:
    """[PERIOD] values by which a block of a rank is recognised: (i + 7 r + 11 block) mod 125."""
    return ((torch.arange(PERIOD) + 7 * rank + 11 * block) % 125).double()


def reduced(rank: int, block: int) -> Tensor:
    """[PERIOD] values of a rank to reduce: 2^e with e = ±(((i + r² + block) mod 3) - 1), + for even ranks, so that sums
    and products of many ranks stay in range."""
    return torch.pow(2.0, ((torch.arange(PERIOD) + rank * rank + block) % 3 - 1) * (-1) ** rank).double()


def ring_all_reduce(tensor: Tensor, *, segments: int | None = None) -> None:
    """tensor <- sum over all ranks of tensor, in place; every rank gets the same bits.

    The N elements are cut into n chunks. In step t = 0 … 2(n-1)-1 rank r

        sends     chunk (r - t)     mod n  to rank r + 1,
        receives  chunk (r - t - 1) mod n  from rank r - 1.

    In the first n-1 steps the chunk that arrives is added to the chunk here, so that after them rank r holds the whole
    sum of chunk r + 1; in the other n-1 it replaces the chunk here. Each rank sends 2(n-1)/n · N elements, whatever n:
    that is the factor of the bus bandwidth.

    A chunk of step t + 1 is the one that step t has received. So each chunk travels in segments, and a segment sets
    out as soon as its own sum is there, while those behind it still arrive: sending and adding overlap.

    At least two ranks. tensor: contiguous, of the same shape and dtype on every rank, any number of elements. segments: for each chunk, the
    same on every rank; by default one for each 512 KB, at most 8. An empty segment is not sent.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    if segments is None:
        segments = max(1, min(MOST_SEGMENTS, tensor.nbytes // n // SEGMENT_BYTES))
    # pieces[c][j] is segment j of chunk c, a view of [about N / (n · segments)]
    pieces = [chunk.tensor_split(segments) for chunk in tensor.view(-1).tensor_split(n)]
    inbox = [torch.empty_like(piece) for piece in pieces[0]]  # no later chunk is longer than the first

    def arriving(step: int, j: int) -> tuple[Tensor, Tensor]:
        """A segment that changes in `step`, and where it is received: in `inbox` while sums are made, then in place."""
        piece = pieces[(rank - step - 1) % n][j]
        return piece, inbox[j][: piece.numel()] if step < n - 1 else piece

    def exchange(step: int, j: int) -> list[dist.Work]:
        """Start sending and receiving segment j of a step."""
        sent, received = pieces[(rank - step) % n][j], arriving(step, j)[1]
        parcels = (dist.isend, sent, (rank + 1) % n), (dist.irecv, received, (rank - 1) % n)
        # As a batch: NCCL runs single calls one by one in that order, and two sends that face each other would wait for
        # ever. The tag keeps the segments of a slower neighbour apart.
        batch = [dist.P2POp(operation, piece, peer, tag=j) for operation, piece, peer in parcels if piece.numel()]
        return dist.batch_isend_irecv(batch) if batch else []

    travelling = [exchange(0, j) for j in range(segments)]
    for step, j in itertools.product(range(2 * (n - 1)), range(segments)):
        for work in travelling[j]:
            work.wait()
        piece, received = arriving(step, j)
        if step < n - 1:
            piece.add_(received)
        if step < 2 * (n - 1) - 1:
            travelling[j] = exchange(step + 1, j)


def send_recv(m: Members, x: Tensor, y: Tensor) -> None:
    """There and back between partners, one message after the other."""
    for sends in (m.rank < m.partner, m.rank > m.partner):
        if m.rank != m.partner:
            dist.send(x, m.partner) if sends else dist.recv(y, m.partner)


def isend_irecv(m: Members, x: Tensor, y: Tensor) -> None:
    """There and back between partners, both at once."""
    both = [dist.P2POp(dist.isend, x, m.partner), dist.P2POp(dist.irecv, y, m.partner)]
    for work in dist.batch_isend_irecv(both) if m.rank != m.partner else []:
        work.wait()


def there_and_on(n: int) -> float:
    """2 (n-1)/n: every element is summed over n ranks and brought back to them, over each link."""
    return 2 * (n - 1) / n


def all_but_own(n: int) -> float:
    """(n-1)/n: a rank keeps its own of n blocks, and the others pass its link."""
    return (n - 1) / n


class Operation(NamedTuple):
    """An operation on x [blocks, count], which holds `values(r, block)`, with the result y.

    expected: the first blocks of y, [.., PERIOD], from the blocks [n, blocks, PERIOD] of all ranks and this one's place;
    None: this rank gets nothing. There are n blocks, and y is NaN before, if bus_factor is `all_but_own`; otherwise
    there is one, and y is x before. bus_factor: of n; None if there is no message. over: the subgroup. messages: how
    many follow each other in one run, if it is made of send and recv.
    """

    run: Callable[[Members, Tensor, Tensor], object]
    expected: Callable[[Tensor, Members], Tensor | None]
    values: Callable[[int, int], Tensor] = moved
    bus_factor: Callable[[int], float] | None = lambda n: 1.0
    over: str = ""
    messages: int = 0

    def blocks(self, m: Members) -> int:
        """How many blocks x and y have."""
        return m.n if self.bus_factor is all_but_own else 1


def all_reduce(kind: str, combine: Callable[[Tensor], Tensor] = lambda x: x.sum(0), over: str = "") -> Operation:
    """One buffer, combined over all members."""
    operation = getattr(dist.ReduceOp, kind)
    return Operation(
        lambda m, x, y: dist.all_reduce(y, operation, group=m.group),
        lambda x, m: combine(x),
        reduced,
        there_and_on,
        over,
    )


# In the order of the table. The factors are nccl-tests' (doc/PERFORMANCE.md there).
OPERATIONS = {
    "broadcast": Operation(lambda m, x, y: dist.broadcast(y, group=m.group, group_src=0), lambda x, m: x[0]),
    "all_reduce_sum": all_reduce("SUM"),
    "all_reduce_product": all_reduce("PRODUCT", lambda x: x.prod(0)),
    "all_reduce_min": all_reduce("MIN", lambda x: x.amin(0)),
    "all_reduce_max": all_reduce("MAX", lambda x: x.amax(0)),
    "ring_all_reduce": all_reduce("SUM")._replace(run=lambda m, x, y: ring_all_reduce(y), messages=1),
    "all_reduce_halves": all_reduce("SUM", over="halves"),
    "all_reduce_across": all_reduce("SUM", over="across"),
    "reduce": Operation(
        lambda m, x, y: dist.reduce(y, group=m.group, group_dst=0),
        lambda x, m: x.sum(0) if m.rank == 0 else None,
        reduced,
    ),
    "all_gather": Operation(
        lambda m, x, y: all_gather_single(y.view(-1), x[0], group=m.group),
        lambda x, m: x[:, 0],
        bus_factor=all_but_own,
    ),
    "reduce_scatter": Operation(
        lambda m, x, y: reduce_scatter_single(y[0], x.view(-1), group=m.group),
        lambda x, m: x.sum(0)[m.rank :][:1],
        reduced,
        all_but_own,
    ),
    "gather": Operation(
        lambda m, x, y: dist.gather(x[0], list(y) if m.rank == 0 else None, group=m.group, group_dst=0),
        lambda x, m: x[:, 0] if m.rank == 0 else None,
        bus_factor=all_but_own,
    ),
    "scatter": Operation(
        lambda m, x, y: dist.scatter(y[0], list(x) if m.rank == 0 else None, group=m.group, group_src=0),
        lambda x, m: x[0, m.rank :][:1],
        bus_factor=all_but_own,
    ),
    "all_to_all": Operation(
        lambda m, x, y: dist.all_to_all_single(y, x, group=m.group),
        lambda x, m: x[:, m.rank],
        bus_factor=all_but_own,
    ),
    "send_recv": Operation(send_recv, lambda x, m: x[m.partner], messages=2),
    "isend_irecv": Operation(isend_irecv, lambda x, m: x[m.partner], messages=1),
    "barrier": Operation(lambda m, x, y: dist.barrier(m.group), lambda x, m: None, bus_factor=None),
}


@dataclass(frozen=True)
class Row:
    """An operation at one size. Times are in seconds, of the slowest rank of each run; bandwidths in 1e9 bytes per
    second, None if there is no message."""

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
        """A row of the table, under HEADER."""
        return LINE.format(
            self.operation,
            size_name(self.bytes) if self.bytes else "",
            self.iterations,
            f"{self.seconds * 1e6:,.1f}",
            f"{self.seconds_p10 * 1e6:,.1f} – {self.seconds_p90 * 1e6:,.1f}",
            *(f"{x:.3f}" if x else "" for x in (self.algorithm_bandwidth, self.bus_bandwidth)),
            "ok" if self.correct else "WRONG",
        )


def of_all_ranks(value: Any) -> list[Any]:
    """The `value` of every rank of the world, by rank. A collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def prepare(operation: Operation, m: Members, size: int) -> tuple[Tensor, Tensor]:
    """x and y of an operation: `size` bytes each, or as near below as equal blocks come, but one element at least."""
    blocks = operation.blocks(m)
    count = max(1, size // m.dtype.itemsize // blocks)
    rank = dist.get_global_rank(m.group, m.rank)
    values = torch.stack([operation.values(rank, block) for block in range(blocks)])
    x = values.to(m.device, m.dtype).repeat(1, -(-count // PERIOD))[:, :count].contiguous()
    return x, torch.full_like(x, torch.nan) if blocks > 1 else x.clone()


def correct(operation: Operation, m: Members, y: Tensor) -> bool:
    """Whether y is the result of an operation on this rank, within the dtype's rounding."""
    blocks, ranks = range(operation.blocks(m)), dist.get_process_group_ranks(m.group)
    x = torch.stack([torch.stack([operation.values(rank, block) for block in blocks]) for rank in ranks])
    expected = operation.expected(x, m)
    if expected is None:
        return True
    expected = expected.to(m.device, m.dtype).repeat(1, -(-y.size(1) // PERIOD))[:, : y.size(1)]
    return torch.allclose(y[: len(expected)], expected, rtol=TOLERANCE[m.dtype], atol=0)


def time_run(run: Callable[[], object], device: torch.device, group: ProcessGroup | None = None) -> float:
    """Seconds of one run on this rank.

    The ranks start together, behind a barrier that is not counted. A run ends when its result is there; on a GPU that
    includes the launch and the wait for it.
    """
    wait = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    dist.barrier(group)
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def time_runs(run: Callable[[], object], device: torch.device, runs: int) -> Tensor:
    """[runs] seconds, each of the slowest rank of a run."""
    seconds = [time_run(run, device) for _ in range(runs)]
    return torch.tensor(of_all_ranks(seconds), dtype=torch.float64).amax(0)


def check_time(deadline: float, what: str) -> None:
    """NotMeasured if rank 0's clock is past its deadline."""
    if of_all_ranks(time.monotonic() >= deadline)[0]:
        raise NotMeasured(f"{what} not measured within this operation's share of --limit")


def measure(name: str, m: Members, size: int, iters: int | None, deadline: float) -> Row:
    """Try, check, then time one operation at one size. Every rank calls it; the deadline is rank 0's.

    iters: runs to time, None for as many as fit into RUNS_SECONDS. An operation that the backend lacks raises on every
    rank alike before anything is sent. RuntimeError if only some ranks fail.
    """
    check_time(deadline, f"{size_name(size)} and above:")
    operation, refusal = OPERATIONS[name], ""
    x, y = prepare(operation, m, size)
    run = functools.partial(operation.run, m, x, y)
    try:
        time_run(run, m.device)
    except (RuntimeError, ValueError, TypeError) as error:
        refusal = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if any(refusals := of_all_ranks(refusal)):
        what = f"{dist.get_backend()} for {PRECISIONS[m.dtype]} of {size_name(size)}: {max(refusals)[:120]}"
        raise NotMeasured(f"not offered by {what}") if all(refusals) else RuntimeError(f"{name} failed by {what}")
    right = all(of_all_ranks(correct(operation, m, y)))
    y.zero_()  # a hundred sums in place would leave any range
    estimate = max(float(time_runs(run, m.device, 2)[1]), 1e-9)
    runs = iters or max(LEAST_RUNS, min(MOST_RUNS, int(RUNS_SECONDS / estimate)))
    runs = of_all_ranks(max(1, int(min(runs, (deadline - time.monotonic()) / estimate))))[0]
    seconds = time_runs(run, m.device, runs) / max(1, operation.messages)
    p10, middle, p90 = seconds.quantile(seconds.new_tensor([0.1, 0.5, 0.9])).tolist()
    if operation.bus_factor is None:
        return Row(name, 0, runs, middle, p10, p90, None, None, right)
    bandwidth = x.nbytes / middle / 1e9
    return Row(name, x.nbytes, runs, middle, p10, p90, bandwidth, bandwidth * operation.bus_factor(m.n), right)


def measure_sizes(name: str, worlds: dict[str, Members], options: argparse.Namespace, deadline: float) -> Iterator[Row]:
    """One operation at every size; NotMeasured if it has no figure, or none from some size on."""
    operation, everyone = OPERATIONS[name], worlds[""]
    if operation.messages:
        require_messages(everyone)
    if operation.over not in worlds:
        why = "has none of two ranks but itself" if everyone.n == 2 else "does not split into two halves"
        raise NotMeasured(f"no subgroups to measure: a world of {everyone.n} {why}")
    size = options.min_bytes
    while size <= options.max_bytes:
        yield measure(name, worlds[operation.over], size, options.iters, deadline)
        size = size * FACTOR if operation.bus_factor else options.max_bytes + 1


def require_messages(m: Members) -> None:
    """NotMeasured if the backend has no point-to-point messages.

    gloo does not refuse a GPU's messages: it fails in the middle of one, while the peer waits. So they are never tried.
    """
    if dist.get_backend() == "gloo" and m.device.type != "cpu":
        raise NotMeasured("not offered by gloo: it only sends a CPU's tensors")


def measure_pairs(m: Members, deadline: float) -> Tensor:
    """[n, n] GB/s from each rank to each other, one pair at a time, in messages of PAIRS_BYTES; 0 on the diagonal.

    The time ends when the receiver has answered with one element; the median of PAIRS_RUNS.
    """
    if m.n > MOST_PAIRED_RANKS:
        raise NotMeasured(f"only measured in worlds of at most {MOST_PAIRED_RANKS} ranks")
    require_messages(m)
    message = torch.zeros(PAIRS_BYTES // m.dtype.itemsize, device=m.device, dtype=m.dtype)
    bandwidth = torch.zeros(m.n, m.n, dtype=torch.float64)
    for pair in itertools.permutations(range(m.n), 2):
        check_time(deadline, "pairs:")

        def there_and_back(pair: tuple[int, ...] = pair) -> None:
            for (sender, receiver), parcel in ((pair, message), (pair[::-1], message[:1])):
                if m.rank == sender:
                    dist.send(parcel, receiver)
                elif m.rank == receiver:
                    dist.recv(parcel, sender)

        there_and_back()  # connects them
        bandwidth[pair] = PAIRS_BYTES / time_runs(there_and_back, m.device, PAIRS_RUNS).median() / 1e9
    return bandwidth


def pairs_table(bandwidth: Tensor) -> str:
    """The matrix of all pairs."""
    lines = [
        f"GB/s from one rank (row) to another (column), {size_name(PAIRS_BYTES)} messages, one pair at a time",
        " " * 8 + "".join(f"{target:>9}" for target in range(len(bandwidth))),
    ]
    lines += [f"{source:>8}" + "".join(f"{x:>9.3f}" for x in row) for source, row in enumerate(bandwidth.tolist())]
    return "\n".join(lines)


def slow_pairs(bandwidth: Tensor, hosts: Sequence[str]) -> Iterator[str]:
    """The range of all pairs, and the ranks and pairs that are far below the median. A rank is slow if most of its pairs
    are, in both directions. Of two ranks neither can be blamed."""
    n, values = len(bandwidth), bandwidth[bandwidth > 0]
    median = values.quantile(0.5)
    slow = (bandwidth > 0) & (bandwidth < FAR_BELOW * median)
    count = int(slow.sum()) or "none"
    yield f"pairs: {values.min():.3f} to {values.max():.3f} GB/s, median {median:.3f}; {count} below half of it"
    names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
    slow_ranks = [rank for rank in range(n) if n > 2 and int(slow[rank].sum() + slow[:, rank].sum()) > n - 1]
    for rank in slow_ranks:
        yield f"SLOW: {names[rank]}, in most of its pairs"
    for source, target in slow.nonzero().tolist():
        if source not in slow_ranks and target not in slow_ranks:
            yield f"SLOW: {names[source]} to {names[target]}: {bandwidth[source, target]:.3f} GB/s"


def verdict(rows: list[Row], missing: dict[str, str]) -> Iterator[str]:
    """What to read before a training run; a line that begins with WRONG should stop one."""
    if messages := [row for row in rows if row.bus_bandwidth]:
        least = min(row.bytes for row in messages)
        latencies = [(row.seconds * 1e6, row.operation) for row in messages if row.bytes <= 1.5 * least]
        (low, first), (high, last) = min(latencies), max(latencies)
        yield f"latency of {size_name(least)} bytes: from {low:,.1f} µs ({first}) to {high:,.1f} µs ({last})"
        best = max(messages, key=lambda row: row.bus_bandwidth or 0.0)
        yield f"greatest bus bandwidth: {best.bus_bandwidth:.3f} GB/s ({best.operation} of {size_name(best.bytes)})"
    seconds = {(row.operation, row.bytes): row.seconds for row in rows}
    if both := [size for name, size in seconds if name == "ring_all_reduce" and ("all_reduce_sum", size) in seconds]:
        ratio = seconds["all_reduce_sum", both[-1]] / seconds["ring_all_reduce", both[-1]]
        yield f"our ring against the backend's all_reduce, both of {size_name(both[-1])}: {ratio:.2f} times its speed"
    if missing:
        yield f"without a figure, see the table: {', '.join(missing)}"
    wrong = [f"{row.operation} of {size_name(row.bytes)}" for row in rows if not row.correct]
    if rows:
        yield f"WRONG results: {', '.join(wrong)}" if wrong else f"every result was right ({len(rows)})"


def plot(rows: list[Row], path: Path, title: str) -> str:
    """Draw bus bandwidth over size into `path`; returns a line that says where the plot is, or why there is none."""
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


def size_name(size: int) -> str:
    """1024 -> 1K; a size that no unit divides stays a number of bytes."""
    return next(f"{size >> bits}{unit}" for unit, bits in UNITS.items() if size % (1 << bits) == 0)


def size_of(text: str) -> int:
    """ "64K" -> 65536: a number of bytes, or of K, M or G (powers of 1024)."""
    found = re.fullmatch(r"0*([1-9]\d*)([KMG]?)(I?B)?", text.upper())
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is not a size: write 1024, 64K, 256M or 1G")
    return int(found[1]) << UNITS[found[2]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked. ValueError if one is wrong."""
    names = [*OPERATIONS, "pairs"]
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--min-bytes", type=size_of, default="1K", metavar="SIZE", help="default %(default)s")
    add(
        "--max-bytes",
        type=size_of,
        default="256M",
        metavar="SIZE",
        help=f"default %(default)s; sizes grow {FACTOR} times each, up to this one",
    )
    add("--operations", nargs="+", default=names, choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    add("--dtype", default="fp32", choices=tuple(DTYPES))
    add(
        "--iters",
        type=int,
        metavar="N",
        help=f"runs of each operation at each size (default: for {RUNS_SECONDS} s, {LEAST_RUNS} to {MOST_RUNS})",
    )
    add(
        "--limit",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="of the whole measurement, shared among the operations, which make fewer runs to keep it; what does not "
        "fit is named (default 900)",
    )
    add("--output", type=Path, metavar="FOLDER", help="for collectives.json and collectives.png")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--distributed-backend", choices=("nccl", "gloo"))
    options = parser.parse_args(argv)
    least, most = size_name(options.min_bytes), size_name(options.max_bytes)
    require(options.min_bytes <= options.max_bytes, f"--min-bytes {least} is above --max-bytes {most}")
    require(options.iters is None or options.iters >= 1, f"--iters must be at least 1, not {options.iters}")
    require(options.limit > 0, f"--limit must be above 0, not {options.limit:g}")
    return options


def make_worlds(device: torch.device, dtype: torch.dtype) -> dict[str, Members]:
    """The world as "", and its subgroups if it splits into two halves of at least two ranks: "halves", and "across" of
    each rank and its partner in the other half. Every rank calls it."""
    groups = {"": dist.group.WORLD}
    if (size := dist.get_world_size()) >= 4 and size % 2 == 0:
        state = mpu.initialize_model_parallel(size // 2)
        groups |= {"halves": state.model_parallel_group, "across": state.data_parallel_group}
    return {name: Members(group, device, dtype) for name, group in groups.items() if group}


def bench(options: argparse.Namespace, worlds: dict[str, Members], where: str) -> int:
    """Measure all that is asked for and report it; returns the exit code."""
    everyone, hosts = worlds[""], of_all_ranks(os.uname().nodename)
    chosen = [name for name in [*OPERATIONS, "pairs"] if name in options.operations]

    def log(line: object) -> None:
        if everyone.rank == 0:
            print(line, flush=True)

    count = len(set(hosts))
    what = f"{everyone.n} ranks on {count} host{'s' * (count > 1)}; {where}; {options.dtype}"
    log(f"{what}; torch {torch.__version__}\n\n{HEADER}")
    rows: list[Row] = []
    missing: dict[str, str] = {}
    pairs, lines = None, list[str]()
    end = time.monotonic() + options.limit
    for number, name in enumerate(chosen):
        now = time.monotonic()
        deadline = now + (end - now) / (len(chosen) - number)
        try:
            if name == "pairs":
                pairs = measure_pairs(everyone, deadline)
                log(f"\n{pairs_table(pairs)}")
                lines += slow_pairs(pairs, hosts)
            else:
                for row in measure_sizes(name, worlds, options, deadline):
                    rows.append(row)
                    log(row)
        except NotMeasured as reason:
            missing[name] = str(reason)
            log(f"{name:<18} {reason}")
    lines += verdict(rows, missing)
    log("\n" + "\n".join(lines))
    if everyone.rank == 0 and options.output:
        record = {
            "backend": dist.get_backend(),
            "device": everyone.device.type,
            "dtype": options.dtype,
            "torch": torch.__version__,
            "world_size": everyone.n,
            "hosts": hosts,
            "rows": [asdict(row) for row in rows],
            "missing": [{"operation": name, "reason": reason} for name, reason in missing.items()],
            "pairs": None if pairs is None else {"bytes": PAIRS_BYTES, "bandwidth": pairs.tolist()},
            "verdict": lines,
        }
        (options.output / "collectives.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        log(plot(rows, options.output / "collectives.png", what))
    return 0 if all(row.correct for row in rows) else 1


def start(argv: Sequence[str], ranks: Ranks, log: Log) -> int:
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
    return bench(options, make_worlds(device, DTYPES[options.dtype]), f"{backend}; {device_line}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    return run_program(start, argv)
