"""A trace of one training step of one rank: the program itself runs on tensors without data.

`trace_step` builds the model, the reducer and the optimizer of a rank, and calls `train_step` once, in one process,
with the process groups of `process_group.py` at the full world size. Every tensor is on torch's device "meta": it has a
shape, a dtype and a storage, but no memory. Python code sees the device of the run ("cuda" or "cpu"), so it takes the
same branches as in the run. A dispatch mode records operators, collectives, allocations and releases in their order.

torch's FakeTensorMode would also work, but its first operator imports sympy and the compiler (1.3 s, 80 MB). For CUDA
tensors, FakeTensorMode also needs a CUDA build of torch.

On a CPU the loss computes its softmax in equal blocks of rows. The trace has only the first block. `Operation.times` of
its operators is the number of blocks. The trace leaves out torch.compile, documents within a sample, and the
choice of the attention kernel.
"""

import contextlib
import dataclasses
import functools
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.gpt2.config import Config
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.extensions.plan.process_group import Call, Wait, fake_groups, tensors_in
from megatron.gpt2.hooks import Hooks, load_hooks
from megatron.gpt2.train import train_state
from megatron.gpt2.train.data import TrainingData
from megatron.gpt2.train.forward_backward import ForwardBackward
from megatron.gpt2.train.setup import RunContext
from megatron.gpt2.train.train_state import Progress, build_train_state
from megatron.gpt2.train.train_step import train_step
from mpu import kernels, random
from mpu.kernels import attention
from mpu.kernels.triton_kernel import TritonKernel

ROOT, PLAN_FOLDER = str(Path(__file__).resolve().parents[4]), str(Path(__file__).resolve().parent)
ROUNDING = {"cuda": 512, "cpu": 64}  # An allocation's size is a multiple of ROUNDING bytes.
META = torch.device("meta")


class Operation(NamedTuple):
    """An operator that starts a kernel.

    name: torch's name of the operator, such as "mm".
    shapes: the shapes of its tensors.
    read, written: number of bytes.
    place: file and line of the program, or "autograd".
    times: how often in a row the program runs this operator.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    read: int
    written: int
    place: str
    times: float = 1.0


class Communication(NamedTuple):
    """The start of a collective or of a message: the fields of `Call`, then the line of the program."""

    number: int
    name: str
    ranks: tuple[int, ...]
    size: int
    place: str


class Allocation(NamedTuple):
    """The allocation of `size` bytes.

    block: the number of this allocation in the trace. `Release` has the same number.
    device: "cuda" or "cpu".
    phase: the name of the program's timer that is running, such as "forward", or "" if none is running.
    """

    block: int
    size: int
    device: str
    phase: str
    place: str


class Release(NamedTuple):
    """The release of the memory of `block`."""

    block: int


class Mark(NamedTuple):
    """The beginning of a phase of the step, or its end if `ends` is True."""

    phase: str
    ends: bool


Event = Operation | Communication | Wait | Allocation | Release | Mark


@dataclasses.dataclass(frozen=True)
class Trace:
    """The trace of a training step of one rank.

    events: the events of the step, in order.
    parameters: the number of parameters on this rank.
    weights: bytes of the model.
    held: bytes that exist before the step, by device: weights, masters and moments.
    saved: bytes of masters and moments in a checkpoint.
    """

    events: list[Event]
    parameters: int
    weights: int
    held: Counter[str]
    saved: int


def _new(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device=META)


def _elementwise(*args: Any, dtype: torch.dtype | None = None, memory_format: Any = None, **_: Any) -> Tensor:
    """Return the output of an element-wise operator. The dimensions of the output have the same order in memory as
    those of the first argument with the output's shape."""
    tensors = tensors_in(args)
    shape = tuple(np.broadcast_shapes(*(x.shape for x in tensors)))
    like = next((x for x in tensors if x.shape == shape), None)
    order = list(range(len(shape)))
    if like is not None and memory_format != torch.contiguous_format:
        order.sort(key=lambda dim: -like.stride()[dim])
    dtype = dtype or torch.result_type(tensors[0], tensors[-1])
    return torch.empty_permuted(shape, order, dtype=dtype, device=META)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return _new(a, *a.shape[:-1], b.size(-1))


def _reduce(x: Tensor, dims: Any = None, keep: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    reduced = {dim % x.dim() for dim in (dims or range(x.dim()))} if x.dim() else set()
    shape = [1 if dim in reduced else size for dim, size in enumerate(x.shape) if keep or dim not in reduced]
    return _new(x, *shape, dtype=dtype)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.size(dim) for x in tensors)
    return _new(tensors[0], *shape)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return _cat([x.unsqueeze(dim) for x in tensors], dim)


def _row_sums(x: Tensor) -> Tensor:
    return _new(x, *x.shape[:-1], dtype=torch.float32)


def _flash_attention(q: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    random_state = _new(q, 2, dtype=torch.int64)
    return _elementwise(q), _row_sums(q), None, None, q.size(2), q.size(2), *[random_state] * 3


def _layer_norm(x: Tensor, shape: Sequence[int], *_: Any) -> tuple[Tensor, ...]:
    return _elementwise(x), *(_row_sums(x).unsqueeze(-1) for _ in range(2))


# OUTPUTS computes the output shapes of operators for which torch would import the compiler's libraries for a second.
OUTPUTS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        "ge gt lt le eq ne isfinite logical_and logical_not".split(),
        lambda *args: _elementwise(*args, dtype=torch.bool),
    ),
    **dict.fromkeys(
        "abs add bitwise_and bitwise_not clamp_max clamp_min div empty_like exp gelu gelu_backward log "
        "masked_fill mul nan_to_num neg ones_like pow reciprocal remainder round rsub sqrt sub trunc where "
        "zeros_like".split(),
        _elementwise,
    ),
    **dict.fromkeys(
        "full_like tril triu _softmax _safe_softmax _softmax_backward_data".split(), lambda x, *_, **__: _elementwise(x)
    ),
    **dict.fromkeys(["mm", "bmm"], _product),
    **dict.fromkeys(["amax", "sum"], _reduce),
    **dict.fromkeys(["addmm", "baddbmm"], lambda bias, a, b, **_: _product(a, b)),
    "all": lambda x: _reduce(x, dtype=torch.bool),
    "aminmax": lambda x: (_reduce(x), _reduce(x)),
    "arange": lambda *ends, **_: torch.empty(ends[-1] - sum(ends[:-1]), dtype=torch.int64, device=META),
    "cat": _cat,
    "dot": lambda a, b: _new(a),
    "embedding": lambda weight, ids, *_: _new(weight, *ids.shape, weight.size(-1)),
    "frexp": lambda x: (_elementwise(x), _elementwise(x, dtype=torch.int32)),
    "gather": lambda x, dim, index: _new(x, *index.shape),
    "linalg_vector_norm": lambda x, order=2, *args, **options: _reduce(x, *args, **options),
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": lambda dy, x, shape, mean, rstd, weight, *_: tuple(
        map(_elementwise, (x, weight, weight))
    ),
    "slice_backward": lambda dy, sizes, *_: _new(dy, *sizes),
    "stack": _stack,
    "_scaled_dot_product_flash_attention": _flash_attention,
    "_scaled_dot_product_flash_attention_backward": lambda dy, *qkv: tuple(map(_elementwise, qkv[:3])),
    "_scaled_dot_product_flash_attention_for_cpu": lambda q, *_, **__: (_elementwise(q), _row_sums(q)),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda dy, *qkv, **_: tuple(
        _elementwise(x.transpose(1, 2).contiguous()).transpose(1, 2) for x in qkv[:3]
    ),
}
# The operators that allocate memory and run no kernel.
NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


@functools.cache
def _schema(func: Any) -> tuple[str, bool, list[tuple[int, str]], int]:
    """Return the name of an operator, whether its result is a view, the positions and names of the arguments that it
    writes to, and the number of its results."""
    schema = func._schema
    aliases = [(at, a.name, a.alias_info) for at, a in enumerate(schema.arguments) if a.alias_info is not None]
    writes, name = [(at, name) for at, name, alias in aliases if alias.is_write], schema.name.split("::")[1]
    is_view = bool(aliases) and not writes or name == "_unsafe_view"  # The schema of _unsafe_view names no alias.
    return name, is_view, writes, len(schema.returns)


class Recorder(TorchDispatchMode):
    """Runs operators on the meta device, and records each operator.

    device: the type of the run's device, "cuda" or "cpu".
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.events, self.phase = device, list[Event](), ""
        self._blocks: dict[int, tuple[int, str]] = {}  # by storage: the number of the block, and its device
        self._outputs: dict[Any, Any] = {}  # the outputs of an operator, by its name and arguments
        self._count = 0
        self._inside = False  # If True, `Tensor.device` is "meta".
        self._in_kernel = False
        self.times = 1.0  # the value of `Operation.times` for the next operators

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # With True, torch would load its compiler.

    def device_of(self, x: Tensor) -> torch.device:
        """Return the device that the traced program sees for a tensor, whose real device is "meta"."""
        real: torch.device = torch._C.TensorBase.device.__get__(x)  # type: ignore[attr-defined]
        if real.type != "meta" or self._inside:
            return real
        _, device = self._blocks.get(x.untyped_storage()._cdata, (0, self.device))
        return torch.device(device, 0)

    @contextlib.contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Replace the timer of a run: record the beginning and the end of a phase."""
        before, self.phase = self.phase, phase
        self.events.append(Mark(phase, ends=False))
        yield
        self.events.append(Mark(phase, ends=True))
        self.phase = before

    def add(self, x: Tensor, device: str) -> None:
        """Record an allocation, unless the memory of `x` is already recorded."""
        storage = x.untyped_storage()
        if storage._cdata in self._blocks:
            return
        self._count += 1
        size = -(-storage.nbytes() // ROUNDING[device]) * ROUNDING[device]
        self._blocks[storage._cdata] = self._count, device
        self.events.append(Allocation(self._count, size, device, self.phase, place()))
        weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, key: int) -> None:
        self.events.append(Release(self._blocks.pop(key)[0]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, is_view, writes, returns = _schema(func)
        if is_view:
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        tensors = tensors_in((*args, *kwargs.values()))
        requested = kwargs.get("device")
        if tensors and not any(map(_is_meta, tensors)) and (requested is None or requested.type != self.device):
            return func(*args, **kwargs)  # A real tensor, such as a generator's state or a lookup table, is not traced.
        if name in ("_local_scalar_dense", "is_nonzero"):
            return 1
        current = self.device_of(tensors[0]).type if tensors else "cpu"
        device = current if requested is None or requested.type == "meta" else requested.type
        if (
            name == "_to_copy"
            and requested is not None
            and device == current
            and kwargs.get("dtype") in (None, args[0].dtype)
        ):
            return args[0].detach()  # The program calls x.to(device) with the device that x has.
        kwargs.pop("pin_memory", None)
        if requested is not None:
            kwargs["device"] = META
        if not all(map(_is_meta, tensors)):
            args = _map_tensors(_to_meta, args)
            kwargs = {key: _map_tensors(_to_meta, value) for key, value in kwargs.items()}
        written = [x for at, key in writes for x in tensors_in(args[at] if at < len(args) else kwargs.get(key))]
        if name in ("set_", "resize_"):
            out = self._run(func, args, kwargs)
        elif written:
            out = None if not returns else written[0] if returns == 1 else tuple(written)
        elif name in OUTPUTS:
            out = self._run(OUTPUTS[name], args, kwargs)
        else:
            out = self._infer(func, args, kwargs)
        if not self._in_kernel:
            self._record(name, tensors, written, out, device)
        return out

    def _record(self, name: str, given: Sequence[Tensor], written: Sequence[Tensor], out: Any, device: str) -> None:
        """Record an operator with its arguments `given`, the arguments `written` that it changes, and its output."""
        for x in () if written else tensors_in(out):
            self.add(x, device)
        if name not in NO_KERNEL:
            shapes = tuple(tuple(x.shape) for x in given)
            read, wrote = (sum(x.nbytes for x in tensors) for tensors in (given, written or tensors_in(out)))
            self.events.append(Operation(name, shapes, read, wrote, place(), self.times))

    def call_kernel(self, kernel: TritonKernel, *args: Any) -> Any:
        """Record a Triton kernel as one operator. `kernel.fake` makes the outputs, because a call of the custom
        operator would load torch's compiler."""
        tensors = tensors_in(args)
        if not tensors[0].is_cuda or kernel.is_measured:  # Whether a GPU uses a measured kernel is unknown.
            return kernel.reference(*args)
        self._in_kernel = True
        with torch.no_grad():
            out = kernel.fake(*args)
        self._in_kernel = False
        self._record(kernel.name, tensors, tensors_in([args[index] for index in kernel.written]), out, self.device)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._inside = True
        try:
            return func(*args, **kwargs)
        finally:
            self._inside = False

    def _infer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the outputs of an operator. torch computes their shapes once for equal arguments."""
        key = func, _map_tensors(_layout, args), _map_tensors(_layout, tuple(kwargs.items()))
        if key not in self._outputs:
            self._outputs[key] = self._run(func, args, kwargs)
        return _map_tensors(_empty, self._outputs[key])

    def report(self, call: Call | Wait) -> None:
        """Record a call or a wait of the process groups."""
        self.events.append(Communication(*call, place()) if isinstance(call, Call) else call)


def _is_meta(x: Tensor) -> bool:
    return bool(torch._C.TensorBase.is_meta.__get__(x))  # type: ignore[attr-defined]


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype


def _map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply `function` to each tensor in nested lists, which become tuples."""
    if isinstance(value, Tensor):
        return function(value)
    return tuple(_map_tensors(function, item) for item in value) if isinstance(value, list | tuple) else value


def _empty(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)


def _to_meta(x: Tensor) -> Tensor:
    return x if _is_meta(x) else _empty(x)


def place() -> str:
    """Return the innermost line of the program on the stack, or "autograd"."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and not file.startswith(PLAN_FOLDER):
            return f"{file[len(ROOT) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "autograd"


# --- replacements for functions that a step calls ---------------------------------------------------------------------


def _attention(config: Config, device: str) -> Callable[..., Tensor]:
    """Return a function that replaces F.scaled_dot_product_attention. The function chooses the kernel for the run's
    device."""

    def chosen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
    ) -> Tensor:
        ops = torch.ops.aten
        y: Tensor
        if device == "cpu" and dropout_p == 0:
            y = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)[0]
        elif device == "cpu" or config.train.attention_backend == "unfused":
            y = ops._scaled_dot_product_attention_math(q, k, v, None, dropout_p, is_causal)[0]
        elif q.dtype == torch.float32:
            y = ops._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout_p, is_causal)[0]
        else:
            y = ops._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False)[0]
        return y

    return chosen


def _softmax_of_first_rows(recorder: Recorder) -> Callable[..., Tensor]:
    """Return a function that replaces `vocab_parallel_softmax` on a CPU. The function runs only the first of many equal
    blocks."""

    def softmax_of_block(logits: Tensor, targets: Any, weight: Tensor | None, combine: Any) -> Tensor:
        stats = logits.new_empty(3, len(logits), dtype=torch.float32)
        rows = slice(0, kernels.rows_in_cache(logits.size(1)))
        recorder.times = max(len(logits) / rows.stop, 1)
        softmax(logits[rows], targets[rows], weight[rows] if weight is not None else None, None)
        recorder.times = 1.0
        return stats if combine is None else combine(stats)

    return softmax_of_block


softmax, blocks = kernels.vocab_parallel_softmax, attention._blocks


def _largest_block(s: int, heads: int, block: int) -> Any:
    """Return only the largest block of attention, or all blocks if each block saves tensors for backward."""
    found = list(blocks(s, heads, block))
    return found if s <= attention.SAVED_UP_TO else [max(found, key=lambda each: each[2] - each[0].start)]


def _no_draws(mask: Any, first_block: int, count: int) -> Tensor:
    return torch.empty(16 * count, dtype=torch.int16)


@contextlib.contextmanager
def patched(recorder: Recorder, config: Config) -> Iterator[None]:
    """Replace functions that need the values of tensors or a real device."""

    def of_type(kind: str) -> property:
        return property(lambda x: recorder.device_of(x).type == kind)

    def for_meta(real: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: instead(x) if _is_meta(x) else real(x)  # Other threads call `real` for tensors with data.

    def tensor(data: Any, *, device: Any = "cpu", real: Callable[..., Tensor] = torch.tensor, **options: Any) -> Tensor:
        on_host = torch.device(device).type == "cpu"
        return real(data, **options) if on_host else torch.empty(np.shape(data), device=device, **options)

    replaced: list[tuple[Any, dict[str, Any]]] = [
        (
            Tensor,
            {
                "device": property(recorder.device_of),
                **{f"is_{kind}": of_type(kind) for kind in ("cpu", "cuda", "meta")},
                "data_ptr": lambda x: x.untyped_storage()._cdata + x.storage_offset() * x.element_size(),
                "numpy": for_meta(Tensor.numpy, lambda x: np.zeros(0)),
                "tolist": for_meta(Tensor.tolist, lambda x: np.zeros(x.shape, dtype=np.int64).tolist()),
            },
        ),
        (torch, {"tensor": tensor}),
        (F, {"scaled_dot_product_attention": _attention(config, recorder.device)}),
        (random, {"_device": "cpu", "_tracker": random.RNGStatesTracker()}),
        (train_state, {"seed_random_streams": lambda *_: None, "choose_attention": lambda *_, **__: ""}),
        (sys.modules["mpu.kernels.dropout"], {"DROPOUT": lambda x, *_: x.clone()}),
        (attention, {"random_draws": _no_draws, "_blocks": _largest_block}),
    ]
    if recorder.device == "cpu":
        replaced.append((kernels, {"vocab_parallel_softmax": _softmax_of_first_rows(recorder)}))
    else:
        stream = mock.MagicMock()
        names = ("Event", "Stream", "current_stream", "stream", "synchronize", "_lazy_init")
        replaced.append((torch.cuda, {**dict.fromkeys(names, stream), "_initialized": False}))
        replaced.append((TritonKernel, {"__call__": lambda kernel, *args: recorder.call_kernel(kernel, *args)}))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for target, values in replaced:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(target, name, value))
        random.get_cuda_rng_tracker().add(random.MODEL_PARALLEL_RNG, 1)
        yield


def trace_step(config: Config, *, rank: int, world_size: int, device: str, dtype: torch.dtype) -> Trace:
    """Run one training step of `rank` on tensors without data, and return its trace.

    config: must have the vocabulary size.
    """
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, compile=False),
        data=dataclasses.replace(config.data, reset_attention_mask=False),
    )
    hooks = Hooks(hook for hook in load_hooks(config) if type(hook).__name__ == "ExactLayouts")
    context = RunContext(
        arguments=None,  # type: ignore[arg-type]
        config=config,
        rank_info=RankInfo(rank, world_size, 0, 1),
        device=torch.device(device, 0),
        dtype=dtype,
        backend="fake",
        tokenizer=types.SimpleNamespace(eod=0),  # type: ignore[arg-type]
        splits=None,  # type: ignore[arg-type]
        source=None,
        batch_schedule=config.build_batch_schedule(world_size),
        train_iters=1,
        resume_metadata={"consumed_samples": 0},
        hooks=hooks,
    )
    recorder = Recorder(device)
    sizes = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    with fake_groups(rank, world_size, *sizes, recorder.report) as parallel, patched(recorder, config), recorder:
        state = build_train_state(context, parallel, lambda line: None)
        data = TrainingData.__new__(TrainingData)
        data._context, data._parallel, data.tokenizer, data._checksum = context, parallel, context.tokenizer, 0
        own = context.num_microbatches * config.train.micro_batch_size
        data.loader = iter(
            [(torch.empty(own, config.data.seq_length + 1, dtype=torch.int64), torch.empty(own, dtype=torch.int64))]
        )  # type: ignore[assignment]
        trainer: Any = types.SimpleNamespace(
            config=config,
            context=context,
            parallel=parallel,
            state=state,
            data=data,
            timers=recorder.timer,
            hooks=Hooks(),
            progress=Progress(0, 0, 0, torch.zeros((), dtype=torch.float64, device=device)),
            current_global_batch_size=context.global_batch_size,
            forward_backward=ForwardBackward(config.pipeline_schedule, state, parallel, recorder.timer),  # type: ignore[arg-type]
        )
        state.model.train()
        before = recorder.events.copy()
        recorder.events.clear()
        train_step(trainer)
        # A parameter and its hook refer to each other through C++, so Python would never free them.
        for parameter in state.model.parameters():
            parameter._post_accumulate_grad_hooks.clear()  # type: ignore[attr-defined]
        return Trace(
            recorder.events,
            sum(parameter.numel() for parameter in state.model.parameters()),
            state.buffer.params.nbytes,
            _held_bytes(before),
            sum(x.nbytes for name in ("exp_avg", *state.optimizer.moments) for x in state.optimizer.moments[name]),
        )


def _held_bytes(events: Sequence[Event]) -> Counter[str]:
    """Return the bytes that `events` allocate and do not release, by device."""
    freed = {event.block for event in events if isinstance(event, Release)}
    held = Counter[str]()
    for event in events:
        if isinstance(event, Allocation) and event.block not in freed:
            held[event.device] += event.size
    return held
