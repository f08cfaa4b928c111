"""Process groups of any size in one process. The groups send nothing, and report each operation.

`fake_groups` makes the groups of one rank. The program calls torch.distributed as usual, which calls the methods of
`FakeProcessGroup`. torch's own fake backend is private, and its operations report no waits.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

import mpu


class Call(NamedTuple):
    """A collective or message that starts.

    number: counts the calls of a rank. name: of torch.distributed, "all_reduce". ranks: global ranks of the group; for
    "send" and "recv" the sender and the receiver. size: bytes of the input or the output, whichever is larger."""

    number: int
    name: str
    ranks: tuple[int, ...]
    size: int


class Wait(NamedTuple):
    """The program waits for call `number`: the host, or on a GPU the current stream. A call that is not asynchronous is
    waited for at once."""

    number: int


Report = Callable[[Call | Wait], None]


class FakeProcessGroup(dist.ProcessGroup):
    """A group whose operations do not change their tensors.

    rank: the global rank of this process.
    ranks: the ranks of the group.
    numbers: counts the calls of all groups of the rank.
    """

    def __init__(self, rank: int, ranks: Sequence[int], numbers: Iterator[int], report: Report) -> None:
        super().__init__(ranks.index(rank), len(ranks))  # type: ignore[call-arg]
        self.ranks, self._numbers, self._report = tuple(ranks), numbers, report

    def _start(self, name: str, *arguments: Any) -> types.SimpleNamespace:
        ranks = self.ranks
        if name in ("send", "recv"):  # The arguments are tensors, peer and tag.
            ends = ranks[self.rank()], ranks[arguments[1]]
            ranks = ends if name == "send" else ends[::-1]
        call = Call(next(self._numbers), name, ranks, max(map(_bytes_of, arguments)))
        self._report(call)
        return types.SimpleNamespace(wait=lambda: self._report(Wait(call.number)))

    allreduce = functools.partialmethod(_start, "all_reduce")
    allgather = functools.partialmethod(_start, "all_gather")
    all_gather_single = _allgather_base = allgather  # torch 2.13 renamed `_allgather_base` to the first name.
    reduce_scatter_single = _reduce_scatter_base = functools.partialmethod(_start, "reduce_scatter")
    all_to_all_single = alltoall_base = functools.partialmethod(_start, "all_to_all")
    broadcast = functools.partialmethod(_start, "broadcast")
    send = functools.partialmethod(_start, "send")
    recv = functools.partialmethod(_start, "recv")


def _bytes_of(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_bytes_of, value))
    return value.nbytes if isinstance(value, Tensor) else 0


@contextlib.contextmanager
def fake_groups(rank: int, world_size: int, tensor: int, pipeline: int, report: Report) -> Iterator[mpu.ParallelState]:
    """Yield the groups of `rank` with these tensor- and pipeline-parallel sizes. `report` gets each call and each wait.
    Groups that the process already has exist again afterwards."""
    made = functools.partial(FakeProcessGroup, rank, numbers=iter(range(1 << 60)), report=report)
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
