"""Process groups of any size in one process. The groups send nothing, and report each operation.

The program calls torch.distributed as usual, which calls the methods of `FakeProcessGroup`. `fake_groups` makes the
groups of one rank, for tensors without data. torch's own fake backend is private, and its operations report no waits.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

import mpu


class Call(NamedTuple):
    """The start of a collective or of a message.

    number: counts the calls of a rank.
    name: the name in torch.distributed, such as "all_reduce".
    ranks: global ranks of the group; for "send" and "recv" the sender and the receiver.
    size: bytes of the input or the output, whichever is larger.
    """

    number: int
    name: str
    ranks: tuple[int, ...]
    size: int


class Wait(NamedTuple):
    """The program waits for the call with this number: the host waits, or on a GPU the current stream. The program
    waits at once for a call that is not asynchronous."""

    number: int


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists and tuples."""
    if isinstance(value, list | tuple):
        return [x for part in value for x in tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


Report = Callable[[Call | Wait], None]
Start = Callable[[str, Any, tuple[Any, ...]], Any]
# The methods of a process group, with their names in torch.distributed. torch 2.13 renamed some methods.
OPERATIONS = {name: name for name in "broadcast reduce reduce_scatter send recv gather scatter barrier".split()} | {
    **dict.fromkeys(["allreduce", "allreduce_coalesced"], "all_reduce"),
    **dict.fromkeys(["allgather", "_allgather_base", "all_gather_single"], "all_gather"),
    **dict.fromkeys(["_reduce_scatter_base", "reduce_scatter_single"], "reduce_scatter"),
    **dict.fromkeys(["alltoall", "alltoall_base", "all_to_all_single"], "all_to_all"),
}


class FakeProcessGroup(dist.ProcessGroup):
    """A group that sends nothing.

    rank: the global rank of the process.
    ranks: the ranks of the group.
    start: each operation calls `start(name, group, arguments)` and returns its result, the handle to wait for.
    """

    def __init__(self, rank: int, ranks: Sequence[int], start: Start) -> None:
        super().__init__(ranks.index(rank), len(ranks))  # type: ignore[call-arg]
        self.ranks, self._start = tuple(ranks), start


def _operation(name: str) -> Callable[..., Any]:
    return lambda group, *arguments, **options: group._start(name, group, (*arguments, *options.values()))


for method, name in OPERATIONS.items():
    setattr(FakeProcessGroup, method, _operation(name))


def _bytes_of(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_bytes_of, value))
    return value.nbytes if isinstance(value, Tensor) else 0


@contextlib.contextmanager
def fake_groups(rank: int, world_size: int, tensor: int, pipeline: int, report: Report) -> Iterator[mpu.ParallelState]:
    """Yield the groups of `rank` with these tensor- and pipeline-parallel sizes. `report` gets each call and each wait.
    After the block, the process has its former groups again."""
    numbers = itertools.count()

    def start(name: str, group: FakeProcessGroup, arguments: tuple[Any, ...]) -> types.SimpleNamespace:
        ranks = group.ranks
        if name in ("send", "recv"):  # `arguments` are the tensors, the peer and the tag.
            ends = rank, ranks[arguments[1]]
            ranks = ends if name == "send" else ends[::-1]
        call = Call(next(numbers), name, ranks, max(map(_bytes_of, arguments)))
        report(call)
        return types.SimpleNamespace(wait=lambda: report(Wait(call.number)))

    def made(ranks: Sequence[int]) -> FakeProcessGroup:
        return FakeProcessGroup(rank, ranks, start)

    real = dist.get_global_rank, dist.group.WORLD

    def own_group(rows: list[list[int]], **_: Any) -> tuple[Any, None]:
        return next((made(row) for row in rows if rank in row), None), None

    def global_rank(group: Any, number: int) -> int:
        return group.ranks[number] if isinstance(group, FakeProcessGroup) else real[0](group, number)

    with (
        mock.patch.object(mpu.initialize, "_default", None),
        mock.patch.object(dist, "new_subgroups_by_enumeration", own_group),
        mock.patch.object(distributed_c10d, "get_global_rank", global_rank),
    ):
        dist.group.WORLD = made(range(world_size)) if world_size > 1 else None
        try:
            yield mpu.initialize_model_parallel(tensor, pipeline)
        finally:
            dist.group.WORLD = real[1]
