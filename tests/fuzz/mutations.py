"""Changes of a file, drawn by seed: of bytes and numbers wherever they are, and of values where the file is text."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

MOST = 4  # changes of one file
LONGEST = 1 << 12  # bytes that are inserted or repeated at once
SIZES = (1, 2, 4, 8)  # bytes of a number
# What stands for a value of JSON in text.
WORD = re.compile(rb'"(?:[^"\\\n]|\\.){0,200}"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null')
BRACKETED = re.compile(rb"[\[{][^\[\]{}]{0,2000}[\]}]")
ODD = (
    b"null",
    b"true",
    b"false",
    b"0",
    b"-1",
    b"1",
    b"1.5",
    b"-0.0",
    b"1e999",
    b"-1e999",
    b"NaN",
    b"Infinity",
    b"[]",
    b"{}",
    b'""',
    b'" "',
    b'"x"',
    b'"\\ud800"',
    b'"\\u0000"',
    b'"\\n"',
    b'"../x"',
    b'"/"',
    b"[[]]",
    b'{"":0}',
    b"[0]",
    b"2147483648",
    b"4294967296",
    b"9223372036854775807",
    b"9223372036854775808",
    b"18446744073709551616",
    b"1" + b"0" * 30,
    b"9" * 400,
    b"9" * 5000,
    b'"' + b"x" * 5000 + b'"',
    b"[" * 3000 + b"]" * 3000,
    b"[" * 100_000,
    b'{"a":' * 3000 + b"0" + b"}" * 3000,
    b'"\xff"',
    '"\N{PILE OF POO}"'.encode(),
)


def mutate(data: bytes, chance: Random) -> bytes:
    """`data` with one to MOST changes."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, MOST))):
        kinds = OF_TEXT + OF_BYTES if WORD.search(changed, 0, 1 << 16) else OF_BYTES
        chance.choice(kinds)(changed, chance)
    return bytes(changed)


def _place(data: bytearray, chance: Random) -> int:
    """The headers of files are at their beginnings and ends."""
    where = chance.random()
    near = min(len(data), 1 << chance.randrange(4, 12))
    return (
        chance.randrange(near + 1)
        if where < 0.4
        else len(data) - chance.randrange(near + 1)
        if where < 0.55
        else chance.randrange(len(data) + 1)
    )


def _span(data: bytearray, chance: Random) -> slice:
    start = _place(data, chance)
    return slice(start, start + chance.randrange(1, min(LONGEST, len(data) + 2)))


def _flip(data: bytearray, chance: Random) -> None:
    if data:
        data[min(_place(data, chance), len(data) - 1)] ^= 1 << chance.randrange(8)


def _byte(data: bytearray, chance: Random) -> None:
    if data:
        data[min(_place(data, chance), len(data) - 1)] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))


def _number(data: bytearray, chance: Random) -> None:
    size = chance.choice(SIZES)
    at = max(0, min(_place(data, chance), len(data) - size))
    before = int.from_bytes(data[at : at + size], "little")
    top = 1 << 8 * size
    value = (
        chance.choice(
            (
                0,
                1,
                top - 1,
                top >> 1,
                (top >> 1) - 1,
                before + 1,
                before - 1,
                2 * before,
                len(data),
                1 << chance.randrange(8 * size),
            )
        )
        % top
    )
    data[at : at + size] = value.to_bytes(size, chance.choice(("little", "little", "big")))


def _remove(data: bytearray, chance: Random) -> None:
    del data[_span(data, chance)]


def _repeat(data: bytearray, chance: Random) -> None:
    part = bytes(data[_span(data, chance)])
    at = _place(data, chance)
    data[at:at] = part[:LONGEST] * chance.choice((1, 1, 2, 8))


def _swap(data: bytearray, chance: Random) -> None:
    first, second = _span(data, chance), _span(data, chance)
    data[first], data[second] = bytes(data[second]), bytes(data[first])


def _insert(data: bytearray, chance: Random) -> None:
    at = _place(data, chance)
    data[at:at] = chance.choice(
        (
            chance.randbytes(chance.randrange(1, 64)),
            b"\0" * chance.randrange(1, LONGEST),
            b" " * LONGEST,
            b"\n",
            b"\r\n",
            b"\xef\xbb\xbf",
            b"\xed\xa0\x80",
        )
    )


def _cut(data: bytearray, chance: Random) -> None:
    del data[_place(data, chance) :]


def _match(pattern: re.Pattern[bytes], data: bytearray, chance: Random) -> re.Match[bytes] | None:
    """One of the places where the pattern is, the first after a random one."""
    return pattern.search(data, _place(data, chance)) or pattern.search(data)


def _value(data: bytearray, chance: Random) -> None:
    if found := _match(WORD, data, chance):
        data[found.start() : found.end()] = chance.choice(ODD)


def _other_value(data: bytearray, chance: Random) -> None:
    """A value of the file in the place of another, and so a key that occurs twice."""
    found, other = _match(WORD, data, chance), _match(WORD, data, chance)
    if found and other:
        data[found.start() : found.end()] = other[0]


def _near_value(data: bytearray, chance: Random) -> None:
    """A number that is a little off, or a string with a character more."""
    if found := _match(WORD, data, chance):
        word = found[0]
        if word.isdigit() and len(word) < 30:
            near = str(int(word) + chance.choice((-1, 1, -int(word), 8, 2**31, 2**53))).encode()
        else:
            near = word[:1] + chance.choice((b"x", b"", b"\\", b"#1")) + word[1:]
        data[found.start() : found.end()] = near


def _bracket(data: bytearray, chance: Random) -> None:
    """A whole list or object is another, or is there twice."""
    if found := _match(BRACKETED, data, chance):
        data[found.start() : found.end()] = chance.choice((*ODD, found[0] + b"," + found[0], b"[" + found[0] + b"]"))


Change = Callable[[bytearray, Random], None]
OF_BYTES: list[Change] = [_flip, _flip, _byte, _byte, _number, _number, _remove, _repeat, _swap, _insert, _cut]
OF_TEXT: list[Change] = [_value, _value, _value, _other_value, _near_value, _near_value, _bracket]
