"""A fake CUDA device: CUDA tensors have shapes, dtypes and sizes, but no values. The CPU is real.

    with FakeGPU() as gpu:
        x = torch.zeros(4, device="cuda")      # allocates nothing
        (x * 2).sum().item()                   # 0.0, and gpu.waits has the line at which the host waited

`FakeGPU` records kernels, copies, collectives and waits. torch's FakeTensorMode computes the shapes. The fake GPU needs
torch's CUDA build and g++, but no driver.
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
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.gpt2.extensions.order.recording import RecordedCall

# --- streams and events; detection of memory that is used or freed while another stream may still use it --------------

# Each stream counts its own operations, and stores for each other stream how many of its operations were waited for. If
# two operations use the same memory, and one of them writes, the stream of the later operation must have waited for the
# earlier operation. The host counts as a stream for which all streams wait.

Moment = tuple[int, int]  # the number of a stream, and its count of operations at that time


class FakeStream:
    """Replaces torch.cuda.Stream."""

    made: ClassVar[int] = 0
    current: ClassVar[FakeStream]
    host: ClassVar[FakeStream]  # the operations of the host, as if they were those of a stream

    def __init__(self, device: Any = None) -> None:
        FakeStream.made += 1
        self.number = FakeStream.made
        self.known: defaultdict[int, int] = defaultdict(int)

    def wait_event(self, event: FakeEvent | FakeStream) -> None:
        """Make later operations of the stream `self` wait for the event."""
        for number, work in event.known.items():
            self.known[number] = max(self.known[number], work)

    def wait_stream(self, stream: FakeStream) -> None:
        """Make later operations of the stream `self` wait for all earlier operations of `stream`."""
        self.wait_event(stream.record_event())

    def record_event(self) -> FakeEvent:
        """Return an event that is recorded after the stream's operations so far."""
        event = FakeEvent()
        event.record(self)
        return event


class FakeEvent:
    """Replaces torch.cuda.Event. `query` returns True."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.known: dict[int, int] = {}
        self.stream = FakeStream.current

    def record(self, stream: FakeStream | None = None) -> None:
        """Record the operations of the stream until now."""
        self.stream = stream or FakeStream.current
        self.known = dict(self.stream.known)

    def query(self) -> bool:
        FakeStream.host.wait_event(self)
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        """Return a constant number of milliseconds."""
        return 1.0


@contextlib.contextmanager
def running_on(stream: FakeStream) -> Iterator[None]:
    """Replace torch.cuda.stream."""
    before, FakeStream.current = FakeStream.current, stream
    try:
        yield
    finally:
        FakeStream.current = before


@dataclass
class _Use:
    """The stream that allocated a storage, the last write to it, and the reads since then."""

    owner: FakeStream
    written: Moment
    read: dict[int, int] = field(default_factory=dict)


class MemoryOrder:
    """Observes each operation, and calls `fault` if memory is used or freed too early."""

    def __init__(self, fault: Callable[[str], None]) -> None:
        self._fault = fault
        self._uses: dict[tuple[int, int], _Use] = {}

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Assign new memory to its owner: the current stream or, for memory on a CPU, the host."""
        for tensor in tensors:
            if (key := memory_of(tensor)) not in self._uses:
                on_device = tensor.device.type == "cuda"
                stream = FakeStream.current if on_device else FakeStream.host
                self._uses[key] = _Use(stream, (stream.number, stream.known[stream.number]))
                weakref.finalize(tensor.untyped_storage(), self._free, key, on_device)

    def work(self, read: Sequence[Tensor], written: Sequence[Tensor], place: str) -> None:
        """Record an operation of the current stream, which the host has started."""
        self.take((*read, *written))
        FakeStream.current.wait_event(FakeStream.host)
        self._work(FakeStream.current, read, written, place)

    def host_work(self, read: Sequence[Tensor], written: Sequence[Tensor], place: str) -> None:
        """Record an operation of the host on memory that a stream has used. Other memory is ignored."""
        read, written = ([x for x in xs if memory_of(x) in self._uses] for xs in (read, written))
        self._work(FakeStream.host, read, written, f"{place} on the host")

    def _work(self, stream: FakeStream, read: Sequence[Tensor], written: Sequence[Tensor], place: str) -> None:
        stream.known[stream.number] += 1
        now = stream.known[stream.number]
        for tensor in read:
            use = self._uses[memory_of(tensor)]
            self._require(stream, [use.written], f"{place} reads {tuple(tensor.shape)} before it is there")
            use.read[stream.number] = now
        for tensor in written:
            use = self._uses[memory_of(tensor)]
            self._require(
                stream,
                [use.written, *use.read.items()],
                f"{place} writes {tuple(tensor.shape)} while another stream uses it",
            )
            use.written, use.read = (stream.number, now), {}

    def _require(self, stream: FakeStream, moments: Sequence[Moment], fault: str) -> None:
        if any(number != stream.number and stream.known[number] < work for number, work in moments):
            self._fault(fault)

    def _free(self, key: tuple[int, int], on_device: bool) -> None:
        use = self._uses.pop(key)
        if on_device:  # The allocator may reuse the memory for the next operation of the owner.
            self._require(use.owner, [use.written, *use.read.items()], "memory is freed while another stream uses it")


def memory_of(x: Tensor) -> tuple[int, int]:
    """Return a key of the memory that `x` uses: the storage and, on the host, the offset in the storage, because
    operations use parts of a host buffer independently."""
    return x.untyped_storage()._cdata, 0 if x.device.type == "cuda" else int(x.storage_offset())


# --- the functions of torch.cuda, with the answers of a machine with one H200 -----------------------------------------

H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=150_754_820_096,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65_536,
    shared_memory_per_block_optin=232_448,
    gcnArchName="",
    uuid="fake",
)


@functools.cache
def guard() -> ctypes.CDLL:
    """Compile and load `guard.cpp`, once per process (3 s)."""
    folder = Path(torch.__file__).parent
    library = Path(tempfile.mkdtemp()) / "guard.so"
    source, include = Path(__file__).with_name("guard.cpp"), folder / "include"
    flags = f"-shared -fPIC -std=c++20 -O1 -I{include} -I{include}/torch/csrc/api/include {source} -o {library}"
    subprocess.run(["g++", *flags.split(), f"-L{folder}/lib", "-lc10", "-ltorch_cpu"], check=True)
    return ctypes.CDLL(str(library))


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """Replace F.scaled_dot_product_attention, which would ask the driver to choose a kernel. Use FlashAttention, or
    torch's memory-efficient kernel with a mask or in float32."""
    if attn_mask is None and q.dtype != torch.float32:
        y: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False)[0]
        return y
    y = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, q.requires_grad, dropout_p, is_causal
    )[0]
    return y


@contextlib.contextmanager
def patched_cuda() -> Iterator[None]:
    """Patch `torch.cuda` to behave as on a machine with one H200."""

    def state(device: Any = None) -> Tensor:
        with unset_fake_temporarily():
            return torch.zeros(16, dtype=torch.uint8)

    nothing = "set_device _lazy_init set_rng_state manual_seed manual_seed_all"
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
    FakeStream.current, FakeStream.host = FakeStream(), FakeStream()
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
ALLOCATION = 512  # CUDA's caching allocator rounds each tensor up to a multiple of 512 bytes.

# The host may wait for an event that this number of operations follows, because the device then has enough work.
ENOUGH_QUEUED = 200

# operators that start no kernel: views and allocations
VIEWS = (
    "view _unsafe_view t transpose permute select slice unbind detach expand alias unsqueeze squeeze as_strided split "
    "split_with_sizes lift_fresh unfold _reshape_alias record_stream is_pinned resize_ set_"
)
FREE = {*VIEWS.split(), "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


@dataclass(frozen=True)
class Kernel:
    """A kernel that a GPU would run.

    read, written: numbers of bytes.
    place: file and line in this project, or "autograd".
    shapes: the shapes of its arguments.
    """

    name: str
    read: int
    written: int
    place: str
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Copy:
    """A copy between host and device.

    to: the destination.
    stream: the number of the stream that runs the copy.
    """

    to: str
    size: int
    stream: int


@dataclass
class Memory:
    """The current and peak bytes of CUDA tensors, and the line at which the peak was reached."""

    now: int = 0
    peak: int = 0
    place: str = ""
    _known: dict[int, int] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor once, until it is freed."""
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
    """Inside this context the process has an H200 that computes nothing and records all requests:

    kernels:       operators with CUDA tensors
    waits:         lines at which the host waits for the device: it reads a value, copies memory that is not pinned, or
                   synchronizes the device, a stream or a recent event
    events:        calls of torch.distributed and the waits for them, as in `megatron.gpt2.extensions.order`, from the
                   construction of the model on
    recorded:      number of events before the last `clear`
    copies:        copies between host and device
    faults:        collectives with a tensor that is on the CPU or not contiguous; memory that is used or freed while
                   another stream, a collective or the host may still use it
    memory:        bytes on the device

    A tensor on the wrong device raises an error, as on a real GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.waits: list[str] = []
        self.events: list[tuple[bool, RecordedCall]] = []
        self.recorded = 0
        self.copies: list[Copy] = []
        self.faults: list[str] = []
        self._order = MemoryOrder(self.faults.append)
        self.memory = Memory()
        self._pinned: set[int] = set()
        self._pending: dict[dist.Work, Pending] = {}
        self._batch: list[dist.Work] | None = None  # the works of the current `batch_isend_irecv`
        self._stack = contextlib.ExitStack()

    def clear(self) -> None:
        """Clear all records except events and memory."""
        for records in (self.kernels, self.waits, self.copies, self.faults):
            records.clear()
        self.recorded = len(self.events)

    def __enter__(self) -> FakeGPU:
        guard().install_fake_cuda()
        self._stack.enter_context(patched_cuda())
        # Methods of the class are patched, because threads that pin batches or write files run outside the dispatch
        # modes.
        batch = dist.batch_isend_irecv
        for owner, name, replacement in (
            (Tensor, "cpu", lambda tensor: self._fetch(tensor)),
            (FakeTensor, "tolist", lambda tensor: self._fetch(tensor).tolist()),
            (Tensor, "pin_memory", lambda tensor: self._pin(tensor)),
            (torch.cuda, "synchronize", lambda device=None: self._synchronize("the device", FakeStream.current)),
            (FakeStream, "synchronize", lambda stream: self._synchronize("a stream", stream)),
            (FakeEvent, "synchronize", lambda event: self._synchronize("an event", event)),
            (FakeWork, "wait", lambda work, timeout=None: self._wait(work)),
            (dist, "batch_isend_irecv", lambda operations: self._in_batch(batch, operations)),
        ):
            self._stack.enter_context(mock.patch.object(owner, name, replacement, create=True))
        self._stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.__exit__(*error)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that torch.compile works inside this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._guards.TracingContext.try_get() is not None:  # torch.compile traces an operator; nothing runs.
            return func(*args, **kwargs)
        if func.namespace == "prim":  # The operator is x.device in inference mode.
            return func(*args, **kwargs) if not isinstance(args[0], FakeTensor) else args[0].fake_device
        if torch.is_inference_mode_enabled() and func.has_kernel_for_dispatch_key(COMPOSITE):
            TorchDispatchMode.__enter__(self)  # Autograd, which usually decomposes the operator, does not run.
            try:
                return func.decompose(*args, **kwargs)
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)
        name = func._schema.name.split("::")[1]
        given = tensors_in((args, kwargs))
        on_gpu = [x for x in given if x.device.type == "cuda"]
        if func.namespace == "c10d":
            return self._collective(name, func, args, kwargs)
        if name == "_local_scalar_dense" and on_gpu:
            self._check_pending(on_gpu, [])
            self._host_waits("reads a value")
            return 0.0 if args[0].is_floating_point() else 0
        if name in ("_to_copy", "copy_") and (copied := self._between(name, args, kwargs)) is not None:
            return copied
        if (
            not on_gpu
            and "cuda" not in str(kwargs.get("device", ""))
            and not any(isinstance(x, FakeTensor) for x in given)
        ):
            return self._on_host(func, args, kwargs)
        changed = written(func, args, kwargs)
        if name not in FREE:
            self._check_pending(on_gpu, changed)
        out = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.device.type == "cuda"]
        only_written = [kwargs["out"]] if "out" in kwargs else []
        if func.namespace == "mpu":
            made += written(func, args, kwargs)  # mpu's operators do not return the tensors that they write into.
            only_written = args[5] if name == "adamw_" else args[0] if name == "add_grads_" and not args[2] else []
        on_gpu = [x for x in on_gpu if not any(x is other for other in only_written)]
        for tensor in (*on_gpu, *made):
            self.memory.add(tensor)
        self._order.take(made)
        if name not in FREE:
            self._order.work(on_gpu, [*changed, *made], where())
        if (on_gpu or made) and name not in FREE and func.namespace in ("aten", "mpu"):
            shapes = tuple(tuple(x.shape) for x in on_gpu)
            self.kernels.append(Kernel(name, *traffic(name, on_gpu, made or changed), where(), shapes))
        return out

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on the CPU. Pinned memory is only marked as pinned, because real pinning needs a driver."""
        pinned = kwargs.pop("pin_memory", False)
        if func._schema.name.split("::")[1] not in FREE:
            self._order.host_work(tensors_in((args, kwargs)), written(func, args, kwargs), where())
        with unset_fake_temporarily():
            out = func(*args, **kwargs)
        return self._pin(out) if pinned else out

    def _pin(self, tensor: Tensor) -> Tensor:
        """Mark the memory of a tensor as pinned."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._pinned:
            self._pinned.add(storage._cdata)
            weakref.finalize(storage, self._pinned.discard, storage._cdata)
        return tensor

    def _fetch(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return tensor
        self._check_pending([tensor], [])
        self._host_waits(f"copies {tuple(tensor.shape)} from cuda to cpu")
        with unset_fake_temporarily():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def _between(self, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """Handle a copy between host and device; return None for other copies. The host waits, unless the copy is
        asynchronous with pinned memory, or copies a single number to the device. Copies to the host give zeros."""
        target, source = args[:2] if name == "copy_" else (None, args[0])
        asynchronous = kwargs.get("non_blocking", False) or name == "copy_" and len(args) > 2 and args[2]
        begin = source.device.type
        end = target.device.type if target is not None else torch.device(kwargs.get("device") or begin).type
        if begin == end:
            return None
        dtype = kwargs.get("dtype") or source.dtype
        if target is not None:
            made = target
        elif end == "cuda":
            made = torch.empty(source.shape, dtype=dtype, device="cuda")
        else:
            with unset_fake_temporarily():
                made = torch.empty(source.shape, dtype=dtype)
            if asynchronous:  # torch allocates pinned memory.
                self._pin(made)
        self.copies.append(Copy(end, source.numel() * source.element_size(), FakeStream.current.number))
        self._check_pending([source], [made])
        self._order.work([source], [made], where())
        host = source if begin == "cpu" else made
        is_number = begin == "cpu" and source.dim() == 0
        if not is_number and not (asynchronous and host.untyped_storage()._cdata in self._pinned):
            self._host_waits(f"copies {tuple(source.shape)} from {begin} to {end}")
        if end == "cpu":
            with unset_fake_temporarily():
                return made.zero_()
        self.memory.add(made)
        return made

    def _host_waits(self, what: str) -> None:
        """Record that the host waits for the current stream."""
        self.waits.append(f"{where()} {what}")
        FakeStream.host.wait_event(FakeStream.current)

    def _synchronize(self, what: str, awaited: FakeEvent | FakeStream) -> None:
        stream = awaited.stream if isinstance(awaited, FakeEvent) else awaited
        if stream.known[stream.number] - awaited.known.get(stream.number, 0) < ENOUGH_QUEUED:
            self.waits.append(f"{where()} synchronizes {what}")
        FakeStream.host.wait_event(awaited)

    # --- collectives. An asynchronous collective uses its tensors until the current stream has waited for it with
    # `wait`

    def _collective(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        given = tensors_in(args[:2])
        for x in given:
            if x.device.type != "cuda" and x.numel() != 1:  # Single numbers are sent over gloo groups.
                self.faults.append(f"{where()}: {name} of a tensor {tuple(x.shape)} on the CPU")
            if not x.is_contiguous():
                self.faults.append(f"{where()}: {name} of a tensor {tuple(x.shape)} that is not contiguous")
        first, second = ([x for x in tensors_in(value) if x.device.type == "cuda"] for value in args[:2])
        received, sent = (first, second or first) if name != "send" else ([], first)
        self._check_pending(sent, received)
        self._order.work(sent, [], where())
        out = func(*args, **kwargs)
        work = dist.Work.unbox(next(x for x in tree_leaves(out) if isinstance(x, torch.ScriptObject)))
        group = next(dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject))
        members = ranks = tuple(dist.get_process_group_ranks(group))
        channel: tuple[Any, ...] = ranks, group.group_name
        if name in ("send", "recv_"):  # The arguments are (tensors, group, peer, tag).
            members = (dist.get_rank(), ranks[args[2]])[:: 1 if name == "send" else -1]
            channel = *channel, members, "message"
        arguments = ", ".join(f"{tuple(x.shape)} {str(x.dtype)[6:]}" for x in given)
        batch = 0 if self._batch is None else id(self._batch)
        call = RecordedCall(name.strip("_"), channel, members, arguments, [where()], batch=batch)
        self.events.append((True, call))
        if self._batch is not None:
            self._batch.append(work)
            work = self._batch[0]
        self._pending.setdefault(work, []).append((call, sent, received))
        return out

    def _in_batch(self, real: Any, operations: Any) -> list[dist.Work]:
        """Replace torch's `batch_isend_irecv`. As with NCCL, all operations have one work."""
        self._batch = []
        try:
            real(operations)
            return self._batch[:1]
        finally:
            self._batch = None

    def _wait(self, work: dist.Work) -> bool:
        for call, _, received in self._pending.pop(work, []):
            self.events.append((False, call))
            self._order.work([], received, call.place[0])
        return True

    def _check_pending(self, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Report an operation that touches memory of a collective that nobody has waited for."""
        for call, sent, received in itertools.chain.from_iterable(self._pending.values()):
            for used, verb, others in (
                (written, "overwrites what is sent by", sent),
                (written, "overwrites what is received by", received),
                (read, "reads what is received by", received),
            ):
                if any(overlap(x, y) for x in used for y in others):
                    self.faults.append(f"{where()} {verb} {call} before its wait")


# the calls of a work, and the tensors that each call sends and receives
Pending = list[tuple[RecordedCall, list[Tensor], list[Tensor]]]


def tensors_in(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def overlap(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors have common memory. A strided tensor includes the memory between its elements."""
    if x.untyped_storage()._cdata != y.untyped_storage()._cdata:
        return False
    (a, b), (c, d) = (span(z) for z in (x, y))
    return a < d and c < b


def span(x: Tensor) -> tuple[int, int]:
    """Return the offsets in bytes of a tensor's begin and end in its storage."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    begin = int(x.storage_offset())
    return begin * x.element_size(), (begin + last + 1) * x.element_size() if x.numel() else 0


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that the operator writes to."""
    given = itertools.zip_longest(func._schema.arguments, args)
    named = [(argument, kwargs.get(argument.name) if value is None else value) for argument, value in given]
    return [
        x
        for argument, value in named
        if argument.alias_info is not None and argument.alias_info.is_write
        for x in tree_leaves(value)
        if isinstance(x, Tensor)
    ]


def traffic(name: str, given: list[Tensor], made: list[Tensor]) -> tuple[int, int]:
    """Return the minimum number of bytes that the kernel of an operator reads and writes."""
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
    if name.startswith("_foreach"):
        return sum(size), sum(size)
    return sum(size), written


def where() -> str:
    """Return the innermost line of this project on the stack, without tests, or "autograd"."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if (
            file.startswith(ROOT)
            and not file.endswith("/triton_kernel.py")
            and "/tests/fake_cuda/" not in file
            and "/.venv" not in file
        ):
            return f"{file[len(ROOT) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "autograd"
