"""A CUDA device that is not there: CUDA tensors have shapes, dtypes and sizes, and no values; the CPU is real.

    with FakeGPU() as gpu:
        x = torch.zeros(4, device="cuda")      # costs nothing
        (x * 2).sum().item()                   # 0.0, and gpu.waits tells where the host waited for it

What a GPU would have been asked is recorded, see `FakeGPU`. torch's FakeTensorMode computes the shapes;
`fake_driver.py` is what else a process asks of CUDA.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.fake_cuda.fake_driver import guard, patched_cuda
from tests.fake_cuda.fake_streams import FakeStream, MemoryOrder

ROOT = str(Path(__file__).resolve().parent.parent.parent)
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
ALLOCATION = 512  # bytes: what CUDA's caching allocator rounds each tensor up to

# Operators that start no kernel: views, and what only makes room.
FREE = (
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "permute",
    "select",
    "slice",
    "unbind",
    "detach",
    "expand",
    "alias",
    "unsqueeze",
    "squeeze",
    "as_strided",
    "split",
    "split_with_sizes",
    "lift_fresh",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "record_stream",
    "unfold",
    "_reshape_alias",
    "is_pinned",
    "resize_",
    "set_",
)


@dataclass(frozen=True)
class Kernel:
    """An operator that a GPU would run. read, written: bytes. place: file and line in this project, or "autograd".
    shapes: of the tensors that it is given."""

    name: str
    read: int
    written: int
    place: str
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Collective:
    """A call of torch.distributed. ranks: of its group; of a "send" or a "recv_" who sends and who receives. tensors:
    shape and dtype of each. place: file and line in this project."""

    name: str
    ranks: tuple[int, ...]
    tensors: tuple[str, ...]
    place: str


@dataclass(frozen=True)
class Copy:
    """Between host and device. to: where it arrives. stream: the number of the one that it was given to."""

    to: str
    size: int
    stream: int
    place: str


@dataclass
class Memory:
    """Bytes of CUDA tensors that exist, and the most that ever did, with the place where that was."""

    now: int = 0
    peak: int = 0
    place: str = ""
    _known: dict[int, int] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once, until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = -(-storage.nbytes() // ALLOCATION) * ALLOCATION
        self._known[key] = size
        self.now += size
        weakref.finalize(storage, self._free, key)
        if self.now > self.peak:
            self.peak, self.place = self.now, where()

    def _free(self, key: int) -> None:
        self.now -= self._known.pop(key)


class FakeGPU(TorchDispatchMode):
    """Inside it the process has an H200 without arithmetic, and all that it is asked is kept:

    kernels        operators with CUDA tensors
    waits          places where the host waits for the device: a value is read, or memory that is not pinned is copied
    collectives    in their order
    copies         between host and device
    faults         a collective with a tensor that is on the CPU or is not contiguous; memory that is used or freed
                   before another stream is done with it
    memory         of the device
    sources        what torch.compile wrote, inside `fake_inductor`

    A tensor on the wrong device raises, as on a real GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.waits: list[str] = []
        self.collectives: list[Collective] = []
        self.copies: list[Copy] = []
        self.faults: list[str] = []
        self._order = MemoryOrder(self.faults.append)
        self.memory = Memory()
        self.sources: list[str] = []
        self._pinned: set[int] = set()
        self._stack = contextlib.ExitStack()

    def clear(self) -> None:
        """Forget what was recorded, but for the memory and the sources."""
        for records in (self.kernels, self.waits, self.collectives, self.copies, self.faults):
            records.clear()

    def __enter__(self) -> FakeGPU:
        guard().install_fake_cuda()
        self._stack.enter_context(patched_cuda())
        # Methods of the class, since a thread of its own, which pins batches or writes files, is outside of every mode.
        self._stack.enter_context(mock.patch.object(Tensor, "cpu", lambda tensor: self._fetch(tensor)))
        self._stack.enter_context(mock.patch.object(FakeTensor, "tolist", lambda tensor: self._fetch(tensor).tolist()))
        self._stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda tensor: self._pin(tensor)))
        self._stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.__exit__(*error)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """torch.compile then works beside it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._guards.TracingContext.try_get() is not None:  # torch.compile looks at an operator, and nothing runs
            return func(*args, **kwargs)
        if func.namespace == "prim":  # x.device in inference mode
            return func(*args, **kwargs) if not isinstance(args[0], FakeTensor) else args[0].fake_device
        if torch.is_inference_mode_enabled() and func.has_kernel_for_dispatch_key(COMPOSITE):
            TorchDispatchMode.__enter__(self)  # autograd takes such an operator apart, which is not at work here
            try:
                return func.decompose(*args, **kwargs)
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)
        name = func._schema.name.split("::")[1]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_gpu = [x for x in given if x.device.type == "cuda"]
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(name, given, args)
        if name == "_local_scalar_dense" and on_gpu:
            self.waits.append(f"{where()} reads a value")
            return 0.0 if args[0].is_floating_point() else 0
        if name in ("_to_copy", "copy_") and (copied := self._between(name, args, kwargs)) is not None:
            return copied
        if (
            not on_gpu
            and "cuda" not in str(kwargs.get("device", ""))
            and not any(isinstance(x, FakeTensor) for x in given)
        ):
            return self._on_host(func, args, kwargs)
        # AdamW's kernel works in place, and torch knows no shapes for it.
        out = None if name == "_fused_adamw_" else func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.device.type == "cuda"]
        for tensor in (*on_gpu, *made):
            self.memory.add(tensor)
        self._order.take(made)
        if name not in FREE:
            self._order.work(on_gpu, [*written(func, args, kwargs), *made], where())
        if (on_gpu or made) and name not in FREE and func.namespace in ("aten", "mpu"):
            shapes = tuple(tuple(x.shape) for x in on_gpu)
            self.kernels.append(Kernel(name, *traffic(name, on_gpu, made), where(), shapes))
        return out

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The CPU's own work, which is real. What would be pinned is only marked so: that needs a driver."""
        pinned = kwargs.pop("pin_memory", False)
        with unset_fake_temporarily():
            out = func(*args, **kwargs)
        return self._pin(out) if pinned else out

    def _pin(self, tensor: Tensor) -> Tensor:
        """Marks its memory as pinned; to pin it would need a driver."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._pinned:
            self._pinned.add(storage._cdata)
            weakref.finalize(storage, self._pinned.discard, storage._cdata)
        return tensor

    def _fetch(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return tensor
        self.waits.append(f"{where()} copies {tuple(tensor.shape)} from cuda to cpu")
        with unset_fake_temporarily():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def _between(self, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """A copy between host and device, if it is one: the host waits unless it is asynchronous, from or to pinned
        memory, or a number that goes along with the launch. What arrives on the host is real, and 0."""
        target, source = args[:2] if name == "copy_" else (None, args[0])
        asynchronous = kwargs.get("non_blocking", False) or name == "copy_" and len(args) > 2 and args[2]
        begin = source.device.type
        end = target.device.type if target is not None else torch.device(kwargs.get("device") or begin).type
        if begin == end:
            return None
        host = source if begin == "cpu" else target
        is_number = begin == "cpu" and source.dim() == 0
        if not is_number and not (asynchronous and host is not None and host.untyped_storage()._cdata in self._pinned):
            self.waits.append(f"{where()} copies {tuple(source.shape)} from {begin} to {end}")
        copied = Copy(end, source.numel() * source.element_size(), FakeStream.current.number, where())
        self.copies.append(copied)
        if target is not None:
            self._order.work([source], [target], copied.place)
        if end == "cpu":
            with unset_fake_temporarily():
                made = torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
                return made if target is None else target.zero_()
        sent: Tensor = (
            target
            if target is not None
            else torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype, device="cuda")
        )
        self.memory.add(sent)
        return sent

    def _collective(self, name: str, given: list[Tensor], args: Any) -> None:
        group = next(dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject))
        ranks = tuple(dist.get_process_group_ranks(group))
        if name in ("send", "recv_"):  # (tensors, group, peer, tag)
            ranks = (dist.get_rank(), ranks[args[2]])[:: 1 if name == "send" else -1]
        self.collectives.append(Collective(name, ranks, tuple(f"{tuple(x.shape)} {x.dtype}" for x in given), where()))
        for x in given:
            if x.device.type != "cuda" and x.numel() > 1:  # single numbers go over groups of gloo
                self.faults.append(f"{where()}: {name} of a tensor {tuple(x.shape)} on the CPU")
            if not x.is_contiguous():
                self.faults.append(f"{where()}: {name} of a tensor {tuple(x.shape)} that is not contiguous")


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The CUDA tensors among the arguments that the operator writes into."""
    given = itertools.zip_longest(func._schema.arguments, args)
    named = [(argument, kwargs.get(argument.name) if value is None else value) for argument, value in given]
    return [
        x
        for argument, value in named
        if argument.alias_info is not None and argument.alias_info.is_write
        for x in tree_leaves(value)
        if isinstance(x, Tensor) and x.device.type == "cuda"
    ]


def traffic(name: str, given: list[Tensor], made: list[Tensor]) -> tuple[int, int]:
    """Bytes that a kernel reads and writes, as the least that its kind of operator can."""
    size = [x.numel() * x.element_size() for x in given]
    written = sum(x.numel() * x.element_size() for x in made)
    if name in ("fill_", "zero_"):
        return 0, written
    if name == "copy_":
        return size[-1] if len(size) > 1 else 0, size[0]
    if name == "embedding":
        return written, written
    if name in ("gather", "scatter_add_"):
        return 2 * size[1], size[1]
    if name.startswith("index_put"):
        return 2 * size[-1], size[-1]
    if name.startswith(("_fused_adamw", "_foreach")):
        return sum(size), sum(size)
    return sum(size), written


def where() -> str:
    """The innermost line of this project that is running, and not of its tests; "autograd" where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and "/tests/fake_cuda/" not in file and "/.venv" not in file:
            return f"{file[len(ROOT) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "autograd"
