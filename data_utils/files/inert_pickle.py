"""Pickles read without executing anything: the only unpickler of the program.

Python's own calls whatever a file names. A subclass of it that refuses names still takes the sizes that a file claims,
hashes nested keys for years, and ends the process at a tuple that is nested deeply. The machine here builds dictionaries,
lists, tuples, strings, numbers, and `Inert`, a stand-in for the classes on its caller's list. It imports and calls nothing,
and refuses every other name. The file's bytes and a budget of instructions bound what it builds. It follows the
instructions of protocols 2 to 5 that dictionaries of data need.
"""

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 16 << 20
# Instructions that make nothing cost one, the others five. A `.metadata` of a 72-layer model with Adam's state at
# tensor-parallel size 8 has 1.1 million instructions, half of which only repeat or remember what is there.
BUDGET = 3_450_000
CHEAP = frozenset(b"\x94hjKqr")
MAX_NAMES = 200
NO_NAMES = re.compile("(?!)")


@dataclass(eq=False, repr=False, slots=True)
class Inert:
    """An object of a class that the file names: its arguments and state, and nothing that acts."""

    name: str
    args: Any = ()
    state: Any = None

    def attributes(self) -> dict[str, Any]:
        """The attributes that the file gives it, by name; nothing if that is not a dictionary."""
        return self.state if isinstance(self.state, dict) else {}


def read_pickle(
    data: bytes | memoryview,
    at: int = 0,
    end: int | None = None,
    *,
    names: re.Pattern[str] = NO_NAMES,
    values: Mapping[str, Any] | None = None,
    call: Callable[[str, Any], Any] = Inert,
    persistent: Callable[[Any], Any] | None = None,
    budget: int = BUDGET,
) -> tuple[Any, int]:
    """The object that the instructions from byte `at` of `data` to `end` stand for, and the byte after them.

    names: of classes and functions, "module.name", for which an `Inert` stands. values: what other names stand for.
    call: gives the result of a call, by the name and the arguments. persistent: gives what a persistent id stands for.
    ValueError, one line, for anything else.
    """
    end = min(len(data) if end is None else end, at + MAX_BYTES)
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []
    known: dict[str, Any] = dict(values or {})
    most = len(known) + MAX_NAMES
    push = stack.append

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        if at > end:
            raise ValueError(f"ends in the middle of a string, or is larger than {MAX_BYTES:,} bytes")
        return bytes(data[at - size : at])

    def number(size: int, signed: bool = False) -> int:
        return int.from_bytes(take(size), "little", signed=signed)

    def line() -> str:
        size = bytes(data[at : at + 200]).find(b"\n")
        return take(size + 1)[:-1].decode("ascii") if size >= 0 else ""

    def last(size: int) -> list[Any]:
        if len(stack) < size:
            raise IndexError("too few items on the stack")
        items = stack[len(stack) - size :]
        del stack[len(stack) - size :]
        return items

    def above_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    def named(module: Any, thing: Any) -> Any:
        if type(module) is not str or type(thing) is not str or len(module) + len(thing) > 200:
            raise ValueError("names something with what is not a short string")
        name = f"{module}.{thing}"
        if name not in known:
            if not names.fullmatch(name):
                raise ValueError(f"names {name[:120]!r}, which no file that is known here needs; nothing was executed")
            known[name] = Inert(name)
            if len(known) > most:
                raise ValueError(f"names more than {MAX_NAMES} things")
        return known[name]

    try:
        while budget > 0 and at < end:
            code = data[at]
            at += 1
            budget -= 1 if code in CHEAP else 5
            match code:
                case 0x94:  # memoize
                    memo.append(stack[-1])
                case 0x68:  # binget
                    push(memo[data[at]])
                    at += 1
                case 0x4B:  # binint1
                    push(data[at])
                    at += 1
                case 0x6A:  # long_binget
                    push(memo[number(4)])
                case 0x71 | 0x72:  # binput, long_binput
                    if (key := number(1 if code == 0x71 else 4)) > len(memo):
                        raise IndexError("what is remembered is not numbered one by one")
                    memo[key : key + 1] = [stack[-1]]
                case 0x85 | 0x86 | 0x87:  # tuple1, tuple2, tuple3
                    push(tuple(last(code - 0x84)))
                case 0x58 | 0x8C:  # binunicode, short_binunicode
                    push(str(take(number(4 if code == 0x58 else 1)), "utf-8", "surrogatepass"))
                case 0x28:  # mark
                    marks.append(len(stack))
                case 0x74:  # tuple
                    push(tuple(above_mark()))
                case 0x52 | 0x81:  # reduce, newobj
                    of, args = last(2)
                    push(call(of.name, args))
                case 0x62:  # build; the attributes of a dictionary are of no use here
                    state = stack.pop()
                    if isinstance(stack[-1], Inert):
                        stack[-1].state = state
                case 0x73 | 0x75:  # setitem, setitems
                    items = last(2) if code == 0x73 else above_mark()
                    _update(stack[-1], items)
                case 0x61 | 0x65:  # append, appends
                    items = last(1) if code == 0x61 else above_mark()
                    if type(stack[-1]) is not list:
                        raise TypeError("items for what is not a list")
                    stack[-1].extend(items)
                case 0x4E:
                    push(None)
                case 0x88 | 0x89:
                    push(code == 0x88)
                case 0x29:
                    push(())
                case 0x5D:
                    push([])
                case 0x7D:
                    push({})
                case 0x4D:  # binint2
                    push(number(2))
                case 0x4A:  # binint
                    push(number(4, signed=True))
                case 0x8A:  # long1
                    push(number(number(1), signed=True))
                case 0x47:  # binfloat
                    push(struct.unpack(">d", take(8))[0])
                case 0x63:  # global
                    push(named(line(), line()))
                case 0x93:  # stack_global
                    push(named(*last(2)))
                case 0x51 if persistent:  # binpersid
                    push(persistent(stack.pop()))
                case 0x80 | 0x95:  # proto, frame
                    take(1 if code == 0x80 else 8)
                case 0x2E:  # stop
                    return stack.pop(), at
                case _:
                    raise ValueError(f"damaged, or no pickle of data: byte {at - 1} is {bytes([code])!r}")
    except (TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"damaged, or no pickle of data ({type(error).__name__}: {str(error)[:80]!r})") from error
    raise ValueError("damaged: it does not end, or has more instructions than any file that is known here")


def _update(held: Any, items: Sequence[Any]) -> None:
    """Only keys whose hash takes no time: that of a tuple visits all that is in it."""
    if type(held) is not dict or len(items) % 2:
        raise TypeError("items for what is not a dictionary")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (str, int, float, bool, type(None), Inert) or key in held:
            raise TypeError(f"a dictionary's key occurs twice, or is of type {type(key).__name__}")
        held[key] = value


def plain_pickle(value: str | int | dict[Any, Any]) -> bytes:
    """The pickle, of protocol 2, of a string, a number of 32 bits, or a dictionary of them and of such dictionaries."""
    return b"\x80\x02" + _written(value) + b"."


def _written(value: Any) -> bytes:
    if isinstance(value, str):
        data = value.encode("utf-8")
        return b"X" + struct.pack("<I", len(data)) + data
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    return b"}(" + b"".join(_written(key) + _written(of_key) for key, of_key in value.items()) + b"u"
