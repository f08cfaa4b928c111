"""Pickles of dictionaries of strings and whole numbers, written, and read without executing anything.

Python's own unpickler calls whatever a file names. Its subclass that refuses every name still takes the sizes that a
file claims: a few bytes get a gigabyte. Here the instructions come from `pickletools`, which executes none, and those
that such a dictionary needs are the only ones that are followed.
"""

import pickletools
import struct
from collections.abc import Hashable
from typing import Any

MAX_BYTES = 4 << 20  # a vocabulary of 100,000 characters needs half of it
VALUES = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BININT", "BININT1", "BININT2", "LONG1"}
NOTHING = {"PROTO", "FRAME"}
_MARK = object()


def load_plain_pickle(data: bytes) -> Any:
    """What `data` holds: a string, a whole number, or a dictionary of them and of such dictionaries. ValueError, one
    line, for anything else."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"its {len(data):,} bytes are more than the {MAX_BYTES:,} of a vocabulary")
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        argument: Any
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name in VALUES:
                stack.append(argument)
            elif name == "EMPTY_DICT":
                stack.append({})
            elif name == "MARK":
                stack.append(_MARK)
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name == "SETITEM":
                value, key = stack.pop(), stack.pop()
                _fill(stack[-1], [key, value])
            elif name == "SETITEMS":
                items: list[Any] = []
                while (item := stack.pop()) is not _MARK:
                    items.append(item)
                _fill(stack[-1], items[::-1])
            elif name == "STOP":
                return stack.pop()
            elif name not in NOTHING:
                raise ValueError(f"it holds more than strings and numbers ({name})")
    except (IndexError, KeyError, TypeError, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(f"no pickle: {type(error).__name__}") from None
    raise ValueError("no pickle: it has no end")


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


def _fill(target: Any, items: list[Any]) -> None:
    if not isinstance(target, dict) or not all(isinstance(key, str | int) for key in items[::2]):
        raise ValueError("no pickle of a dictionary")
    keys: list[Hashable] = items[::2]
    target.update(zip(keys, items[1::2], strict=True))
