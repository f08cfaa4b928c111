"""A machine for pickle's instructions (protocol 2) that builds data alone.

Dictionaries, lists, tuples, strings, numbers, tensors as views of the mapped file, and `Opaque`, an inert stand-in, for
the other things that genuine files name. Nothing is imported or called because a file says so, a name that is not in
the list below is refused, and what is built is bounded by the instructions and the bytes that the file holds.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable
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
STORAGES = {f"{module}.{kind}Storage": dtype for module in ("torch", "torch.cuda") for kind, dtype in {
    "Half": torch.float16, "BFloat16": torch.bfloat16, "Float": torch.float32, "Double": torch.float64,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool}.items()}
DTYPES = {str(dtype): dtype for dtype in STORAGES.values()}
# What else genuine files name. The loss scalers' attributes are read; of the others nothing is.
OPAQUE = re.compile(
    r"(fp16|megatron\.fp16|megatron\.optimizer|deepspeed\.(pt|runtime\.fp16))\.(loss_scaler|grad_scaler)\.\w+"
    r"|megatron\.(model|core|core\.transformer)\.enums\.\w+|megatron\.core\.rerun_state_machine\.Rerun\w+"
    r"|deepspeed\.runtime\.zero\.config\.ZeroStageEnum"
    r"|numpy\.(_?core\.multiarray\.(_reconstruct|scalar)|ndarray|dtype|dtypes\.\w+DType)"
    r"|_codecs\.encode|_io\.BytesIO|argparse\.Namespace|types\.SimpleNamespace|pathlib\.(Pure)?PosixPath|signal\.Signals"
    r"|(__builtin__|builtins)\.set|torch\.(Size|device|Tensor|nn\.parameter\.Parameter|torch_version\.TorchVersion)",
    re.ASCII)


@dataclass(eq=False, repr=False)
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


def build(data: mmap.mmap, at: int, end: int, find: Callable[[torch.dtype, str, int], int]) -> tuple[Any, int]:
    """The object that the instructions from byte `at` on build, and the byte after them. find: returns where a storage
    lies, by dtype, key and number of elements. ValueError for anything but data."""
    end = min(end, at + MAX_PICKLE_BYTES)
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    named: dict[str, Any] = {}

    def above_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    def number(size: int) -> int:
        nonlocal at
        at += size
        return int.from_bytes(data[at - size:at], "little")

    def text(size: int) -> bytes:
        nonlocal at
        at += size
        if at > end:
            raise ValueError(f"ends in the middle of a string, or its pickle is larger than {MAX_PICKLE_BYTES:,} bytes")
        return data[at - size:at]

    def line() -> str:
        stop = data.find(b"\n", at, at + 200)
        return text(stop - at + 1)[:-1].decode("ascii") if stop >= 0 else ""

    for _ in range(MAX_STEPS):
        if at >= end:
            break
        at += 1
        match data[at - 1:at]:
            case b"q":
                memo[number(1)] = stack[-1]
            case b"r":
                memo[number(4)] = stack[-1]
            case b"h":
                stack.append(memo[number(1)])
            case b"j":
                stack.append(memo[number(4)])
            case b"K":
                stack.append(number(1))
            case b"M":
                stack.append(number(2))
            case b"J":
                stack.append(int.from_bytes(text(4), "little", signed=True))
            case b"\x8a":
                stack.append(int.from_bytes(text(number(1)), "little", signed=True))
            case b"G":
                stack.append(struct.unpack(">d", text(8))[0])
            case b"X":
                stack.append(str(text(number(4)), "utf-8", "surrogatepass"))
            case b"(":
                marks.append(len(stack))
            case b"t":
                stack.append(tuple(above_mark()))
            case b"\x85":
                stack[-1:] = [(stack[-1],)]
            case b"\x86":
                stack[-2:] = [(stack[-2], stack[-1])]
            case b"\x87":
                stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
            case b")":
                stack.append(())
            case b"]":
                stack.append([])
            case b"}":
                stack.append({})
            case b"N":
                stack.append(None)
            case b"\x88":
                stack.append(True)
            case b"\x89":
                stack.append(False)
            case b"c":
                if (name := f"{line()}.{line()}") not in named:
                    named[name] = _named(name)
                    if len(named) > MAX_NAMES:
                        raise ValueError(f"names more than {MAX_NAMES} things")
                stack.append(named[name])
            case b"Q":
                stack.append(_storage(stack.pop(), find))
            case b"R" | b"\x81":
                args = stack.pop()
                stack.append(_make(data, stack.pop().name, args))
            case b"b":
                state = stack.pop()
                if isinstance(stack[-1], Opaque):
                    stack[-1].state = state  # that of an ordered dictionary is of no use to us
            case b"a":
                _extend(stack, [stack.pop()])
            case b"e":
                _extend(stack, above_mark())
            case b"s":
                value = stack.pop()
                _update(stack, [stack.pop(), value])
            case b"u":
                _update(stack, above_mark())
            case b"\x80":
                number(1)
            case b".":
                return stack.pop(), at
            case other:
                raise ValueError(f"damaged, or not written by torch.save: byte {at - 1} is {other!r}")
    raise ValueError(f"damaged: it does not end, or has more than {MAX_STEPS:,} instructions")


def _extend(stack: list[Any], items: list[Any]) -> None:
    if type(stack[-1]) is not list:
        raise TypeError("items for what is no list")
    stack[-1].extend(items)


def _update(stack: list[Any], items: list[Any]) -> None:
    """Plain keys alone: a tuple's hash visits all that it holds."""
    if type(stack[-1]) is not dict or len(items) % 2:
        raise TypeError("items for what is no dictionary")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (str, int, float, bool, type(None)) or key in stack[-1]:
            raise TypeError(f"a dictionary's key occurs twice, or is of type {type(key).__name__}")
        stack[-1][key] = value


def _named(name: str) -> Any:
    if name in DTYPES:
        return DTYPES[name]
    if not (name in STORAGES or name in (ORDERED_DICT, REBUILD_TENSOR, *PARAMETERS, WITH_ATTRIBUTES)
            or OPAQUE.fullmatch(name)):
        raise ValueError(f"names {name[:120]!r}, which no checkpoint that is known here needs; nothing was executed")
    return Opaque(name)


def _storage(identity: Any, find: Callable[[torch.dtype, str, int], int]) -> Storage:
    kind, of, key, _, numel, *view = identity
    if kind != "storage" or type(key) is not str or type(numel) is not int or numel < 0 or view not in ([], [None]):
        raise ValueError("damaged: a storage of an unknown form")
    return Storage(STORAGES[of.name], find(STORAGES[of.name], key, numel), numel)


def _make(data: mmap.mmap, name: str, args: Any) -> Any:
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


def _tensor(data: mmap.mmap, storage: Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """A view of the file, of at most as many elements as the storage has."""
    if len(shape) > 8 or len(stride) != len(shape) or any(
            type(n) is not int or not 0 <= n <= len(data) for n in (offset, *shape, *stride)):
        raise ValueError("damaged: a tensor of an unknown form")
    if not (numel := math.prod(shape)):
        return torch.empty(shape, dtype=storage.dtype)
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if last >= storage.numel or numel > storage.numel:
        raise ValueError(f"a tensor of shape {shape} does not fit into its storage of {storage.numel} elements")
    return torch.frombuffer(data, dtype=storage.dtype, count=last + 1 - offset,
                            offset=storage.start + offset * storage.dtype.itemsize).as_strided(shape, stride)
