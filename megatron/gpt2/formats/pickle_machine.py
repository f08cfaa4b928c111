"""A machine for pickle's instructions (protocol 2) that builds data alone.

Dictionaries, lists, tuples, strings, numbers, tensors as views of the mapped file, and `Opaque`, an inert stand-in, for
the other things that genuine files name. Nothing is imported or called because a file says so, a name that is not in
the list below is refused, and what is built is bounded by the instructions and the bytes that the file holds.
"""

import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_STEPS = 250_000  # instructions: twice those of a 72-layer model with Adam's state; under half a second
MAX_NAMES = 200
MAX_PICKLE_BYTES = 16 << 20
ORDERED_DICT, REBUILD_TENSOR = "collections.OrderedDict", "torch._utils._rebuild_tensor_v2"
PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"
STORAGES = {
    f"{module}.{kind}Storage": dtype
    for module in ("torch", "torch.cuda")
    for kind, dtype in {
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Float": torch.float32,
        "Double": torch.float64,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}
Data = bytes | memoryview
KNOWN = {*STORAGES, ORDERED_DICT, REBUILD_TENSOR, *PARAMETERS, WITH_ATTRIBUTES}
PLAIN = (str, int, float, bool, type(None))  # types of a dictionary's keys
DTYPES = {str(dtype): dtype for dtype in STORAGES.values()}
# What else genuine files name. The loss scalers' attributes are read; of the others nothing is.
OPAQUE = re.compile(
    r"(fp16|megatron\.fp16|megatron\.optimizer|deepspeed\.(pt|runtime\.fp16))\.(loss_scaler|grad_scaler)\.\w+"
    r"|megatron\.(model|core|core\.transformer)\.enums\.\w+|megatron\.core\.rerun_state_machine\.Rerun\w+"
    r"|deepspeed\.runtime\.zero\.config\.ZeroStageEnum"
    r"|numpy\.(_?core\.multiarray\.(_reconstruct|scalar)|ndarray|dtype|dtypes\.\w+DType)"
    r"|_codecs\.encode|_io\.BytesIO|argparse\.Namespace|types\.SimpleNamespace|pathlib\.(Pure)?PosixPath|signal\.(Signals|SIG[A-Z0-9]+)"
    r"|(__builtin__|builtins)\.set|torch\.(Size|device|Tensor|nn\.parameter\.Parameter|torch_version\.TorchVersion)",
    re.ASCII,
)


@dataclass(eq=False, repr=False, slots=True)
class Opaque:
    """An object of a class that the file names: its arguments and state, and nothing that acts."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None

    def attributes(self) -> dict[str, Any]:
        """What the file says of its attributes, by name; nothing where that is no dictionary."""
        return self.state if isinstance(self.state, dict) else {}


@dataclass(frozen=True)
class Storage:
    """Where the values of a tensor lie in the file."""

    dtype: torch.dtype
    start: int  # in the file
    numel: int


class Machine:
    """Builds the object that the instructions from byte `at` of `data` on stand for, none of them beyond `end`.

    find: returns where a storage lies, by dtype, key and number of elements.
    """

    def __init__(self, data: Data, at: int, end: int, find: Callable[[torch.dtype, str, int], int]) -> None:
        self.data, self.at, self.end, self.find = data, at, min(end, at + MAX_PICKLE_BYTES), find
        self.pushes, self.others = PUSHES, OTHERS
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.named: dict[str, Any] = {}

    def run(self) -> tuple[Any, int]:
        """The object, and the byte after its instructions. ValueError for anything but data."""
        for _ in range(MAX_STEPS):
            if self.at >= self.end:
                break
            code = self.data[self.at]
            self.at += 1
            if push := self.pushes.get(code):
                self.stack.append(push(self))
            elif act := self.others.get(code):
                act(self)
            elif code == ord("."):
                return self.stack.pop(), self.at
            else:
                raise ValueError(f"damaged, or not written by torch.save: byte {self.at - 1} is {bytes([code])!r}")
        raise ValueError(f"damaged: it does not end, or has more than {MAX_STEPS:,} instructions")

    def above_mark(self) -> list[Any]:
        """The items above the last mark, taken from the stack with it."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def last(self, size: int) -> tuple[Any, ...]:
        """The last `size` items, taken from the stack."""
        items = tuple(self.stack[-size:])
        if len(items) < size:
            raise IndexError("too few items on the stack")
        del self.stack[-size:]
        return items

    def number(self, size: int) -> int:
        """The next `size` bytes, an unsigned number."""
        self.at += size
        return int.from_bytes(self.data[self.at - size : self.at], "little")

    def text(self, size: int) -> bytes:
        """The next `size` bytes. ValueError where the pickle ends before."""
        self.at += size
        if self.at > self.end:
            raise ValueError(f"ends in the middle of a string, or its pickle is larger than {MAX_PICKLE_BYTES:,} bytes")
        return bytes(self.data[self.at - size : self.at])

    def signed(self, size: int) -> int:
        """The next `size` bytes, a signed number."""
        return int.from_bytes(self.text(size), "little", signed=True)

    def line(self) -> str:
        """The text up to the end of the line, "" where that is far."""
        size = bytes(self.data[self.at : self.at + 200]).find(b"\n")
        return self.text(size + 1)[:-1].decode("ascii") if size >= 0 else ""

    def known(self) -> Any:
        """What the next two lines name, a module and a thing of it."""
        return self.thing(f"{self.line()}.{self.line()}")

    def thing(self, name: str) -> Any:
        """What `name` stands for. ValueError for a name that is not known here."""
        if name not in self.named:
            if name not in DTYPES and not self.knows(name):
                raise ValueError(
                    f"names {name[:120]!r}, which no checkpoint that is known here needs; nothing was executed"
                )
            self.named[name] = DTYPES.get(name) or Opaque(name)
            if len(self.named) > MAX_NAMES:
                raise ValueError(f"names more than {MAX_NAMES} things")
        return self.named[name]

    def knows(self, name: str) -> bool:
        """Whether genuine files name the thing `name`."""
        return name in KNOWN or OPAQUE.fullmatch(name) is not None

    def memorise(self, key: int) -> None:
        """Keep the last item under the number `key`."""
        self.memo[key] = self.stack[-1]

    def make(self) -> Any:
        """What the call of a named thing stands for."""
        args = self.stack.pop()
        return _make(self.data, self.stack.pop().name, args)

    def set_state(self) -> None:
        """Give an object its state; that of an ordered dictionary is of no use to us."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], Opaque):
            self.stack[-1].state = state


# The instructions that push a value, by their byte.
PUSHES: dict[int, Callable[[Machine], Any]] = {
    code[0]: push
    for code, push in {
        b"N": lambda m: None,
        b"\x88": lambda m: True,
        b"\x89": lambda m: False,
        b")": lambda m: (),
        b"]": lambda m: [],
        b"}": lambda m: {},
        b"K": lambda m: m.number(1),
        b"M": lambda m: m.number(2),
        b"J": lambda m: m.signed(4),
        b"\x8a": lambda m: m.signed(m.number(1)),
        b"G": lambda m: struct.unpack(">d", m.text(8))[0],
        b"X": lambda m: str(m.text(m.number(4)), "utf-8", "surrogatepass"),
        b"h": lambda m: m.memo[m.number(1)],
        b"j": lambda m: m.memo[m.number(4)],
        b"t": lambda m: tuple(m.above_mark()),
        b"\x85": lambda m: m.last(1),
        b"\x86": lambda m: m.last(2),
        b"\x87": lambda m: m.last(3),
        b"c": Machine.known,
        b"R": Machine.make,
        b"\x81": Machine.make,
        b"Q": lambda m: _storage(m.stack.pop(), m.find),
    }.items()
}
# Those that mark a place, keep the last item, or change it.
OTHERS: dict[int, Callable[[Machine], object]] = {
    code[0]: act
    for code, act in {
        b"\x80": lambda m: m.number(1),  # the protocol
        b"(": lambda m: m.marks.append(len(m.stack)),
        b"q": lambda m: m.memorise(m.number(1)),
        b"r": lambda m: m.memorise(m.number(4)),
        b"b": Machine.set_state,
        b"a": lambda m: _extend(m.stack, m.last(1)),
        b"e": lambda m: _extend(m.stack, m.above_mark()),
        b"s": lambda m: update(m.stack, m.last(2)),
        b"u": lambda m: update(m.stack, m.above_mark()),
    }.items()
}


def _extend(stack: list[Any], items: Sequence[Any]) -> None:
    if type(stack[-1]) is not list:
        raise TypeError("items for what is no list")
    stack[-1].extend(items)


def update(stack: list[Any], items: Sequence[Any], keys: tuple[type, ...] = PLAIN) -> None:
    """Keys of the types `keys` alone: a tuple's hash visits all that it holds."""
    held = stack[-1]
    if type(held) is not dict or len(items) % 2:
        raise TypeError("items for what is no dictionary")
    pairs = iter(items)
    for key in pairs:
        if type(key) not in keys or key in held:
            raise TypeError(f"a dictionary's key occurs twice, or is of type {type(key).__name__}")
        held[key] = next(pairs)


def _storage(identity: Any, find: Callable[[torch.dtype, str, int], int]) -> Storage:
    kind, of, key, _, numel, *view = identity
    if kind != "storage" or type(key) is not str or type(numel) is not int or numel < 0 or view not in ([], [None]):
        raise ValueError("damaged: a storage of an unknown form")
    return Storage(STORAGES[of.name], find(STORAGES[of.name], key, numel), numel)


def _make(data: Data, name: str, args: Any) -> Any:
    """What the call of `name` with `args` stands for."""
    if name == ORDERED_DICT and not args:
        return {}
    if name == WITH_ATTRIBUTES and args[0].name in (REBUILD_TENSOR, *PARAMETERS):
        return _make(data, args[0].name, args[2])
    if name in PARAMETERS:
        return args[0]
    if name == REBUILD_TENSOR:
        return _tensor(data, *args[:4])
    return Opaque(name, args)


def _tensor(data: Data, storage: Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """A view of the file, of at most as many elements as the storage has."""
    if (
        len(shape) > 8
        or len(stride) != len(shape)
        or any(type(n) is not int or not 0 <= n <= len(data) for n in (offset, *shape, *stride))
    ):
        raise ValueError("damaged: a tensor of an unknown form")
    if not (numel := math.prod(shape)):
        return torch.empty(shape, dtype=storage.dtype)
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if last >= storage.numel or numel > storage.numel:
        raise ValueError(f"a tensor of shape {shape} does not fit into its storage of {storage.numel} elements")
    return torch.frombuffer(
        data, dtype=storage.dtype, count=last + 1 - offset, offset=storage.start + offset * storage.dtype.itemsize
    ).as_strided(shape, stride)
