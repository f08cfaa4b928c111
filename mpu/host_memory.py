"""What backward needs, in the host's memory until then: for activations that do not fit beside the model.

    main stream   forward of 0   forward of 1   forward of 2   …   backward of 2   backward of 1
    side stream     0 leaves       1 leaves       2 leaves           1 comes         0 comes

0, 1, 2 are parts of the model: layers that are recomputed together, or single layers. Copies run on a stream of their
own, from and to pinned memory, which is taken once and used again in each step. Events order them, and the host waits
for nothing. What has left is freed on the device when the part after the next one begins. The main stream, whose next
tensors may be in the same place, then waits for the copy, which is mostly done by that time.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mpu.mappings import all_gather_first_dim

LARGE = 1 << 20  # bytes: what a layer keeps in smaller tensors stays on the device


class HostMemory:
    """Room for what backward needs of a model on `device`. On a CPU, where that saves nothing, it is copied as well.

    A model calls `forward_begins` and `forward_ends` around each forward pass, and in it `part` or `of_layer` for each
    part. Backward may come after several forward passes.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.taken = 0  # bytes of the host's memory
        self._free: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._leaving: list[Part] = []
        self._newest: Callable[[], Part | None] = lambda: None

    def forward_begins(self) -> None:
        """The next part is the first of its pass."""
        self._newest = lambda: None

    def forward_ends(self) -> None:
        """Free on the device what is still leaving it."""
        self._free_left(but=0)

    def part(self) -> Part:
        """The next part of this pass."""
        self._free_left(but=1)
        part = Part(self, self._newest)
        self._leaving.append(part)
        self._newest = weakref.ref(part)
        return part

    @contextlib.contextmanager
    def of_layer(self, layer: nn.Module, *, at_least: int = LARGE) -> Iterator[None]:
        """Inside, what autograd keeps is a part: tensors of `at_least` bytes but for the parameters of `layer`."""
        part = self.part()
        parameters = {_address(parameter) for parameter in layer.parameters()}

        def pack(x: Tensor) -> Tensor | Parked:
            large = x.untyped_storage().nbytes() >= at_least
            return part.park(x) if large and x.device.type == self.device.type and _address(x) not in parameters else x

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _free_left(self, *, but: int) -> None:
        while len(self._leaving) > but:
            self._leaving.pop(0).free()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] on the host; not initialised."""
        if free := self._free[numel, dtype]:
            return free.pop()
        self.taken += numel * dtype.itemsize
        return torch.empty(numel, dtype=dtype, pin_memory=self._side is not None)

    def give_back(self, host: Tensor) -> None:
        """The inverse of `take`. Copies of it may still run: what its next user copies comes after them."""
        self._free[host.numel(), host.dtype].append(host)

    @contextlib.contextmanager
    def copies(self) -> Iterator[torch.cuda.Event | None]:
        """Inside, copies go to the side stream, after what the main stream was given so far. Gives an event that comes
        after them."""
        if self._side is None:
            yield None
            return
        done = torch.cuda.Event()
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            yield done
            done.record(self._side)

    def wait(self, done: torch.cuda.Event | None) -> None:
        """Let what the main stream is given next come after `done`."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)


class Part:
    """What leaves the device together and comes back together. before: the part that backward needs next."""

    def __init__(self, memory: HostMemory, before: Callable[[], Part | None]) -> None:
        self._memory, self._before = memory, before
        self._leaving: dict[int, _Leaving] = {}  # by address
        self._parked: list[weakref.ref[_Storage]] = []

    def park(self, x: Tensor) -> Parked:
        """Copy the memory of `x` to the host, unless a tensor that shares it is there already."""
        leaving = self._leaving.get(_address(x))
        storage = leaving.storage() if leaving is not None else None
        if storage is None:
            numel = x.untyped_storage().nbytes() // x.element_size()
            whole = x.detach().as_strided((numel,), (1,), 0)
            storage = _Storage(self._memory, self, self._memory.take(numel, x.dtype))
            with self._memory.copies() as done:
                storage.host.copy_(whole, non_blocking=True)
            self._parked.append(weakref.ref(storage))
            self._leaving[_address(x)] = _Leaving(whole, done, self._parked[-1])
        return Parked(storage, x.dtype, x.shape, x.stride(), int(x.storage_offset()))

    def free(self) -> None:
        """Free on the device what was copied."""
        for leaving in self._leaving.values():
            self._memory.wait(leaving.done)
        self._leaving.clear()

    def fetch(self, *, ahead: bool = False) -> None:
        """Start to bring back what is still needed of this part, and then what is of the part before it."""
        for parked in reversed(self._parked):
            if (storage := parked()) is not None:
                storage.fetch()
        if not ahead and (before := self._before()) is not None:
            before.fetch(ahead=True)


class _Leaving(NamedTuple):
    """Memory of the device that is copied until `done`, and where to."""

    whole: Tensor
    done: torch.cuda.Event | None
    storage: weakref.ref[_Storage]


class _Storage:
    """The memory of a tensor. On the host from `Part.park` on; from `fetch` on also on the device."""

    def __init__(self, memory: HostMemory, part: Part, host: Tensor) -> None:
        self._memory, self.part, self.host = memory, part, host
        self._back: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None

    def fetch(self) -> None:
        """Start to copy it to the device."""
        if self._back is None:
            self._back = torch.empty(self.host.numel(), dtype=self.host.dtype, device=self._memory.device)
            with self._memory.copies() as self._arrival:
                self._back.copy_(self.host, non_blocking=True)

    def get(self) -> Tensor:
        """It, on the device."""
        self.part.fetch()
        assert self._back is not None
        self._arrive()
        return self._back

    def _arrive(self) -> None:
        self._memory.wait(self._arrival)
        self._arrival = None

    def __del__(self) -> None:
        self._arrive()  # the device's memory is not free before
        self._memory.give_back(self.host)


class Parked(NamedTuple):
    """A tensor as it lay in the memory that was parked."""

    storage: _Storage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def get(self) -> Tensor:
        """It, on the device."""
        return self.storage.get().view(self.dtype).as_strided(self.shape, self.stride, self.offset)


def unpack(kept: Tensor | Parked) -> Tensor:
    """What autograd is given for what it kept."""
    return kept.get() if isinstance(kept, Parked) else kept


def _address(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def keeping_arguments(group: ProcessGroup | None, host_memory: HostMemory | None) -> AbstractContextManager[object]:
    """Inside, autograd keeps of each tensor this rank's part alone, and that, or the tensor, in the host's memory.

    group: over which tensors are split, which must be the same on all its ranks; None: they are kept whole. Backward
    gathers them in the same order on all ranks. host_memory: None where they stay on the device.
    Parameters, which exist in any case, are left alone.
    """
    group = group if group is not None and group.size() > 1 else None
    if group is None and host_memory is None:
        return contextlib.nullcontext()
    part = host_memory.part() if host_memory is not None else None

    def pack(x: Tensor) -> Tensor | tuple[torch.Size, Tensor | Parked]:
        if isinstance(x, nn.Parameter):
            return x
        kept = x if group is None else own_part(x, group)
        return x.shape, kept if part is None else part.park(kept)

    def unpack_and_gather(kept: Tensor | tuple[torch.Size, Tensor | Parked]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        shape, own = kept[0], unpack(kept[1])
        return own if group is None else gather_parts(own, shape, group)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack_and_gather)


def own_part(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's part of the elements of `x` in their order, copied: [⌈numel/p⌉], the last ones padded. Any shape and
    dtype."""
    length = -(-x.numel() // group.size())
    part = x.new_zeros(length)
    own = x.detach().reshape(-1)[group.rank() * length : (group.rank() + 1) * length]
    part[: own.numel()] = own
    return part


def gather_parts(part: Tensor, shape: torch.Size, group: ProcessGroup) -> Tensor:
    """The inverse of `own_part`: a contiguous tensor of `shape`, on every rank."""
    return all_gather_first_dim(part, group)[0][: shape.numel()].view(shape)
