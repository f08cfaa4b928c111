"""Measure what a run will be built on: every collective, point-to-point messages, subgroups, and a ring all-reduce of
our own, each checked for right values before it is timed. Rank 0 prints.

    torchrun --nproc-per-node 2 tools/bench_collectives.py --max-bytes 1M
    srun python tools/bench_collectives.py --output collectives

docs/how-to/collectives.md says how to read the figures. Exit codes: 0 if all results were right, 1 if one was wrong, 2
for bad input.

Legend: `n` ranks, `r` a rank, `i` an element's index. Bytes are those that nccl-tests counts: the whole buffer of one
rank, and all n blocks if an operation has n blocks. The values to check are exact in every dtype, and periodic, so that
the expected ones of 256 MB cost nothing.
"""

import argparse
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import mpu
from data_utils.command_line import Parser, how_to_call, progress_bar
from megatron.gpt2.config import require
from megatron.gpt2.device import DTYPES, PRECISIONS, choose_backend, choose_device, set_threads
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.dist.rendezvous import initialize_distributed
from megatron.gpt2.dist.run_program import Log, run_program
from mpu.mappings import all_gather_single, reduce_scatter_single

FACTOR = 4  # between the sizes
TIMEOUT_MINUTES = 5  # until a rank that hangs ends the others; far above any one operation
LEAST_RUNS, MOST_RUNS, RUNS_SECONDS = 5, 1000, 0.2  # of an operation at a size, if --iters does not say
PAIRS_BYTES, PAIRS_RUNS, MOST_PAIRED_RANKS = 1 << 20, 9, 16  # below 1 MB noise looks like a slow pair
FAR_BELOW = 0.5  # of the median of all pairs: a pair or a rank under it is named
SEGMENT_BYTES, MOST_SEGMENTS = 1 << 19, 8  # of the ring: below, messages cost more than their overlap gains
PERIOD = 375  # elements; the least that holds both 3 and 125
TILES = 2048  # periods that are compared or written at once
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative; for the order of summation
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {  # of [members, n], by their names in `dist.ReduceOp`
    "SUM": lambda x: x.sum(0),
    "PRODUCT": lambda x: x.prod(0),
    "MIN": lambda x: x.amin(0),
    "MAX": lambda x: x.amax(0),
}


def moved(rank: int) -> Tensor:
    """[PERIOD] values by which the block of a rank is recognised: (i + 7 r) mod 125."""
    return ((torch.arange(PERIOD) + 7 * rank) % 125).double()


def reduced(rank: int) -> Tensor:
    """[PERIOD] values of a rank to reduce: 2^e with e = ±(((i + r²) mod 3) - 1), + for even ranks, so that sums and
    products of many ranks stay in range."""
    exponent = (torch.arange(PERIOD) + rank * rank) % 3 - 1
    return torch.pow(2.0, (exponent if rank % 2 == 0 else -exponent).double())


def combined(kind: str, members: range) -> Tensor:
    """[PERIOD] values that reducing over these ranks gives."""
    return REDUCTIONS[kind](torch.stack([reduced(member) for member in members]))  # [members, PERIOD] -> [PERIOD]


def tile(values: Tensor, like: Tensor) -> Tensor:
    """[PERIOD] -> [up to TILES x PERIOD], as many as `like` needs."""
    return values.to(like.device, like.dtype).repeat(min(TILES, -(-like.numel() // PERIOD)))


def fill(buffer: Tensor, values: Tensor) -> Tensor:
    """Write the periodic `values` into `buffer`, which is returned."""
    tiled = tile(values, buffer)
    for part in buffer.split(TILES * PERIOD):
        part.copy_(tiled[: part.numel()])
    return buffer


def holds(buffer: Tensor, values: Tensor) -> bool:
    """Whether the buffer is the periodic values, within the dtype's rounding."""
    tiled, rtol = tile(values, buffer).double(), TOLERANCE[buffer.dtype]
    parts = buffer.split(TILES * PERIOD)
    return all(torch.allclose(part.double(), tiled[: part.numel()], rtol=rtol, atol=0) for part in parts)


def synchronize(device: torch.device) -> None:
    """Wait for the GPU; on a CPU a call has done its work when it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class World:
    """This rank among all. half: the group of this rank's half of the world. across: the group of this rank and its
    counterpart in the other half. Both are None if the world has no such groups."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype
    half: ProcessGroup | None = None
    across: ProcessGroup | None = None

    def full(self, *shape: int) -> Tensor:
        """A buffer of NaN."""
        return torch.full(shape, torch.nan, device=self.device, dtype=self.dtype)

    def buffer(self, size: int) -> Tensor:
        """A buffer of `size` bytes, of at least one element."""
        return self.full(max(1, size // self.dtype.itemsize))

    def blocks(self, size: int) -> Tensor:
        """[n, block] of `size` bytes in all, or as near below as n equal blocks come."""
        return self.full(self.size, max(1, size // self.dtype.itemsize // self.size))


def make_world(device: torch.device, dtype: torch.dtype) -> World:
    """The world with its subgroups; every rank calls it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size < 4 or size % 2:
        return World(rank, size, device, dtype)
    state = mpu.initialize_model_parallel(size // 2)
    return World(rank, size, device, dtype, state.model_parallel_group, state.data_parallel_group)


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

    tensor: contiguous, of the same shape and dtype on every rank, any number of elements. segments: for each chunk, the
    same on every rank; by default one for each 512 KB, at most 8. An empty segment is not sent.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    if n == 1:
        return
    ahead, behind, steps = (rank + 1) % n, (rank - 1) % n, 2 * (n - 1)
    if segments is None:
        segments = max(1, min(MOST_SEGMENTS, tensor.nbytes // n // SEGMENT_BYTES))
    # pieces[c][j] is segment j of chunk c, a view of [about N / (n · segments)]
    pieces = [chunk.tensor_split(segments) for chunk in tensor.view(-1).tensor_split(n)]
    inbox = [torch.empty_like(piece) for piece in pieces[0]]  # no later chunk is longer than the first

    def arriving(step: int, j: int) -> Tensor:
        """Where segment j of step `step` is received: beside its chunk while sums are made, else in its place."""
        piece = pieces[(rank - step - 1) % n][j]
        return inbox[j][: piece.numel()] if step < n - 1 else piece

    def exchange(step: int, j: int) -> list[dist.Work]:
        """Start sending and receiving segment j of a step."""
        parcels = ((dist.isend, pieces[(rank - step) % n][j], ahead), (dist.irecv, arriving(step, j), behind))
        # As a batch: NCCL runs single calls one by one in that order, and two sends that face each other would wait for
        # ever. The tag keeps the segments of a slower neighbour apart.
        batch = [dist.P2POp(operation, piece, peer, tag=j) for operation, piece, peer in parcels if piece.numel()]
        return dist.batch_isend_irecv(batch) if batch else []

    travelling = [exchange(0, j) for j in range(segments)]
    for step in range(steps):
        for j in range(segments):
            for work in travelling[j]:
                work.wait()
            if step < n - 1:
                pieces[(rank - step - 1) % n][j].add_(arriving(step, j))
            if step + 1 < steps:
                travelling[j] = exchange(step + 1, j)


@dataclass(frozen=True)
class Trial:
    """An operation with its buffers. expected: the values of buffers after the first run. in_place: the buffer to set
    to zero after that, since a hundred sums in place would leave any range. messages: those that follow each other in
    one run, by which its time is divided."""

    bytes: int
    run: Callable[[], object]
    expected: Sequence[tuple[Tensor, Tensor]] = ()
    in_place: Tensor | None = None
    messages: int = 1

    def correct(self) -> bool:
        """Whether the first run gave the right values."""
        return all(holds(buffer, values) for buffer, values in self.expected)


def all_reduce(kind: str, subgroup: str = "", by: Callable[..., object] = dist.all_reduce) -> Callable[..., Trial]:
    """One buffer, combined over all ranks, or over a `subgroup` ("half", "across"); kind: of `dist.ReduceOp`."""

    def prepare(world: World, size: int) -> Trial:
        n, half = world.size, world.size // 2
        members, options = range(n), {} if kind == "SUM" else {"op": getattr(dist.ReduceOp, kind)}
        if subgroup == "half":
            members = range(world.rank // half * half, (world.rank // half + 1) * half)
        elif subgroup == "across":
            members = range(world.rank % half, n, half)
        if subgroup:
            options["group"] = getattr(world, subgroup)
        buffer = fill(world.buffer(size), reduced(world.rank))
        return Trial(buffer.nbytes, lambda: by(buffer, **options), [(buffer, combined(kind, members))], buffer)

    return prepare


def reduce(world: World, size: int) -> Trial:
    """One buffer, summed over all ranks on rank 0."""
    buffer = fill(world.buffer(size), reduced(world.rank))
    expected = [(buffer, combined("SUM", range(world.size)))] if world.rank == 0 else []
    return Trial(buffer.nbytes, lambda: dist.reduce(buffer, 0), expected, buffer)


def broadcast(world: World, size: int) -> Trial:
    """One buffer, from rank 0 to all."""
    buffer = fill(world.buffer(size), moved(1 + world.rank))
    return Trial(buffer.nbytes, lambda: dist.broadcast(buffer, 0), [(buffer, moved(1))])


def all_gather(world: World, size: int) -> Trial:
    """A block of each rank, all of them on every rank."""
    received = world.blocks(size)
    sent = fill(torch.empty_like(received[0]), moved(world.rank))
    expected = [(block, moved(r)) for r, block in enumerate(received)]
    return Trial(received.nbytes, lambda: all_gather_single(received.view(-1), sent), expected)


def gather(world: World, size: int) -> Trial:
    """A block of each rank, all of them on rank 0."""
    received = world.blocks(size)
    sent = fill(torch.empty_like(received[0]), moved(world.rank))
    expected = [(block, moved(r)) for r, block in enumerate(received)] if world.rank == 0 else []
    blocks = list(received) if world.rank == 0 else None
    return Trial(received.nbytes, lambda: dist.gather(sent, blocks, 0), expected)


def scatter(world: World, size: int) -> Trial:
    """A block for each rank, from rank 0."""
    sent = world.blocks(size)
    received = torch.full_like(sent[0], torch.nan)
    blocks = [fill(block, moved(r)) for r, block in enumerate(sent)] if world.rank == 0 else None
    return Trial(sent.nbytes, lambda: dist.scatter(received, blocks, 0), [(received, moved(world.rank))])


def reduce_scatter(world: World, size: int) -> Trial:
    """n blocks on each rank; rank r gets the sum of all blocks r."""
    sent = world.blocks(size)
    fill(sent.view(-1), reduced(world.rank))
    received = torch.full_like(sent[0], torch.nan)
    expected = combined("SUM", range(world.size)).roll(-world.rank * received.numel() % PERIOD)  # this rank's block
    return Trial(sent.nbytes, lambda: reduce_scatter_single(received, sent.view(-1)), [(received, expected)])


def all_to_all(world: World, size: int) -> Trial:
    """n blocks on each rank; block t goes to rank t."""
    sent, received, n = world.blocks(size), world.blocks(size), world.size
    for target, block in enumerate(sent):
        fill(block, moved(world.rank * n + target))
    expected = [(block, moved(source * n + world.rank)) for source, block in enumerate(received)]
    return Trial(sent.nbytes, lambda: dist.all_to_all_single(received.view(-1), sent.view(-1)), expected)


def barrier(world: World, size: int) -> Trial:
    """No message: the ranks wait for each other."""
    return Trial(0, dist.barrier)


def between_partners(at_once: bool) -> Callable[..., Trial]:
    """There and back between each rank and the one at the same place in the other half, one message after the other or
    both `at_once`. The last of an odd number of ranks has no partner."""

    def prepare(world: World, size: int) -> Trial:
        half = world.size // 2
        peer = (world.rank + half) % (2 * half)
        sent = fill(world.buffer(size), moved(world.rank))
        received = torch.full_like(sent, torch.nan)

        def run() -> None:
            if at_once:
                both = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
                for work in dist.batch_isend_irecv(both):
                    work.wait()
            else:
                for sends in (world.rank < peer, world.rank > peer):
                    dist.send(sent, peer) if sends else dist.recv(received, peer)

        if world.rank == 2 * half:
            return Trial(sent.nbytes, lambda: None, messages=1 if at_once else 2)
        return Trial(sent.nbytes, run, [(received, moved(peer))], messages=1 if at_once else 2)

    return prepare


@dataclass(frozen=True)
class Operation:
    """How to prepare an operation, (world, bytes) -> Trial on every rank, and its kind. bus_factor: of the number of
    ranks that take part; times the algorithm bandwidth it is the bus bandwidth."""

    prepare: Callable[[World, int], Trial]
    bus_factor: Callable[[int], float] = lambda n: 1.0
    subgroups: bool = False  # for worlds of an even number of ranks, 4 at least
    point_to_point: bool = False  # made of send and recv
    sizes: bool = True  # else it has no message, and is measured once


def there_and_on(n: int) -> float:
    """2 (n-1)/n: every element is summed over n ranks and brought back to them, over each link."""
    return 2 * (n - 1) / n


def all_but_own(n: int) -> float:
    """(n-1)/n: a rank keeps its own of n blocks, and the others pass its link."""
    return (n - 1) / n


# In the order of the table. The factors are nccl-tests' (doc/PERFORMANCE.md there).
OPERATIONS = {
    "broadcast": Operation(broadcast),
    **{f"all_reduce_{kind.lower()}": Operation(all_reduce(kind), there_and_on) for kind in REDUCTIONS},
    "ring_all_reduce": Operation(all_reduce("SUM", by=ring_all_reduce), there_and_on, point_to_point=True),
    "all_reduce_halves": Operation(all_reduce("SUM", "half"), lambda n: there_and_on(n // 2), subgroups=True),
    "all_reduce_across": Operation(all_reduce("SUM", "across"), lambda n: there_and_on(2), subgroups=True),
    "reduce": Operation(reduce),
    "all_gather": Operation(all_gather, all_but_own),
    "reduce_scatter": Operation(reduce_scatter, all_but_own),
    "gather": Operation(gather, all_but_own),
    "scatter": Operation(scatter, all_but_own),
    "all_to_all": Operation(all_to_all, all_but_own),
    "send_recv": Operation(between_partners(at_once=False), point_to_point=True),
    "isend_irecv": Operation(between_partners(at_once=True), point_to_point=True),
    "barrier": Operation(barrier, sizes=False),
}


@dataclass(frozen=True)
class Row:
    """An operation at one size.

    Times are in seconds, of the slowest rank of each run; bandwidths in 1e9 bytes per second, None where there is no
    message.
    """

    operation: str
    bytes: int
    iterations: int
    seconds: float  # the median
    seconds_p10: float
    seconds_p90: float
    algorithm_bandwidth: float | None
    bus_bandwidth: float | None
    correct: bool


@dataclass(frozen=True)
class Missing:
    """An operation without a figure, or without one from some size on, and the reason."""

    operation: str
    reason: str


@dataclass(frozen=True)
class Pairs:
    """bandwidth[source][target] in GB/s of messages of `bytes` bytes, while all other ranks are idle; 0 on the
    diagonal."""

    bytes: int
    bandwidth: list[list[float]]

    def all(self) -> list[float]:
        """The bandwidth of every pair, in GB/s."""
        return [
            value for source, row in enumerate(self.bandwidth) for target, value in enumerate(row) if source != target
        ]

    def slow(self) -> list[tuple[int, int]]:
        """The pairs far below the median of all."""
        least = FAR_BELOW * median(self.all())
        return [
            (source, target)
            for source, row in enumerate(self.bandwidth)
            for target, value in enumerate(row)
            if source != target and value < least
        ]

    def slow_ranks(self) -> list[int]:
        """Ranks with most of their pairs among the slow ones, in both directions; of two ranks neither can be
        blamed."""
        n, slow = len(self.bandwidth), self.slow()
        return [rank for rank in range(n) if n > 2 and sum(rank in pair for pair in slow) > n - 1]


def from_rank_0(value: int, world: World) -> int:
    """Rank 0's `value` on every rank, for decisions that depend on a clock. A collective."""
    shared = torch.tensor(value, device=world.device)
    dist.broadcast(shared, 0)
    return int(shared)


def count_over_ranks(here: bool, world: World) -> int:
    """On how many ranks `here` is true. A collective."""
    shared = torch.tensor(int(here), device=world.device)
    dist.all_reduce(shared)
    return int(shared)


def lacks_messages(world: World) -> str:
    """Why the world has no point-to-point messages, "" where it has.

    gloo does not refuse a GPU's messages: it fails in the middle of one, while the peer waits. So they are never tried.
    """
    on_gpu = dist.get_backend() == "gloo" and world.device.type != "cpu"
    return "not offered by gloo: it sends a CPU's tensors alone" if on_gpu else ""


def time_runs(trial: Trial, world: World, runs: int) -> torch.Tensor:
    """[runs] seconds, each of the slowest rank of a run.

    The ranks start together, behind a barrier that is not counted. A run ends when its result is there; on a GPU that
    includes the launch and the wait for it.
    """
    seconds = []
    for _ in range(runs):
        dist.barrier()
        synchronize(world.device)
        start = time.perf_counter()
        trial.run()
        synchronize(world.device)
        seconds.append((time.perf_counter() - start) / trial.messages)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=world.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.cpu()


def measure(
    name: str, operation: Operation, world: World, size: int, *, iters: int | None, deadline: float
) -> Row | Missing:
    """Try, check, then time one operation at one size. Every rank calls it; the deadline is rank 0's.

    iters: runs to time, None for as many as fit into RUNS_SECONDS. An operation that the backend lacks raises on every
    rank alike before anything is sent. RuntimeError where only some ranks fail.
    """
    if not from_rank_0(int(time.monotonic() < deadline), world):
        return Missing(name, f"{size_name(size)} and above: not measured within this operation's share of --limit")
    trial = operation.prepare(world, size)
    refusal = ""
    try:
        trial.run()
        synchronize(world.device)
    except (RuntimeError, ValueError, TypeError) as error:
        refusal = f"{type(error).__name__}: {' '.join(str(error).split())}"
    refused = count_over_ranks(bool(refusal), world)
    if refused == world.size:
        return Missing(
            name,
            f"not offered by {dist.get_backend()} for {PRECISIONS[world.dtype]} of {size_name(size)}: {refusal[:120]}",
        )
    if refused:
        raise RuntimeError(
            f"{name} of {size_name(size)} failed on {refused} of {world.size} ranks"
            + f", here with {refusal}" * bool(refusal)
        )
    correct = count_over_ranks(trial.correct(), world) == world.size
    if trial.in_place is not None:
        trial.in_place.zero_()
    estimate = float(time_runs(trial, world, 2)[1]) * trial.messages
    runs = iters or max(LEAST_RUNS, min(MOST_RUNS, int(RUNS_SECONDS / max(estimate, 1e-9))))
    within = (deadline - time.monotonic()) / max(estimate, 1e-9)  # the deadline may be infinite
    runs = from_rank_0(max(1, int(min(runs, within))), world)
    p10, middle, p90 = (
        time_runs(trial, world, runs).quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    )
    bandwidth = trial.bytes / middle / 1e9 if trial.bytes else None
    return Row(
        name,
        trial.bytes,
        runs,
        middle,
        p10,
        p90,
        bandwidth,
        bandwidth and bandwidth * operation.bus_factor(world.size),
        correct,
    )


def measure_sizes(
    name: str,
    operation: Operation,
    world: World,
    sizes: Sequence[int],
    *,
    iters: int | None,
    deadline: float,
    log: Callable[[str], None] = lambda line: None,
) -> tuple[list[Row], Missing | None]:
    """One operation at every size, until one cannot be measured, and why that is. log: takes the line of each size."""
    rows: list[Row] = []
    lacking = lacks_messages(world) if operation.point_to_point else ""
    if operation.subgroups and world.half is None:
        why = "has none of two ranks but itself" if world.size == 2 else "does not split into two halves"
        lacking = f"no subgroups to measure: a world of {world.size} {why}"
    if lacking:
        return rows, Missing(name, lacking)
    for size in sizes if operation.sizes else sizes[:1]:
        result = measure(name, operation, world, size, iters=iters, deadline=deadline)
        if isinstance(result, Missing):
            return rows, result
        rows.append(result)
        log(row_line(result))
    return rows, None


def measure_pairs(world: World, size: int, deadline: float) -> tuple[Pairs | None, Missing | None]:
    """The bandwidth from each rank to each other, one pair at a time, in messages of `size` bytes, the median of
    PAIRS_RUNS; or why it cannot be measured.

    The time is the sender's, until the receiver has answered with one element.
    """
    if world.size > MOST_PAIRED_RANKS:
        return None, Missing("pairs", f"only measured in worlds of at most {MOST_PAIRED_RANKS} ranks")
    if lacks_messages(world):
        return None, Missing("pairs", lacks_messages(world))
    message = fill(world.buffer(size), moved(0))
    answer = torch.zeros(1, device=world.device, dtype=world.dtype)
    bandwidth = torch.zeros(world.size, world.size, dtype=torch.float64, device=world.device)
    for source, target in ((s, t) for s in range(world.size) for t in range(world.size) if s != t):
        if not from_rank_0(int(time.monotonic() < deadline), world):
            return None, Missing("pairs", "not measured within their share of --limit")
        dist.barrier()
        seconds = []
        for _ in range(1 + PAIRS_RUNS):
            start = time.perf_counter()
            if world.rank == source:
                dist.send(message, target)
                dist.recv(answer, target)
            elif world.rank == target:
                dist.recv(message, source)
                dist.send(answer, source)
            synchronize(world.device)
            seconds.append(time.perf_counter() - start)
        if world.rank == source:
            bandwidth[source, target] = message.nbytes / sorted(seconds[1:])[PAIRS_RUNS // 2] / 1e9
    dist.all_reduce(bandwidth)
    return Pairs(message.nbytes, bandwidth.tolist()), None


def size_name(size: int) -> str:
    """1024 -> 1K; a size that no unit divides stays a number of bytes."""
    for suffix, unit in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{suffix}"
    return str(size)


HEADER = (
    f"{'operation':<18} {'bytes':>9} {'runs':>5} {'median µs':>11} {'p10 – p90 µs':>23} {'algorithm':>10} "
    f"{'bus GB/s':>9}  result"
)


def row_line(row: Row) -> str:
    """A row of the table, under HEADER."""
    spread = f"{row.seconds_p10 * 1e6:,.1f} – {row.seconds_p90 * 1e6:,.1f}"
    algorithm, bus = ("" if value is None else f"{value:.3f}" for value in (row.algorithm_bandwidth, row.bus_bandwidth))
    return (
        f"{row.operation:<18} {size_name(row.bytes) if row.bytes else '':>9} {row.iterations:>5} "
        f"{row.seconds * 1e6:>11,.1f} {spread:>23} {algorithm:>10} {bus:>9}  {'ok' if row.correct else 'WRONG'}"
    )


def missing_line(missing: Missing) -> str:
    """A row of the table for an operation without a figure."""
    return f"{missing.operation:<18} {missing.reason}"


def pairs_table(pairs: Pairs) -> Iterator[str]:
    """The matrix, with a * at each slow pair."""
    slow = set(pairs.slow())
    n = len(pairs.bandwidth)
    yield f"GB/s from one rank (row) to another (column), {size_name(pairs.bytes)} messages, one pair at a time"
    yield " " * 8 + "".join(f"{target:>8} " for target in range(n))
    for source, row in enumerate(pairs.bandwidth):
        yield f"{source:>7} " + "".join(
            f"{'-':>8} " if source == target else f"{value:>8.3f}{'*' if (source, target) in slow else ' '}"
            for target, value in enumerate(row)
        )


def verdict(rows: list[Row], missing: list[Missing], pairs: Pairs | None, hosts: list[str]) -> Iterator[str]:
    """What to know before a training run; lines that begin with WRONG or SLOW should stop one."""
    messages = [row for row in rows if row.bus_bandwidth is not None]
    if messages:
        smallest = [row for row in messages if row.bytes <= 1.5 * min(row.bytes for row in messages)]
        latencies = sorted(smallest, key=lambda row: row.seconds)
        yield (
            f"latency of {size_name(latencies[0].bytes)} bytes: from {latencies[0].seconds * 1e6:,.1f} µs "
            f"({latencies[0].operation}) to {latencies[-1].seconds * 1e6:,.1f} µs ({latencies[-1].operation})"
        )
        best = max(messages, key=lambda row: row.bus_bandwidth or 0.0)
        yield f"greatest bus bandwidth: {best.bus_bandwidth:.3f} GB/s ({best.operation} of {size_name(best.bytes)})"
    library = {row.bytes: row.seconds for row in rows if row.operation == "all_reduce_sum"}
    both = [
        (row.bytes, library[row.bytes] / row.seconds)
        for row in rows
        if row.operation == "ring_all_reduce" and row.bytes in library
    ]
    if both:
        size, ratio = both[-1]
        yield f"our ring against the backend's all_reduce, both of {size_name(size)}: {ratio:.2f} times its speed"
    if pairs:
        values = pairs.all()
        yield (
            f"pairs: {min(values):.3f} to {max(values):.3f} GB/s, median {median(values):.3f}; "
            + (f"{len(pairs.slow())} below half of it" if pairs.slow() else "none below half of it")
        )
        for rank in pairs.slow_ranks():
            yield f"SLOW: rank {rank} on {hosts[rank]}, in most of its pairs"
        for source, target in pairs.slow():
            if not {source, target} & set(pairs.slow_ranks()):
                yield (
                    f"SLOW: rank {source} on {hosts[source]} to rank {target} on {hosts[target]}: "
                    f"{pairs.bandwidth[source][target]:.3f} GB/s"
                )
    if missing:
        yield f"without a figure, see the table: {', '.join(dict.fromkeys(one.operation for one in missing))}"
    wrong = [f"{row.operation} of {size_name(row.bytes)}" for row in rows if not row.correct]
    if rows:
        yield f"WRONG results: {', '.join(wrong)}" if wrong else f"every result was right ({len(rows)})"


def plot(rows: list[Row], path: Path, title: str) -> str:
    """Draw bus bandwidth over size into `path`; returns a line that says where the plot is, or why there is none."""
    try:
        logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports its font cache, which is no news of ours
        from matplotlib.figure import Figure
    except ImportError:
        return f"no plot: matplotlib is not installed; {path.with_suffix('.json').name} has the figures"

    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    drawn = {
        row.operation: [other for other in rows if other.operation == row.operation]
        for row in rows
        if row.bus_bandwidth
    }
    for number, (operation, points) in enumerate(drawn.items()):
        axes.plot(
            [row.bytes for row in points],
            [row.bus_bandwidth or 0.0 for row in points],
            label=operation,
            color=f"C{number % 10}",
            marker="osD^"[number // 5 % 4],
            markersize=4,
            linewidth=1.2,
            linestyle="-" if number < 10 else "--",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row.bytes for points in drawn.values() for row in points if row.bytes & (row.bytes - 1) == 0})
    if ticks:
        axes.set_xticks(ticks, [size_name(tick) for tick in ticks])
    axes.set_xlabel("bytes")
    axes.set_ylabel("bus bandwidth (GB/s)")
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if drawn:
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path)
    return f"plot: {path}"


def size_of(text: str) -> int:
    """ "64K" -> 65536: a number of bytes, or of K, M or G (powers of 1024)."""
    found = re.fullmatch(r"(\d+)([KMG]?)", text.upper().removesuffix("IB").removesuffix("B"))
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text} is not a size: write 1024, 64K, 256M or 1G")
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]]


def sizes_between(least: int, most: int) -> list[int]:
    """least, 4 least, 16 least, … up to most."""
    sizes = [least]
    while sizes[-1] * FACTOR <= most:
        sizes.append(sizes[-1] * FACTOR)
    return sizes


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
        help=f"runs of each operation at each size (default: for {RUNS_SECONDS} s, {LEAST_RUNS} to {MOST_RUNS})",
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
    log(f"\n{HEADER}")
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
            pairs, without = measure_pairs(world, PAIRS_BYTES, deadline)
            if pairs:
                log("\n" + "\n".join(pairs_table(pairs)))
        else:
            more, without = measure_sizes(
                name, OPERATIONS[name], world, sizes, iters=options.iters, deadline=deadline, log=log
            )
            rows += more
        if without:
            missing.append(without)
            log(missing_line(without))
        bar.update()
    bar.close()
    lines = list(verdict(rows, missing, pairs, hosts))
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
        log(plot(rows, options.output / "collectives.png", title))
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
    return bench(options, make_world(device, DTYPES[options.dtype]), f"{backend}; {device_line}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    return run_program(start, argv)
