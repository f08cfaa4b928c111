"""Fuzz a reader of external input: make a valid input, change it by seed, read it, and check limits.

A reader may accept the changed input, or refuse it with an error of `refusals` in one line. Everything else is a
finding: a crash, a different exception, too much processor time or memory, or an accepted input that breaks an
invariant. The seed determines the changes: bytes and numbers anywhere, and values in text files.
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

MAX_SECONDS = 1.0  # of processor time
MEMORY_FACTOR, EXTRA_MEMORY = 10, 64 << 20  # allowed memory in bytes: ten times the input, and this
MAX_ALLOCATION = 4 << 30  # bytes: an allocation beyond this limit raises MemoryError, so the machine stays usable
MAX_ERROR_LENGTH = 1000  # characters of an error message
PEAK = Path("/proc/self/clear_refs")  # writing 5 resets the peak of resident memory

Files = dict[str, bytes]


@dataclass(frozen=True)
class Target:
    """A reader to fuzz. name: in reports. make: writes a valid input into an empty folder. read: reads it, and raises
    AssertionError if accepted input breaks an invariant. files: pattern of the files to change. repair: updates the
    hashes of changed files, so that the code after the hash check is tested. refusals: allowed errors. named: errors
    must name the file or a flag. model: reading takes long."""

    name: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    files: str = "**/*"
    repair: Callable[[Files], None] | None = None
    refusals: tuple[type[Exception], ...] = (ValueError, OSError)
    named: bool = True
    model: bool = False


class Input:
    """A valid input of a target in `folder`, and changed inputs made from it."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target, self.folder = target, folder
        folder.mkdir(parents=True, exist_ok=True)
        target.make(folder)
        self.valid: Files = {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }
        self.changeable = [
            str(path.relative_to(folder)) for path in sorted(folder.glob(target.files)) if path.is_file()
        ]
        assert self.changeable, f"{target.name}: no file is of the form {target.files}"
        # The reader must accept it. This call also imports and caches things that must not count as memory later.
        target.read(folder)

    def changed(self, seed: int) -> Files:
        """The changed files of input number `seed`."""
        rng = Random(f"{self.target.name} {seed}")
        files = dict(self.valid)
        for name in rng.sample(self.changeable, min(rng.choice((1, 1, 1, 2)), len(self.changeable))):
            files[name] = b"" if rng.random() < 0.005 else mutate(files[name], rng)
        if self.target.repair:
            self.target.repair(files)
        return {name: data for name, data in files.items() if data != self.valid[name]}

    def valid_seconds(self) -> float:
        """The processor time to read the valid input."""
        start = time.process_time()
        self.target.read(self.folder)
        return time.process_time() - start

    def attempt(self, seed: int, usual: float = 0.0) -> tuple[str, str]:
        """Read input number `seed`. Returns ("accepted" or "refused", ""), or (a finding, its details). usual: seconds of
        processor time to allow in addition to MAX_SECONDS."""
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
                MAX_SECONDS + usual,
            )
        finally:
            for path in self.folder.rglob("*"):
                if path.is_file() and str(path.relative_to(self.folder)) not in self.valid:
                    path.unlink()  # written by the reader
            for name in changed:
                (self.folder / name).write_bytes(self.valid[name])


def attempt(
    read: Callable[[], object], size: int, refusals: tuple[type[Exception], ...], place: str, most: float
) -> tuple[str, str]:
    """Call `read` for an input of `size` bytes and return the result as `Input.attempt` does. place: a text that an error
    must contain, unless it names a flag; "": no such text. most: seconds of processor time."""
    outcome = "accepted", ""
    before, start = resident(), time.process_time()
    try:
        with limited_memory():
            read()
    except refusals as error:
        line = str(error)
        if "\n" in line or not line or len(line) > MAX_ERROR_LENGTH:
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
    if seconds > most and outcome[0] in ("accepted", "refused"):
        return "slow", f"{seconds:.1f} s of processor time"
    if memory > MEMORY_FACTOR * size + EXTRA_MEMORY and outcome[0] in ("accepted", "refused"):
        return "memory", f"{memory / 2**20:.0f} MiB for {size:,} bytes"
    return outcome


def origin(error: BaseException) -> str:
    """The type of an error, and the file and function of its last frame in this project."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/site-packages/" not in frame.filename and "/lib/python" not in frame.filename
    ]
    place = f"{'/'.join(Path(frames[-1].filename).parts[-3:])}, {frames[-1].name}" if frames else "?"
    return f"{type(error).__name__} in {place}"


def resident() -> int:
    """Reset the peak of resident memory, if the system supports it, and return the resident bytes."""
    with contextlib.suppress(OSError):
        PEAK.write_text("5")
    return peak()


def peak() -> int:
    """The peak of resident memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Raise MemoryError inside the block if the process allocates more than MAX_ALLOCATION."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + MAX_ALLOCATION
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    """The bytes of private memory that this process has allocated so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except OSError:
        return 0


# --- changes of a file -----------------------------------------------------------------------------------------------

MAX_CHANGES = 4  # in one file
MAX_INSERTED = 1 << 12  # bytes to insert or repeat at once
SIZES = (1, 2, 4, 8)  # bytes of a binary number
# A JSON value in text.
WORD = re.compile(rb'"(?:[^"\\\n]|\\.){0,200}"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null')
BRACKETED = re.compile(rb"[\[{][^\[\]{}]{0,2000}[\]}]")
ODD_VALUES = (
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


def mutate(data: bytes, rng: Random) -> bytes:
    """Apply one to MAX_CHANGES changes to `data`."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, MAX_CHANGES))):
        kinds = TEXT_CHANGES + BYTE_CHANGES if WORD.search(changed, 0, 1 << 16) else BYTE_CHANGES
        rng.choice(kinds)(changed, rng)
    return bytes(changed)


def _place(data: bytearray, rng: Random) -> int:
    """Choose a position, often near the beginning or the end, where headers are."""
    where = rng.random()
    near = min(len(data), 1 << rng.randrange(4, 12))
    return (
        rng.randrange(near + 1)
        if where < 0.4
        else len(data) - rng.randrange(near + 1)
        if where < 0.55
        else rng.randrange(len(data) + 1)
    )


def _span(data: bytearray, rng: Random) -> slice:
    start = _place(data, rng)
    return slice(start, start + rng.randrange(1, min(MAX_INSERTED, len(data) + 2)))


def _flip(data: bytearray, rng: Random) -> None:
    if data:
        data[min(_place(data, rng), len(data) - 1)] ^= 1 << rng.randrange(8)


def _byte(data: bytearray, rng: Random) -> None:
    if data:
        data[min(_place(data, rng), len(data) - 1)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _number(data: bytearray, rng: Random) -> None:
    size = rng.choice(SIZES)
    at = max(0, min(_place(data, rng), len(data) - size))
    before = int.from_bytes(data[at : at + size], "little")
    top = 1 << 8 * size
    value = (
        rng.choice(
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
                1 << rng.randrange(8 * size),
            )
        )
        % top
    )
    data[at : at + size] = value.to_bytes(size, rng.choice(("little", "little", "big")))


def _remove(data: bytearray, rng: Random) -> None:
    del data[_span(data, rng)]


def _repeat(data: bytearray, rng: Random) -> None:
    part = bytes(data[_span(data, rng)])
    at = _place(data, rng)
    data[at:at] = part[:MAX_INSERTED] * rng.choice((1, 1, 2, 8))


def _swap(data: bytearray, rng: Random) -> None:
    first, second = _span(data, rng), _span(data, rng)
    data[first], data[second] = bytes(data[second]), bytes(data[first])


def _insert(data: bytearray, rng: Random) -> None:
    at = _place(data, rng)
    data[at:at] = rng.choice(
        (
            rng.randbytes(rng.randrange(1, 64)),
            b"\0" * rng.randrange(1, MAX_INSERTED),
            b" " * MAX_INSERTED,
            b"\n",
            b"\r\n",
            b"\xef\xbb\xbf",
            b"\xed\xa0\x80",
        )
    )


def _cut(data: bytearray, rng: Random) -> None:
    del data[_place(data, rng) :]


def _match(pattern: re.Pattern[bytes], data: bytearray, rng: Random) -> re.Match[bytes] | None:
    """A match of the pattern after a random position, else the first match."""
    return pattern.search(data, _place(data, rng)) or pattern.search(data)


def _value(data: bytearray, rng: Random) -> None:
    if found := _match(WORD, data, rng):
        data[found.start() : found.end()] = rng.choice(ODD_VALUES)


def _other_value(data: bytearray, rng: Random) -> None:
    """Replace a value by a different value of the file. This also gives duplicate keys."""
    found, other = _match(WORD, data, rng), _match(WORD, data, rng)
    if found and other:
        data[found.start() : found.end()] = other[0]


def _near_value(data: bytearray, rng: Random) -> None:
    """Change a number slightly, or add a character to a string."""
    if found := _match(WORD, data, rng):
        word = found[0]
        if word.isdigit() and len(word) < 30:
            near = str(int(word) + rng.choice((-1, 1, -int(word), 8, 2**31, 2**53))).encode()
        else:
            near = word[:1] + rng.choice((b"x", b"", b"\\", b"#1")) + word[1:]
        data[found.start() : found.end()] = near


def _bracket(data: bytearray, rng: Random) -> None:
    """Replace a whole list or object, or duplicate it."""
    if found := _match(BRACKETED, data, rng):
        data[found.start() : found.end()] = rng.choice(
            (*ODD_VALUES, found[0] + b"," + found[0], b"[" + found[0] + b"]")
        )


Change = Callable[[bytearray, Random], None]
BYTE_CHANGES: list[Change] = [_flip, _flip, _byte, _byte, _number, _number, _remove, _repeat, _swap, _insert, _cut]
TEXT_CHANGES: list[Change] = [_value, _value, _value, _other_value, _near_value, _near_value, _bracket]
