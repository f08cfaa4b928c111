"""Record the communication of one rank of a program, in one process and without the other ranks.

Inside `record`, torch.distributed has a process group of the whole world that sends nothing. It writes down each call
of a collective, each send and receive, and each wait for one. A dispatch mode watches the memory of calls that are on
their way: an operator must not read what is still received, nor write to what is still sent or received.

The program needs values to go on. A receive gives zeros. A collective gives the data of the first rank of its group to
every rank, if they are small, and otherwise the rank's own data. So the values are wrong but equal, and decisions that
depend on them are equal on all ranks. Therefore the ranks must be recorded in their order.

Not seen: communication in other threads, memory that NumPy reads, and the end of a call that is only polled. The future
of a call (torch's DDP uses it) counts as a wait.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BACKEND = "recorded"  # the name of the backend in torch.distributed
KEPT = (
    1 << 14
)  # elements up to which a result is the same on all ranks; bytes are always kept, because they are objects
DEPTH = 3  # lines of the program for each call, from the innermost
# The methods of a process group, with the names of the functions that call them. torch 2.13 renamed some.
OPERATIONS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_single",
    "all_gather_single": "all_gather_single",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_single": "reduce_scatter_single",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
GroupKey = tuple[tuple[int, ...], int]  # global ranks, and the number among groups of the same ranks


@dataclass(eq=False)
class Call:
    """A call of a collective, a send or a receive on one rank.

    channel: calls of one channel meet in their order: the first of each member, the second, and so on. members: the
    global ranks that must call. arguments: shapes, dtypes and options, which must be equal on all members. sent,
    received: in an all-to-all, the elements to and from each member. place: lines of the program, from the innermost.
    backend: that the program asked for; "" for that of the world. batch: the number of its `batch_isend_irecv`.
    """

    name: str
    channel: tuple[Any, ...]
    members: tuple[int, ...]
    arguments: str
    place: tuple[str, ...]
    backend: str = ""
    batch: int = 0
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.members)) if len(self.members) < 9 else f"{self.members[0]}, …"
        return f"{self.name}({self.arguments}) of ranks {ranks} at {at(self.place)}"


@dataclass
class Record:
    """What one rank did. events: (True, call) for a call and (False, call) for the first wait for it, in order. faults:
    uses of memory that was on its way, and calls that nobody waited for. values: results of collectives for later
    ranks."""

    rank: int
    world_size: int
    events: list[tuple[bool, Call]] = field(default_factory=list)
    faults: list[list[str]] = field(default_factory=list)
    values: dict[Any, list[Tensor]] = field(default_factory=dict)


def at(place: Sequence[str]) -> str:
    """Describe a place in the program: the innermost line, and its callers in brackets."""
    inner, *callers = place or ("unknown",)
    return inner + (f" (called from {', '.join(callers)})" if callers else "")


def _place() -> tuple[str, ...]:
    found, frame = list[str](), sys._getframe(1)
    while frame is not None and len(found) < DEPTH:
        if name := _name_in_program(frame.f_code.co_filename):
            found.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


@functools.cache
def _name_in_program(file: str) -> str:
    """Return a short name of a source file, or "" if it is of Python, torch or this recorder."""
    library, of_torch = (os.path.dirname(module.__file__ or "") + os.sep for module in (os, torch))
    is_library = file.startswith(library) and "site-packages" not in file
    if is_library or file.startswith((of_torch, "<")) or file == __file__:
        return ""
    return min(file, os.path.relpath(file), key=len)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def _span(x: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's memory and the one after the last."""
    if x.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


class RecordedWork(dist.Work):
    """The handle of a call."""

    def __init__(self, recorder: Recorder, call: Call, written: list[Tensor]) -> None:
        super().__init__()
        self._recorder, self._call, self._written = recorder, call, written

    def wait(self, timeout: Any = None) -> bool:
        self._recorder.wait(self._call)
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        self.wait()
        future = torch.futures.Future[list[Tensor]]()
        future.set_result(self._written)
        return future


class RecordedGroup(dist.ProcessGroup):
    """A process group that sends nothing and records its calls. key: see `GroupKey`."""

    def __init__(self, recorder: Recorder, rank: int, key: GroupKey, backend: str) -> None:
        super().__init__(rank, len(key[0]))  # type: ignore[call-arg]
        self.recorder, self.key, self.backend = recorder, key, backend

    group_name = property(lambda self: distributed_c10d._world.pg_names[self])


def _operation(name: str) -> Callable[..., RecordedWork]:
    return lambda group, *arguments, **options: group.recorder.call(name, group, (*arguments, *options.values()))


for method, name in OPERATIONS.items():
    setattr(RecordedGroup, method, _operation(name))


class Recorder(TorchDispatchMode):
    """Writes the record of a rank. earlier: the records of the ranks before it."""

    current: ClassVar[Recorder]

    def __init__(self, own: Record, earlier: Sequence[Record]) -> None:
        super().__init__()
        self.own, self._earlier = own, earlier
        self._groups: Counter[tuple[int, ...]] = Counter()
        self._calls: Counter[tuple[Any, ...]] = Counter()  # by channel
        self._wanted: tuple[tuple[int, ...], str] = tuple(range(own.world_size)), ""  # of the next group
        self._batch, self._batches = 0, 0
        # Calls without a wait, with the tensors, which stay alive, and (begin, end, whether it is written to) of each.
        self.pending: dict[Call, tuple[list[Tensor], list[tuple[int, int, bool]]]] = {}

    # --- groups

    def make_group(self, store: Any, rank: int, size: int, timeout: Any) -> RecordedGroup:
        """Make a group, when torch asks its backend for one."""
        ranks, backend = self._wanted
        self._groups[ranks] += 1
        return RecordedGroup(self, rank, (ranks, self._groups[ranks]), backend)

    def new_group(
        self, real: Any, ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any
    ) -> Any:
        """Replace torch's function for new groups. All ranks must make all groups in the same order."""
        everyone = tuple(range(self.own.world_size))
        members = tuple(sorted(ranks)) if ranks is not None else everyone
        arguments = f"ranks {list(members)}" + (f", backend {backend}" if backend else "")
        call = Call("new_group", ("new_group",), everyone, arguments, _place(), backend="gloo")
        self.own.events += [(True, call), (False, call)]
        self._wanted = members, str(backend or "")
        return real(list(members), timeout, BACKEND, *args, **options)

    def batch(self, real: Any, operations: Any) -> Any:
        """Replace torch's `batch_isend_irecv`."""
        self._batches += 1
        self._batch = self._batches
        try:
            return real(operations)
        finally:
            self._batch = 0

    # --- calls

    def call(self, name: str, group: RecordedGroup, arguments: tuple[Any, ...]) -> RecordedWork:
        """Record a call of a method of `group`, and give the tensors values."""
        ranks, rank = group.key[0], group.rank()
        first = _tensors(arguments[0])
        has_two = len(arguments) > 1 and isinstance(arguments[1], list | Tensor)
        written, read = first, _tensors(arguments[1]) if has_two else first
        channel: tuple[Any, ...] = (group.key,)
        members, compared, options = ranks, [*read, *(written if has_two else [])], list[str]()
        sent, received = tuple[int, ...](), tuple[int, ...]()
        for option in arguments:
            if hasattr(option, "reduceOp"):
                options.append(option.reduceOp.__getstate__()[0].name)
            if hasattr(option, "rootRank"):
                options.append(f"root {ranks[option.rootRank]}")
                if name == "broadcast":
                    written, read = ([], first) if option.rootRank == rank else (first, [])
        if name in ("send", "recv"):
            pair = (rank, arguments[1]) if name == "send" else (arguments[1], rank)
            members = tuple(ranks[member] for member in pair)
            channel = group.key, members, arguments[2]
            written, read = ([], first) if name == "send" else (first, [])
        elif name in ("gather", "scatter"):  # only the root has the other list
            compared = read if name == "gather" else written
        elif name.startswith("all_to_all"):
            compared = []
            options.append(str(read[0].dtype).removeprefix("torch."))
            received, sent = (tuple(x.numel() for x in xs) for xs in (written, read))
            if name == "all_to_all_single":
                received, sent = map(_sizes, (written[0], read[0]), arguments[2:4], [len(ranks)] * 2)
        shapes = Counter(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in compared)
        options += [shape if count == 1 else f"{count} x {shape}" for shape, count in shapes.items()]
        call = Call(name, channel, members, ", ".join(options), _place(), group.backend, self._batch, sent, received)
        touched = [(*_span(x), False) for x in read] + [(*_span(x), True) for x in written]
        self._check(touched, name)
        with torch._C._DisableTorchDispatch():
            self._fill(call, rank, read, [] if name == "send" else [x.data for x in first])
        self.own.events.append((True, call))
        self.pending[call] = [*read, *written], touched
        return RecordedWork(self, call, written)

    def _fill(self, call: Call, rank: int, read: list[Tensor], results: list[Tensor]) -> None:
        """Give the results of a call values. rank: in the group."""
        key = call.channel, self._calls[call.channel]
        self._calls[call.channel] += 1
        given = torch.cat([x.detach().reshape(-1) for x in read]) if read else torch.zeros(1)
        for x in results:  # a result is the input, a part of it, or repeats it for all ranks
            if not any(x.data_ptr() == y.data_ptr() and x.shape == y.shape for y in read) and len(given):
                x.copy_(given.repeat(-(-x.numel() // len(given)))[: x.numel()].view(x.shape))
        if call.name == "recv" or any(x.numel() > KEPT and x.dtype != torch.uint8 for x in results):
            return
        if rank == 0:
            self.own.values[key] = [x.clone() for x in results]
        elif call.members[0] < len(self._earlier):
            known = self._earlier[call.members[0]].values.get(key, [])
            for x, value in zip(results, known, strict=False):
                if (x.shape, x.dtype) == (value.shape, value.dtype):
                    x.copy_(value)

    def wait(self, call: Call) -> None:
        """Record the first wait for a call."""
        if self.pending.pop(call, None) is not None:
            self.own.events.append((False, call))

    # --- memory on its way

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.pending and "c10d" not in func.namespace:
            schema = func._schema
            is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
            name = schema.name.split("::")[1]
            if not is_view and not name.endswith("_like") and not name.startswith("new_"):
                values = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
                values |= kwargs or {}
                touched = [
                    (*_span(x), argument.alias_info is not None and argument.alias_info.is_write)
                    for argument in schema.arguments
                    for x in _tensors(values.get(argument.name))
                ]
                self._check(touched, name)
        return func(*args, **(kwargs or {}))

    def _check(self, touched: list[tuple[int, int, bool]], name: str) -> None:
        """Report an operator or a call that touches memory on its way. touched: begin, end, whether it writes."""
        for begin, end, writes in touched:
            for call, (_, spans) in self.pending.items():
                for first, last, is_received in spans:
                    if begin < last and first < end and (writes or is_received):
                        does = "overwrites" if writes else "reads"
                        moves = "received" if is_received else "sent"
                        story = [
                            f"rank {self.own.rank} {does} memory that is still {moves}: {name} at {at(_place())}",
                            f"it did not wait for {call}",
                        ]
                        if story not in self.own.faults:
                            self.own.faults.append(story)


def _sizes(x: Tensor, split: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the elements of x that each rank sends or gets. split: rows by rank; empty for equal parts."""
    return tuple(rows * x[0].numel() for rows in split) or (x.numel() // ranks,) * ranks


@contextlib.contextmanager
def record(rank: int, world_size: int, records: list[Record]) -> Iterator[Record]:
    """Record what the block does as rank `rank`, and append it to `records`, which has the records of the ranks before.

    The block finds RANK, LOCAL_RANK and WORLD_SIZE in the environment, and torch.distributed initialised. It may call
    `init_process_group`, which does nothing, and `destroy_process_group`.
    """
    recorder = Recorder.current = Recorder(Record(rank, world_size), records)
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, lambda *a: Recorder.current.make_group(*a), devices=["cpu", "cuda"])
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    dist.init_process_group(BACKEND, rank=rank, world_size=world_size, store=dist.HashStore())  # type: ignore[attr-defined]
    patches: list[Any] = [mock.patch.dict(os.environ, {name: str(number) for name, number in numbers.items()})]
    for name, replacement in (("_new_group_with_tag", recorder.new_group), ("batch_isend_irecv", recorder.batch)):
        bound = functools.partial(replacement, getattr(distributed_c10d, name))
        patches.append(mock.patch.object(distributed_c10d, name, bound))
    patches += [
        mock.patch.object(dist, "batch_isend_irecv", bound),
        mock.patch.object(dist, "init_process_group", lambda *args, **options: None),
    ]
    try:
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            stack.enter_context(recorder)
            yield recorder.own
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    recorder.own.faults += [[f"rank {rank} never waits for {call}"] for call in recorder.pending]
    records.append(recorder.own)
