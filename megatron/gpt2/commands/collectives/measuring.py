"""How operations are measured: as many runs on every rank, each from a common start to the end of the slowest rank."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.gpt2.commands.collectives.operations import Operation, Trial, World, filled, moved
from megatron.gpt2.commands.collectives.report import Missing, Pairs, Row, row_line, size_name
from megatron.gpt2.device import PRECISIONS

LEAST_RUNS, MOST_RUNS, RUNS_SECONDS = 5, 1000, 0.2  # of an operation at a size, where --iters does not say
PAIRS_RUNS, MOST_PAIRED_RANKS = 9, 16


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


def synchronize(device: torch.device) -> None:
    """Wait for the GPU; on a CPU a call has done its work when it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    for buffer in trial.in_place:
        buffer.zero_()
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
    message = filled(world, size, moved(0))
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
