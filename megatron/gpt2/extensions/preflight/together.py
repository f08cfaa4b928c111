"""What ranks find out together before a run: whether each collective of each group gives what it must, and how far
their clocks are apart. Legend: n members of a group, r the place of a member in it.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import mpu
from megatron.gpt2.commands.bench_collectives import combined, fill, holds, moved, reduced, synchronize
from mpu.mappings import all_gather_single, reduce_scatter_single

ELEMENTS = 1 << 16  # of a message, divided by the ranks of a group where it is cut into blocks
RUNS = 3
CLOCK_ROUNDS = 5


def groups_of(state: mpu.ParallelState) -> dict[str, ProcessGroup]:
    """The groups of this rank that have more than one member, by their names in a table."""
    named = {
        "world": dist.group.WORLD,
        "tensor": state.tensor_model_parallel_group,
        "data": state.data_parallel_group,
        "pipeline": state.pipeline_model_parallel_group,
    }
    return {name: group for name, group in named.items() if group is not None and group.size() > 1}


def try_groups(state: mpu.ParallelState, device: torch.device) -> dict[str, dict[str, Any]]:
    """Of each group what `try_group` finds. Every rank calls it."""
    return {name: try_group(group, device) for name, group in groups_of(state).items()}


def try_group(group: ProcessGroup, device: torch.device) -> dict[str, Any]:
    """{"ms": {operation: the median of RUNS}, "wrong": the operations that gave other values on this rank}. float32."""
    times, wrong = {}, []
    for name, operation in OPERATIONS.items():
        seconds, right = [], True
        for _ in range(RUNS):
            dist.barrier(group)
            synchronize(device)
            start = time.perf_counter()
            check = operation(group, device)
            synchronize(device)
            seconds.append(time.perf_counter() - start)
            right &= check()
        times[name] = round(1000 * statistics.median(seconds), 3)
        if not right:
            wrong.append(name)
    return {"ms": times, "wrong": wrong}


def _empty(device: torch.device, *shape: int) -> Tensor:
    return torch.full(shape, torch.nan, device=device)


def all_reduce(group: ProcessGroup, device: torch.device) -> Callable[[], bool]:
    """Sums, which are powers of two added up: exact."""
    buffer = fill(_empty(device, ELEMENTS), reduced(group.rank()))
    dist.all_reduce(buffer, group=group)
    return lambda: holds(buffer, combined("SUM", range(group.size())))


def all_gather(group: ProcessGroup, device: torch.device) -> Callable[[], bool]:
    """The block of each member, on every one."""
    received = _empty(device, group.size(), ELEMENTS // group.size())
    all_gather_single(received.view(-1), fill(torch.empty_like(received[0]), moved(group.rank())), group=group)
    return lambda: all(holds(block, moved(r)) for r, block in enumerate(received))


def reduce_scatter(group: ProcessGroup, device: torch.device) -> Callable[[], bool]:
    """Member r gets the sum of all blocks r."""
    sent = _empty(device, group.size(), ELEMENTS // group.size())
    for block in sent:
        fill(block, reduced(group.rank()))
    received = torch.full_like(sent[0], torch.nan)
    reduce_scatter_single(received, sent.view(-1), group=group)
    return lambda: holds(received, combined("SUM", range(group.size())))


def broadcast(group: ProcessGroup, device: torch.device) -> Callable[[], bool]:
    """The buffer of the last member, on every one."""
    buffer = fill(_empty(device, ELEMENTS), moved(group.rank()))
    dist.broadcast(buffer, group_src=group.size() - 1, group=group)
    return lambda: holds(buffer, moved(group.size() - 1))


OPERATIONS = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
}


def clock_offset(device: torch.device) -> float:
    """Seconds by which this rank's clock is before that of rank 0: the median of some rounds, in each of which all
    ranks read their clocks behind a barrier."""
    offsets = []
    for _ in range(CLOCK_ROUNDS):
        dist.barrier()
        now = torch.tensor(time.time(), dtype=torch.float64, device=device)
        of_first = now.clone()
        dist.broadcast(of_first, 0)
        offsets.append(float(now - of_first))
    return statistics.median(offsets)
