"""A kind of input from outside: how a valid one is made, changed by seed and read, and within which limits.

A reader may take the changed input, or refuse it by an error of `refusals` in one line. Anything else is a finding: a
crash, another exception, more processor time or memory than the limits, or something taken that breaks an invariant.
Changes are drawn by seed: of bytes and numbers wherever they are, and of values if the file is text.
"""

from __future__ import annotations

import contextlib
import re
import resource
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

MOST_SECONDS = 1.0  # of processor time
MOST_TIMES, MOST_MORE = 10, 64 << 20  # bytes of memory: ten times the input, and these
MOST_ADDRESSES = 4 << 30  # bytes: a reader that asks for more gets a MemoryError, and the machine is spared
LONGEST_LINE = 1000  # characters of an error
PEAK = Path("/proc/self/clear_refs")  # 5 sets the peak of the resident memory to what is resident now

Files = dict[str, bytes]


@dataclass(frozen=True)
class Target:
    """name: in reports. make: writes a valid input into an empty folder. read: reads it; AssertionError where what was
    taken breaks an invariant. files: pattern of those that are changed. repair: gives the changed files the hashes that
    they should have, so that what lies behind the hashes is reached. refusals: how it may be refused. named: an error
    says which file or flag is meant. model: reading it takes long."""

    name: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    files: str = "**/*"
    repair: Callable[[Files], None] | None = None
    refusals: tuple[type[Exception], ...] = (ValueError, OSError)
    named: bool = True
    model: bool = False


class Input:
    """A valid input of a target in `folder`, and the changed ones that are made of it."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target, self.folder = target, folder
        folder.mkdir(parents=True, exist_ok=True)
        target.make(folder)
        self.valid: Files = {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }
        self.chosen = [str(path.relative_to(folder)) for path in sorted(folder.glob(target.files)) if path.is_file()]
        assert self.chosen, f"{target.name}: no file is of the form {target.files}"
        target.read(folder)  # it is taken; and what is imported or kept on the first call is no memory of a later one

    def changed(self, seed: int) -> Files:
        """The files of input number `seed`: those that differ from the valid ones."""
        chance = Random(f"{self.target.name} {seed}")
        files = dict(self.valid)
        for name in chance.sample(self.chosen, min(chance.choice((1, 1, 1, 2)), len(self.chosen))):
            files[name] = b"" if chance.random() < 0.005 else mutate(files[name], chance)
        if self.target.repair:
            self.target.repair(files)
        return {name: data for name, data in files.items() if data != self.valid[name]}

    def usual_seconds(self) -> float:
        """The processor time of reading the valid input."""
        start = time.process_time()
        self.target.read(self.folder)
        return time.process_time() - start

    def attempt(self, seed: int, usual: float = 0.0) -> tuple[str, str]:
        """Read input number `seed`. Returns ("taken" or "refused", ""), or (a finding, an example of it). usual: seconds
        of processor time that are allowed in addition to MOST_SECONDS."""
        changed = self.changed(seed)
        for name, data in changed.items():
            (self.folder / name).write_bytes(data)
        size = sum(map(len, {**self.valid, **changed}.values()))
        try:
            return attempt(
                lambda: self.target.read(self.folder),
                size,
                self.target.refusals,
                str(self.folder) if self.target.named else "",
                MOST_SECONDS + usual,
            )
        finally:
            for path in self.folder.rglob("*"):
                if path.is_file() and str(path.relative_to(self.folder)) not in self.valid:
                    path.unlink()  # what the reader wrote
            for name in changed:
                (self.folder / name).write_bytes(self.valid[name])


def attempt(
    read: Callable[[], object], size: int, refusals: tuple[type[Exception], ...], place: str, most: float
) -> tuple[str, str]:
    """What `read` does with an input of `size` bytes, as `Input.attempt`. place: what an error has to name, a flag
    apart; "": nothing. most: seconds of processor time."""
    outcome = "taken", ""
    before, start = resident(), time.process_time()
    try:
        with bounded_addresses():
            read()
    except refusals as error:
        line = str(error)
        if "\n" in line or not line or len(line) > LONGEST_LINE:
            outcome = f"no line: {origin(error)}", f"{line[:200]!r}, {len(line)} characters"
        elif place and place not in line and "--" not in line:
            outcome = f"names nothing: {origin(error)}", repr(line[:200])
        else:
            outcome = "refused", ""
    except AssertionError as error:
        outcome = f"invariant: {origin(error)}", repr(str(error)[:200])
    except BaseException as error:
        outcome = f"exception: {origin(error)}", repr(str(error)[:200])
    seconds, memory = time.process_time() - start, peak() - before
    if seconds > most and outcome[0] in ("taken", "refused"):
        return "slow", f"{seconds:.1f} s of processor time"
    if memory > MOST_TIMES * size + MOST_MORE and outcome[0] in ("taken", "refused"):
        return "memory", f"{memory / 2**20:.0f} MiB for {size:,} bytes"
    return outcome


def origin(error: BaseException) -> str:
    """The kind of an error, and file and function of the last frame of the project's own."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/site-packages/" not in frame.filename and "/lib/python" not in frame.filename
    ]
    place = f"{'/'.join(Path(frames[-1].filename).parts[-3:])}, {frames[-1].name}" if frames else "?"
    return f"{type(error).__name__} in {place}"


def resident() -> int:
    """Bytes that are resident now; the peak is set to them, where the system does so."""
    with contextlib.suppress(OSError):
        PEAK.write_text("5")
    return peak()


def peak() -> int:
    """The most bytes that were resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@contextlib.contextmanager
def bounded_addresses() -> Iterator[None]:
    """MemoryError, inside, for whoever asks for more than MOST_ADDRESSES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + MOST_ADDRESSES
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    """Bytes of memory of its own that this process has asked for so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except OSError:
        return 0


# --- changes of a file -----------------------------------------------------------------------------------------------

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
