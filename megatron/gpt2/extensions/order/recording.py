"""Record the communication of one rank of a program, in one process and without the other ranks.

Inside `record`, torch.distributed has a process group of the whole world that sends nothing. The process group records
each collective, send, receive and wait. A dispatch mode watches the memory of messages that are being sent or received:
an operator must not read what is still received, nor write to what is still sent or received.

The program needs values to continue. A received tensor is filled with zeros. The result of a small collective is the
data of the first rank of its group, and the result of a large collective is the rank's own data. Small results are
wrong but equal on all ranks, so decisions that depend on them are equal too. Therefore the ranks must be recorded in
ascending order.

The recorder does not see communication in other threads, memory that NumPy reads, the end of a call that is only
polled, and the sizes of the parts of an uneven all-to-all. `Work.get_future()`, which torch's DDP calls, counts as a
wait.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.gpt2.extensions.plan import process_group
from megatron.gpt2.extensions.plan.process_group import tensors_in

BACKEND = "recorded"  # the name of the backend in torch.distributed
# Results with at most this number of elements are the same on all ranks. Results of dtype uint8 are always the same,
# because torch sends Python objects as bytes.
KEPT = 1 << 14
DEPTH = 3  # number of lines of the program, from the innermost line, that describe a call
# (first address, address after the last byte, whether the memory is written)
MemoryRange = tuple[int, int, bool]


@dataclass(eq=False)
class RecordedCall:
    """A call of a collective, a send or a receive on one rank.

    channel: calls of one channel meet in their order: the first of each member, the second, and so on.
    members: the global ranks that must call.
    arguments: shapes, dtypes and options, which must be equal on all members.
    place: lines of the program, from the innermost.
    backend: the backend that the program asked for; "" for that of the world.
    batch: the number of its `batch_isend_irecv`.
    """

    name: str
    channel: tuple[Any, ...]
    members: Sequence[int]
    arguments: str
    place: Sequence[str]
    backend: str = ""
    batch: int = 0

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.members)) if len(self.members) < 9 else f"{self.members[0]}, …"
        return f"{self.name}({self.arguments}) of ranks {ranks} at {at(self.place)}"


@dataclass
class RankRecord:
    """The recorded communication of one rank.

    events: (True, call) for a call and (False, call) for the first wait for it, in order.
    faults: uses of memory that an unfinished call reads or writes, and calls that the program never waits for.
    values: results of collectives for later ranks, by channel and number.
    error: the error that ended the rank.
    """

    rank: int
    world_size: int
    events: list[tuple[bool, RecordedCall]] = field(default_factory=list)
    faults: list[list[str]] = field(default_factory=list)
    values: dict[Any, list[Tensor]] = field(default_factory=dict)
    error: Exception | None = None


def at(place: Sequence[str]) -> str:
    """Describe a location in the program: the innermost line, and its callers in brackets."""
    inner, *callers = place or ("unknown",)
    return inner + (f" (called from {', '.join(callers)})" if callers else "")


def _place() -> list[str]:
    found, frame = list[str](), sys._getframe(1)
    while frame is not None and len(found) < DEPTH:
        if name := _name_in_program(frame.f_code.co_filename):
            found.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return found


@functools.cache
def _name_in_program(file: str) -> str:
    """Return a short name of a source file, or "" if the file is part of Python, torch or this recorder."""
    library, of_torch = (os.path.dirname(module.__file__ or "") + os.sep for module in (os, torch))
    is_library = file.startswith(library) and "site-packages" not in file
    if is_library or file.startswith((of_torch, "<")) or file in (__file__, process_group.__file__):
        return ""
    return min(file, os.path.relpath(file), key=len)


def _spans(tensors: Sequence[Tensor], writes: bool) -> list[MemoryRange]:
    """Return the memory ranges of the tensors. Empty tensors have none."""
    found = []
    for x in filter(Tensor.numel, tensors):
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        found.append((x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size(), writes))
    return found


@functools.cache
def _accesses(operator: Any) -> list[tuple[int, str, bool]]:
    """Return position and name of each argument of an operator, and whether it is written to. The list is empty for an
    operator that does not touch memory."""
    schema = operator._schema
    name = schema.name.split("::")[1]
    is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
    if is_view or name.endswith("_like") or name.startswith(("new_", "_unsafe_view")) or "c10d" in operator.namespace:
        return []
    return [
        (number, argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for number, argument in enumerate(schema.arguments)
    ]


class RecordedWork(dist.Work):
    """The handle of a recorded call."""

    def __init__(self, recorder: CallRecorder, call: RecordedCall, written: list[Tensor]) -> None:
        super().__init__()
        self._recorder, self._call, self._written = recorder, call, written

    def wait(self, timeout: Any = None) -> bool:
        if self._recorder.pending.pop(self._call, None) is not None:
            self._recorder.own.events.append((False, self._call))
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        self.wait()
        future = torch.futures.Future[list[Tensor]]()
        future.set_result(self._written)
        return future


class RecordedGroup(process_group.FakeProcessGroup):
    """A process group that records its calls.

    number: the group's number among the groups of the same ranks.
    """

    def __init__(self, recorder: CallRecorder, rank: int, ranks: Sequence[int], number: int, backend: str) -> None:
        super().__init__(rank, ranks, recorder.call)
        self.number, self.backend = number, backend

    group_name = property(lambda self: distributed_c10d._world.pg_names[self])


class CallRecorder(TorchDispatchMode):
    """Records the communication and the memory accesses of a rank.

    earlier: the records of all lower ranks.
    """

    current: ClassVar[CallRecorder]

    def __init__(self, own: RankRecord, earlier: Sequence[RankRecord]) -> None:
        super().__init__()
        self.own, self._earlier, self._batch = own, earlier, 0
        # the number of groups for each set of ranks, of calls for each channel, and of batches
        self._counts: Counter[Any] = Counter()
        # the ranks and the backend of the group that the program is making
        self._wanted: tuple[Sequence[int], str] = range(own.world_size), ""
        # For each call without a wait: its tensors, whose memory must not be reused, and the ranges of their memory.
        self.pending: dict[RecordedCall, tuple[list[Tensor], list[MemoryRange]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch's compiler and slow down each operator.

    def make_group(self, store: Any, rank: int, size: int, timeout: Any) -> RecordedGroup:
        """Make the process group that torch requests from this backend."""
        ranks, backend = self._wanted
        return RecordedGroup(self, ranks[rank], ranks, self._count(tuple(ranks)), backend)

    def new_group(
        self, real: Any, ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any
    ) -> Any:
        """Replace torch's function that makes process groups. All ranks must make all groups in the same order."""
        everyone = range(self.own.world_size)
        members = sorted(everyone if ranks is None else ranks)
        arguments = f"ranks {members}" + (f", backend {backend}" if backend else "")
        call = RecordedCall("new_group", ("new_group",), everyone, arguments, _place(), backend="gloo")
        self.own.events += [(True, call), (False, call)]
        self._wanted = members, str(backend or "")
        return real(members, timeout, BACKEND, *args, **options)

    def batch(self, real: Any, operations: Any) -> Any:
        """Replace torch's `batch_isend_irecv`."""
        self._batch = self._count("batch")
        try:
            return real(operations)
        finally:
            self._batch = 0

    def _count(self, key: Any) -> int:
        self._counts[key] += 1
        return self._counts[key]

    def call(self, name: str, group: RecordedGroup, arguments: tuple[Any, ...]) -> RecordedWork:
        """Record a call of a method of `group`, and write values into the tensors of its result."""
        ranks, rank, first = group.ranks, group.rank(), tensors_in(arguments[0])
        has_two = len(arguments) > 1 and isinstance(arguments[1], list | Tensor)
        written, read = first, tensors_in(arguments[1]) if has_two else first
        compared, options = [*read, *(written if has_two else [])], list[str]()
        members, key = ranks, tuple[Any, ...]()
        for option in arguments:
            if hasattr(option, "reduceOp"):
                options.append(option.reduceOp.__getstate__()[0].name)
            if hasattr(option, "rootRank"):
                options.append(f"root {ranks[option.rootRank]}")
                if name == "broadcast":
                    written, read = ([], first) if option.rootRank == rank else (first, [])
        if name in ("send", "recv"):
            pair = (rank, arguments[1]) if name == "send" else (arguments[1], rank)
            members, key = tuple(ranks[member] for member in pair), ("message", arguments[2])
            written, read = ([], first) if name == "send" else (first, [])
        elif name in ("gather", "scatter"):  # Ranks other than the root give only one list of tensors.
            compared = read if name == "gather" else written
        elif name == "all_to_all" and any(arguments[2:4]):  # The parts of the tensors have different sizes.
            compared, options = [], [f"{read[0].dtype}"]
        shapes = Counter(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in compared)
        options += [shape if count == 1 else f"{count} x {shape}" for shape, count in shapes.items()]
        channel = ranks, group.number, members, *key
        call = RecordedCall(name, channel, members, ", ".join(options), _place(), group.backend, self._batch)
        spans = _spans(read, False) + _spans(written, True)
        self._check(spans, name)
        with torch._C._DisableTorchDispatch():
            self._fill(call, rank, read, [] if name == "send" else [x.data for x in first])
        self.own.events.append((True, call))
        self.pending[call] = [*read, *written], spans
        return RecordedWork(self, call, written)

    def _fill(self, call: RecordedCall, rank: int, read: list[Tensor], results: list[Tensor]) -> None:
        """Write values into the results of a call.

        rank: the rank's number in the group.
        """
        key = call.channel, self._count(call.channel)
        given = torch.cat([x.detach().reshape(-1) for x in read]) if read else torch.zeros(1)
        # Fill a result with the input of the call, a part of the input, or the input once for each rank.
        for x in results:
            if not any(x.data_ptr() == y.data_ptr() and x.shape == y.shape for y in read) and len(given):
                x.copy_(given.repeat(-(-x.numel() // len(given)))[: x.numel()].view(x.shape))
        if call.name == "recv" or any(x.numel() > KEPT and x.dtype != torch.uint8 for x in results):
            return
        if rank == 0:
            self.own.values[key] = [x.clone() for x in results]
        elif call.members[0] < len(self._earlier):
            for x, value in zip(results, self._earlier[call.members[0]].values.get(key, []), strict=False):
                if (x.shape, x.dtype) == (value.shape, value.dtype):
                    x.copy_(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.pending:
            for number, name, writes in _accesses(func):
                value = args[number] if number < len(args) else kwargs.get(name)
                self._check(_spans(tensors_in(value), writes), func.__name__)
        return func(*args, **kwargs)

    def _check(self, spans: Sequence[MemoryRange], name: str) -> None:
        """Report an operator or a call that touches memory that is being sent or received."""
        for begin, end, writes in spans:
            for call, (_, on_way) in self.pending.items():
                for first, last, is_received in on_way:
                    if begin < last and first < end and (writes or is_received):
                        does, moves = "overwrites" if writes else "reads", "received" if is_received else "sent"
                        touch = f"rank {self.own.rank} {does} memory that is still {moves}: {name} at {at(_place())}"
                        story = [touch, f"it did not wait for {call}"]
                        if story not in self.own.faults:
                            self.own.faults.append(story)


@contextlib.contextmanager
def record(rank: int, world_size: int, records: list[RankRecord]) -> Iterator[RankRecord]:
    """Record what the block does as rank `rank`, and append it to `records`, which has the records of the ranks before.

    In the block, the environment has RANK, LOCAL_RANK and WORLD_SIZE, and torch.distributed is initialised. The program
    may call `init_process_group`, which does nothing, and `destroy_process_group`.
    """
    recorder = CallRecorder.current = CallRecorder(RankRecord(rank, world_size), records)
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, lambda *a: CallRecorder.current.make_group(*a), devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, rank=rank, world_size=world_size, store=dist.HashStore())  # type: ignore[attr-defined]
    try:
        with contextlib.ExitStack() as stack:
            numbers = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world_size}"}
            stack.enter_context(mock.patch.dict(os.environ, numbers))
            for owner, name, replacement in (
                (distributed_c10d, "_new_group_with_tag", recorder.new_group),
                (dist, "batch_isend_irecv", recorder.batch),
                (dist, "init_process_group", lambda *args, **options: None),
            ):
                replacement = functools.partial(replacement, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, replacement))
            stack.enter_context(recorder)
            yield recorder.own
        recorder.own.faults += [[f"rank {rank} never waits for {call}"] for call in recorder.pending]
    except Exception as error:  # The error may be the effect of a fault, because later values are wrong.
        recorder.own.error = error
        raise
    finally:
        records.append(recorder.own)
        if dist.is_initialized():
            dist.destroy_process_group()
