"""Read pickles without executing anything. restricted_pickle.py is the project's only unpickler.

A checkpoint from someone else may be hostile, and Python's unpickler calls any function that a file names. A subclass
with a restricted `find_class` is still unsafe: it allocates the sizes that a file claims, spends years on hashing
nested keys, and crashes at a deeply nested tuple. `read_pickle` builds only dictionaries, lists, tuples, strings,
numbers, and `PickledObject` for the classes that its caller allows. The reader imports and calls nothing, and refuses
names that its caller does not allow. The size of the file and a maximum number of instructions limit what the reader
builds. The reader supports the instructions of protocols 2 to 5 that dictionaries of data need.
"""

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 16 << 20
# The maximum cost of a pickle: an instruction that only uses the memo costs 1, any other instruction costs 5. A
# `.metadata` file of a 72-layer model with Adam's state at tensor-parallel size 8 has 1.1 million instructions, of
# which half only use the memo.
BUDGET = 3_450_000
CHEAP = frozenset(b"\x94hjKqr")
MAX_NAMES = 200
NO_NAMES = re.compile("(?!)")


@dataclass(eq=False, repr=False, slots=True)
class PickledObject:
    """A placeholder for an object whose class the file names. The placeholder stores only the arguments and the state
    that the file gives for the object."""

    name: str
    args: Any = ()
    state: Any = None

    def attributes(self) -> dict[str, Any]:
        """Return the object's attributes by name, or {} if its state is not a dictionary."""
        return self.state if isinstance(self.state, dict) else {}


def read_pickle(
    data: bytes | memoryview,
    at: int = 0,
    end: int | None = None,
    *,
    names: re.Pattern[str] = NO_NAMES,
    values: Mapping[str, Any] | None = None,
    call: Callable[[str, Any], Any] = PickledObject,
    persistent: Callable[[Any], Any] | None = None,
    budget: int = BUDGET,
) -> tuple[Any, int]:
    """Read the pickle from byte `at` of `data`, at most to `end`. Return the object and the index of the byte after the
    pickle.

    names: a pattern of the allowed classes and functions, "module.name", which become `PickledObject`.
    values: other allowed names, and the object for each of them.
    call: a function that returns the result of a call in the pickle, given the name and the arguments.
    persistent: a function that returns the object for a persistent id.

    Raises ValueError for a damaged pickle, and for a name that is not allowed.
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
            raise ValueError("names a class by something that is not a short string")
        name = f"{module}.{thing}"
        if name not in known:
            if not names.fullmatch(name):
                raise ValueError(f"names {name[:120]!r}, which no supported file needs; nothing was executed")
            known[name] = PickledObject(name)
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
                        raise IndexError("the memo's indices are not consecutive")
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
                case 0x62:  # build; attributes of a dictionary subclass are ignored
                    state = stack.pop()
                    if isinstance(stack[-1], PickledObject):
                        stack[-1].state = state
                case 0x73 | 0x75:  # setitem, setitems
                    items = last(2) if code == 0x73 else above_mark()
                    _update(stack[-1], items)
                case 0x61 | 0x65:  # append, appends
                    items = last(1) if code == 0x61 else above_mark()
                    if type(stack[-1]) is not list:
                        raise TypeError("appends to something that is not a list")
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
                    raise ValueError(f"damaged, or not a pickle of data: byte {at - 1} is {bytes([code])!r}")
    except (TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"damaged, or not a pickle of data ({type(error).__name__}: {str(error)[:80]!r})") from error
    raise ValueError("damaged: it does not end, or has more instructions than any supported file")


def _update(held: Any, items: Sequence[Any]) -> None:
    """Set items of a dictionary. A tuple is refused as a key, because hashing nested tuples can take years."""
    if type(held) is not dict or len(items) % 2:
        raise TypeError("sets items of something that is not a dictionary")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (str, int, float, bool, type(None), PickledObject) or key in held:
            raise TypeError(f"a dictionary's key occurs twice, or is of type {type(key).__name__}")
        held[key] = value
