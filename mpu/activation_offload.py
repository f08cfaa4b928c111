"""CPU offload of activations: tensors that autograd saves for backward are kept in host memory until backward needs
them.

    main stream   forward of 0   forward of 1    forward of 2    …   backward of 2   backward of 1
    copy stream   0 to host      1 to host       2 to host           1 to device     0 to device

0, 1, 2 are offload groups: layers that are recomputed together, or single layers. Copies run on a separate stream, from
and to pinned buffers, which are allocated once and reused in each step. CUDA events order the copies; the host never
waits. The device memory of group i is freed when group i + 2 begins. Later tensors may reuse the memory, so the main
stream then waits for the copy of group i, which has usually ended.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mpu.mappings import all_gather_first_dim

MIN_BYTES = 1 << 20  # Smaller tensors of a layer stay on the device.

Reload = Callable[[], Tensor]  # A function that returns the tensor on the device.


class ActivationOffload:
    """Host buffers and the copy stream for the activations of a model on `device`. On a CPU, for tests, the class makes
    the same copies, which save no memory.

    A model calls `forward_begins` and `forward_ends` around each forward pass, and in between `next_group` or
    `offload_layer` for each group. Backward passes may run after several forward passes.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.allocated_bytes = 0  # bytes of host memory
        self._free_buffers: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._device_module: Any = torch.get_device_module(self.device)  # torch.cpu has streams that do nothing.
        self._copy_stream = self._device_module.Stream(self.device)
        self._offloading: list[OffloadGroup] = []
        self._last_group: OffloadGroup | None = None

    def forward_begins(self) -> None:
        """Start a forward pass, whose first group has no previous group."""
        self._last_group = None

    def forward_ends(self) -> None:
        """Free the device memory of all groups that are still being copied."""
        self._free_offloaded(keep=0)

    def next_group(self) -> OffloadGroup:
        """Return a new group for the next tensors that this forward pass offloads."""
        self._free_offloaded(keep=1)
        self._last_group = OffloadGroup(self, self._last_group)
        self._offloading.append(self._last_group)
        return self._last_group

    @contextlib.contextmanager
    def offload_layer(self, layer: nn.Module) -> Iterator[None]:
        """Return a context that offloads the tensors of at least `MIN_BYTES` that autograd saves inside, except the
        parameters of `layer`, as one group."""
        group = self.next_group()
        parameters = {_storage_id(parameter) for parameter in layer.parameters()}

        def pack(x: Tensor) -> Tensor | Reload:
            is_small = x.untyped_storage().nbytes() < MIN_BYTES
            is_elsewhere = x.device.type != self.device.type
            return x if is_small or is_elsewhere or _storage_id(x) in parameters else group.offload(x)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _free_offloaded(self, *, keep: int) -> None:
        while len(self._offloading) > keep:
            self._offloading.pop(0).free()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a host buffer [numel] whose values are not initialised."""
        if free := self._free_buffers[numel, dtype]:
            return free.pop()
        self.allocated_bytes += numel * dtype.itemsize
        return torch.empty(numel, dtype=dtype, pin_memory=self.device.type == "cuda")

    def release(self, host: Tensor) -> None:
        """Make a buffer of `allocate` available again. A copy from the buffer may still run, because the copy stream
        runs later copies into the buffer after the running copy."""
        self._free_buffers[host.numel(), host.dtype].append(host)

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Start a copy on the copy stream, after all work that is queued on the main stream. Return an event at the end
        of the copy."""
        copied = self._device_module.Event()
        self._copy_stream.wait_stream(self._device_module.current_stream(self.device))
        with self._device_module.stream(self._copy_stream):
            target.copy_(source, non_blocking=True)
            copied.record(self._copy_stream)
        return copied

    def wait(self, copied: Any) -> None:
        """Let the main stream wait for the event that `copy` returned."""
        self._device_module.current_stream(self.device).wait_event(copied)


class OffloadGroup:
    """Tensors that are copied to the host, and back to the device, at the same time.

    previous: the group that backward needs after this group.
    """

    def __init__(self, memory: ActivationOffload, previous: OffloadGroup | None) -> None:
        self._memory, self._previous = memory, previous
        self._storages: list[weakref.ref[_OffloadedStorage]] = []

    def _live(self) -> list[_OffloadedStorage]:
        """Return the storages that autograd has not released yet, in the order of forward."""
        return [storage for reference in self._storages if (storage := reference()) is not None]

    def offload(self, x: Tensor) -> Reload:
        """Copy the storage of `x` to the host, if this group has not copied it yet. Return a function that returns `x`
        on the device."""
        storage = next((known for known in self._live() if known.id == _storage_id(x)), None)
        if storage is None:
            numel = x.untyped_storage().nbytes() // x.element_size()
            storage = _OffloadedStorage(self._memory, self, x.detach().as_strided((numel,), (1,), 0))
            self._storages.append(weakref.ref(storage))
        dtype, shape, stride, offset = x.dtype, x.shape, x.stride(), int(x.storage_offset())
        return lambda: storage.get().view(dtype).as_strided(shape, stride, offset)

    def free(self) -> None:
        """Free the device memory of the tensors that were copied to the host."""
        for storage in self._live():
            storage.free()

    def fetch(self, *, ahead: bool = False) -> None:
        """Start to copy the live tensors of this group and of the previous group back to the device."""
        for storage in reversed(self._live()):
            storage.fetch()
        if not ahead and self._previous is not None:
            self._previous.fetch(ahead=True)


class _OffloadedStorage:
    """A tensor's storage [elements]: always on the host, and on the device before `free` and after `fetch`."""

    def __init__(self, memory: ActivationOffload, group: OffloadGroup, whole: Tensor) -> None:
        self._memory, self._group = memory, group
        self.id = _storage_id(whole)  # The id is unique until `free` releases the memory.
        self._host = memory.allocate(whole.numel(), whole.dtype)
        self._on_device: Tensor | None = whole
        self._copied = memory.copy(self._host, whole)  # the event at the end of the last copy

    def free(self) -> None:
        """Wait for the copy to the host, then free the device memory."""
        self._memory.wait(self._copied)
        self._on_device = None

    def fetch(self) -> None:
        """Start to copy the storage to the device."""
        if self._on_device is None:
            self._on_device = torch.empty_like(self._host, device=self._memory.device)
            self._copied = self._memory.copy(self._on_device, self._host)

    def get(self) -> Tensor:
        """Return the storage on the device."""
        self._group.fetch()
        assert self._on_device is not None
        self._memory.wait(self._copied)
        return self._on_device

    def __del__(self) -> None:
        self._memory.wait(self._copied)  # The device memory must not be reused during the copy.
        self._memory.release(self._host)


def unpack(saved: Tensor | Reload) -> Tensor:
    """Return the tensor from the result of a `pack` hook of `torch.autograd.graph.saved_tensors_hooks`."""
    return saved if isinstance(saved, Tensor) else saved()


def _storage_id(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def shard_and_offload_saved_tensors(
    group: ProcessGroup | None, activation_offload: ActivationOffload | None
) -> AbstractContextManager[object]:
    """Return a context of `torch.autograd.graph.saved_tensors_hooks`, in which autograd saves only this rank's shard
    of each tensor, or a copy in host memory, or both. Parameters are saved as they are, because they exist anyway.
    Empty tensors are also saved as they are: torch 2.11 saves an empty tensor on the CPU, which NCCL cannot gather.

    group: the ranks that share each saved tensor, which must be equal on all ranks of the group. Backward gathers the
        shards, in the same order on all ranks. None saves whole tensors.
    activation_offload: None keeps the tensors on the device.
    """
    group = group if group is not None and group.size() > 1 else None
    if group is None and activation_offload is None:
        return contextlib.nullcontext()
    offload_group = activation_offload.next_group() if activation_offload is not None else None

    def pack(x: Tensor) -> Tensor | Reload:
        if isinstance(x, nn.Parameter) or not x.numel():
            return x
        part = x if group is None else flat_shard(x, group)
        saved = part if offload_group is None else offload_group.offload(part)
        shape = x.shape
        return lambda: unpack(saved) if group is None else gather_flat_shards(unpack(saved), shape, group)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def flat_shard(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's share of the elements of `x` in order, as a new tensor [⌈numel/ranks⌉]; the last share is
    padded. Any shape and dtype."""
    length = -(-x.numel() // group.size())
    shard = x.new_zeros(length)
    elements = x.detach().reshape(-1)[group.rank() * length : (group.rank() + 1) * length]
    shard[: elements.numel()] = elements
    return shard


def gather_flat_shards(shard: Tensor, shape: torch.Size, group: ProcessGroup) -> Tensor:
    """The inverse of `flat_shard`: a contiguous tensor of `shape` on every rank."""
    return all_gather_first_dim(shard, group)[0][: shape.numel()].view(shape)
