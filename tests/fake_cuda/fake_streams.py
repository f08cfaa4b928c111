"""Streams and events of the fake device, and who touches or frees memory that another stream may still be using.

Each stream counts its work, and knows how much of the work of the others is done before its own next piece, since it
has waited for it. Two pieces of work with the same memory, of which one writes, are in order if the later one's stream
knows of the earlier one.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

Moment = tuple[int, int]  # the number of a stream, and how much work it had then


class FakeStream:
    """torch.cuda.Stream."""

    made: ClassVar[int] = 0
    current: ClassVar[FakeStream]

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        FakeStream.made += 1
        self.number = FakeStream.made
        self.known: defaultdict[int, int] = defaultdict(int)

    def wait_event(self, event: FakeEvent) -> None:
        """What follows here comes after it."""
        for number, work in event.known.items():
            self.known[number] = max(self.known[number], work)

    def wait_stream(self, stream: FakeStream) -> None:
        """What follows here comes after all that `stream` has been given."""
        event = FakeEvent()
        event.record(stream)
        self.wait_event(event)


class FakeEvent:
    """torch.cuda.Event. The host finds everything before it done."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.known: dict[int, int] = {}

    def record(self, stream: FakeStream | None = None) -> None:
        """After what the stream has been given."""
        self.known = dict((stream or FakeStream.current).known)

    def wait(self, stream: FakeStream | None = None) -> None:
        """`FakeStream.wait_event`."""
        (stream or FakeStream.current).wait_event(self)

    def query(self) -> bool:
        """Done."""
        return True

    def synchronize(self) -> None:
        """Done."""

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds."""
        return 1.0


@contextlib.contextmanager
def running_on(stream: FakeStream) -> Iterator[None]:
    """torch.cuda.stream."""
    before, FakeStream.current = FakeStream.current, stream
    try:
        yield
    finally:
        FakeStream.current = before


@dataclass
class _Use:
    """Who took a piece of memory, wrote it last, and has read it since."""

    owner: FakeStream
    written: Moment
    read: dict[int, int] = field(default_factory=dict)


class MemoryOrder:
    """Sees each piece of work and reports memory that is used or freed too early to `fault`."""

    def __init__(self, fault: Callable[[str], None]) -> None:
        self._fault = fault
        self._uses: dict[int, _Use] = {}

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Memory that nobody knew is the current stream's, which may have used it before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._uses:
                stream = FakeStream.current
                self._uses[storage._cdata] = _Use(stream, (stream.number, stream.known[stream.number]))
                weakref.finalize(storage, self._free, storage._cdata, tensor.device.type == "cuda")

    def work(self, read: Sequence[Tensor], written: Sequence[Tensor], place: str) -> None:
        """A piece of work of the current stream."""
        self.take((*read, *written))
        stream = FakeStream.current
        stream.known[stream.number] += 1
        now = stream.known[stream.number]
        for tensor in read:
            use = self._uses[tensor.untyped_storage()._cdata]
            self._require(stream, [use.written], f"{place} reads {tuple(tensor.shape)} before it is there")
            use.read[stream.number] = now
        for tensor in written:
            use = self._uses[tensor.untyped_storage()._cdata]
            self._require(
                stream,
                [use.written, *use.read.items()],
                f"{place} writes {tuple(tensor.shape)} while another stream uses it",
            )
            use.written, use.read = (stream.number, now), {}

    def _require(self, stream: FakeStream, moments: Sequence[Moment], fault: str) -> None:
        if any(number != stream.number and stream.known[number] < work for number, work in moments):
            self._fault(fault)

    def _free(self, key: int, on_device: bool) -> None:
        use = self._uses.pop(key)
        if on_device:  # the owner gives it to its own next piece of work
            self._require(use.owner, [use.written, *use.read.items()], "memory is freed while another stream uses it")
