"""A CUDA device that is not there: CUDA tensors have shapes, dtypes and sizes, and no values; the CPU is real.

    with FakeGPU() as gpu:
        x = torch.zeros(4, device="cuda")      # costs nothing
        (x * 2).sum().item()                   # 0.0, and gpu.waits tells where the host waited for it

What a GPU would have been asked is recorded, see `FakeGPU`. torch's FakeTensorMode computes the shapes. Needs torch's
CUDA build and g++, and no driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import subprocess
import sys
import tempfile
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch._subclasses.fake_tensor as fake_tensor
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# --- streams and events, and who touches or frees memory that another stream may still be using -----------------------

# Each stream counts its work, and knows how much of the work of the others is done before its own next piece, since it
# has waited for it. Two pieces of work with the same memory, of which one writes, are in order if the later one's stream
# knows of the earlier one.

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


# --- what a process asks of CUDA before and beside its kernels, answered as by a machine with one H200 ----------------

H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=150_754_820_096,
    multi_processor_count=132,
    warp_size=32,
    L2_cache_size=62_914_560,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65_536,
    shared_memory_per_multiprocessor=233_472,
    shared_memory_per_block=49_152,
    shared_memory_per_block_optin=232_448,
    gcnArchName="",
    uuid="fake",
    is_integrated=0,
    clock_rate=1_980_000,
    memory_bus_width=6144,
    memory_clock_rate=3_201_000,
)


@functools.cache
def guard() -> ctypes.CDLL:
    """`guard.cpp`, compiled: 3 s, once per process."""
    folder = Path(torch.__file__).parent
    library = Path(tempfile.mkdtemp()) / "guard.so"
    source, include = Path(__file__).with_name("guard.cpp"), folder / "include"
    flags = f"-shared -fPIC -std=c++20 -O1 -I{include} -I{include}/torch/csrc/api/include {source} -o {library}"
    subprocess.run(["g++", *flags.split(), f"-L{folder}/lib", "-lc10", "-ltorch_cpu"], check=True)
    return ctypes.CDLL(str(library))


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """F.scaled_dot_product_attention, whose choice of a kernel asks the driver: FlashAttention's, or the plain one with
    a mask."""
    if attn_mask is None and q.dtype != torch.float32:
        y: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False)[0]
        return y
    y = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, q.requires_grad, dropout_p, is_causal
    )[0]
    return y


@contextlib.contextmanager
def patched_cuda() -> Iterator[None]:
    """`torch.cuda` of a machine with one H200."""

    def state(device: Any = None) -> Tensor:
        with unset_fake_temporarily():
            return torch.zeros(16, dtype=torch.uint8)

    nothing = "set_device _lazy_init synchronize set_rng_state manual_seed manual_seed_all"
    zero = (
        "current_device _exchange_device _maybe_exchange_device memory_reserved memory_allocated max_memory_allocated"
    )
    numbers = {
        **dict.fromkeys(nothing.split()),
        **dict.fromkeys(zero.split(), 0),
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        "is_current_stream_capturing": False,
        "device_count": 1,
        "get_device_name": H200.name,
        "get_device_properties": H200,
        "get_device_capability": (H200.major, H200.minor),
        "mem_get_info": (140 << 30, 140 << 30),
    }
    replaced: dict[str, Callable[..., Any]] = {
        **{name: lambda *_, value=value, **__: value for name, value in numbers.items()},
        "get_rng_state": state,
        "Event": FakeEvent,
        "Stream": FakeStream,
        "stream": running_on,
        "current_stream": lambda device=None: FakeStream.current,
    }
    FakeStream.current = FakeStream()
    with contextlib.ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        stack.enter_context(mock.patch.object(torch.cuda.nccl, "version", lambda: (2, 29, 7)))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", flash_attention))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        stack.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", property(lambda self: True)))
        torch._C._ensureCUDADeviceGuardSet()
        yield


# --- the device -------------------------------------------------------------------------------------------------------

ROOT = str(Path(__file__).resolve().parent.parent.parent)
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
ALLOCATION = 512  # bytes: what CUDA's caching allocator rounds each tensor up to

# Operators that start no kernel: views, and what only makes room.
VIEWS = (
    "view _unsafe_view t transpose permute select slice unbind detach expand alias unsqueeze squeeze as_strided split "
    "split_with_sizes lift_fresh unfold _reshape_alias record_stream is_pinned resize_ set_"
)
FREE = {*VIEWS.split(), "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


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
