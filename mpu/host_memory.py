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

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mpu.mappings import all_gather_first_dim

LARGE = 1 << 20  # bytes: what a layer keeps in smaller tensors stays on the device

Parked = Callable[[], Tensor]  # gives the tensor, on the device


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
        self._newest: Part | None = None

    def forward_begins(self) -> None:
        """The next part is the first of its pass."""
        self._newest = None

    def forward_ends(self) -> None:
        """Free on the device what is still leaving it."""
        self._free_left(but=0)

    def part(self) -> Part:
        """The next part of this pass."""
        self._free_left(but=1)
        self._newest = Part(self, self._newest)
        self._leaving.append(self._newest)
        return self._newest

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

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Begin to copy on the side stream, after what the main stream was given so far. Returns an event after it."""
        if self._side is None:
            target.copy_(source)
            return None
        done = torch.cuda.Event()
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            done.record(self._side)
        return done

    def wait(self, done: torch.cuda.Event | None) -> None:
        """Let what the main stream is given next come after `done`."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)


class Part:
    """The tensors that leave the device together and come back together. before: the part that backward needs next."""

    def __init__(self, memory: HostMemory, before: Part | None) -> None:
        self._memory, self._before = memory, before
        self._leaving: dict[int, weakref.ref[_Storage]] = {}  # by address, which is not used again before `free`
        self._parked: list[weakref.ref[_Storage]] = []

    def park(self, x: Tensor) -> Parked:
        """Copy the memory of `x` to the host, unless a tensor that shares it is there already."""
        known = self._leaving.get(_address(x))
        storage = known() if known is not None else None
        if storage is None:
            numel = x.untyped_storage().nbytes() // x.element_size()
            storage = _Storage(self._memory, self, x.detach().as_strided((numel,), (1,), 0))
            self._leaving[_address(x)] = weakref.ref(storage)
            self._parked.append(weakref.ref(storage))
        dtype, shape, stride, offset = x.dtype, x.shape, x.stride(), int(x.storage_offset())
        return lambda: storage.get().view(dtype).as_strided(shape, stride, offset)

    def free(self) -> None:
        """Free on the device what was copied."""
        for parked in self._leaving.values():
            if (storage := parked()) is not None:
                storage.free()
        self._leaving.clear()

    def fetch(self, *, ahead: bool = False) -> None:
        """Start to bring back what is still needed of this part, and then what is of the part before it."""
        for parked in reversed(self._parked):
            if (storage := parked()) is not None:
                storage.fetch()
        if not ahead and self._before is not None:
            self._before.fetch(ahead=True)


class _Storage:
    """The memory of a tensor, [elements]: on the host, and on the device until `free` and from `fetch` on."""

    def __init__(self, memory: HostMemory, part: Part, whole: Tensor) -> None:
        self._memory, self._part = memory, part
        self._host = memory.take(whole.numel(), whole.dtype)
        self._on_device: Tensor | None = whole
        self._copied = memory.copy(self._host, whole)  # the last copy from or to the device

    def free(self) -> None:
        """Free it on the device, when it has been copied."""
        self._wait()
        self._on_device = None

    def fetch(self) -> None:
        """Start to copy it to the device."""
        if self._on_device is None:
            self._on_device = torch.empty_like(self._host, device=self._memory.device)
            self._copied = self._memory.copy(self._on_device, self._host)

    def get(self) -> Tensor:
        """It, on the device."""
        self._part.fetch()
        assert self._on_device is not None
        self._wait()
        return self._on_device

    def _wait(self) -> None:
        self._memory.wait(self._copied)
        self._copied = None

    def __del__(self) -> None:
        self._wait()  # the device's memory is not free before
        self._memory.give_back(self._host)


def unpack(kept: Tensor | Parked) -> Tensor:
    """The tensor that autograd is given for what it kept."""
    return kept if isinstance(kept, Tensor) else kept()


def _address(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def keeping_arguments(group: ProcessGroup | None, host_memory: HostMemory | None) -> AbstractContextManager[object]:
    """Inside, autograd keeps of each tensor only this rank's part, and that, or the tensor, in the host's memory.

    group: over which tensors are split, which must be the same on all its ranks; None: they are kept whole. Backward
    gathers them, contiguous, in the same order on all ranks. host_memory: None if they stay on the device.
    Parameters, which exist in any case, are left alone.
    """
    group = group if group is not None and group.size() > 1 else None
    if group is None and host_memory is None:
        return contextlib.nullcontext()
    part = host_memory.part() if host_memory is not None else None

    def pack(x: Tensor) -> Tensor | Parked:
        if isinstance(x, nn.Parameter):
            return x
        own = x if group is None else own_part(x, group)
        kept = own if part is None else part.park(own)
        shape = x.shape
        return lambda: unpack(kept) if group is None else gather_parts(unpack(kept), shape, group)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


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
