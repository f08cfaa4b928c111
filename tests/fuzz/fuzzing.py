"""Fuzz the readers of external files: change a valid file, read the changed file, and check the result.

A reader may accept a changed input, or refuse the input with one line in an exception of the types `refusals`.
Everything else is a finding: a crash, a different exception, too much processor time or memory, or an accepted input
that breaks an invariant. A seed determines the changes: other bytes, other numbers, and other values of JSON.
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

MAX_SECONDS = 1.0  # seconds of processor time
MEMORY_FACTOR, EXTRA_MEMORY = 10, 64 << 20  # A reader may use ten times the input's bytes, and 64 MiB.
MAX_MEMORY = 6 << 30  # bytes of a process during a read; torch and the tests need about 1 GiB
MAX_ERROR_LENGTH = 1000  # number of characters of an error message
PEAK = Path("/proc/self/clear_refs")  # Writing 5 to this file resets the peak of resident memory.

Files = dict[str, bytes]


@dataclass(frozen=True)
class Target:
    """A reader to fuzz.

    name: the target's name in reports.
    make: writes a valid input into an empty folder.
    read: reads it, and raises AssertionError if accepted input breaks an invariant.
    files: pattern of the files to change.
    repair: updates the hashes of changed files, so that the code after the hash check is tested.
    refusals: the errors that are allowed.
    named: whether errors must name the file or a flag.
    model: True if a read takes long, for example of a whole model.
    """

    name: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    files: str = "**/*"
    repair: Callable[[Files], None] | None = None
    refusals: tuple[type[Exception], ...] = (ValueError, OSError)
    named: bool = True
    model: bool = False


class Input:
    """Makes a valid input for a target in `folder`, and changed inputs from the valid one."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target, self.folder = target, folder
        folder.mkdir(parents=True, exist_ok=True)
        target.make(folder)
        self.valid: Files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        names = (str(path.relative_to(folder)) for path in folder.glob(target.files))
        self.changeable = sorted(name for name in names if name in self.valid)
        assert self.changeable, f"{target.name}: no file is of the form {target.files}"
        # Check that the reader accepts the valid input. This first read also imports modules and fills caches, whose
        # memory must not count later. The second read measures the usual processor time.
        target.read(folder)
        start = time.process_time()
        target.read(folder)
        self._usual = time.process_time() - start

    def changed(self, seed: int) -> Files:
        """Return {file name: changed content} for a seed."""
        rng = Random(f"{self.target.name} {seed}")
        names = rng.sample(self.changeable, min(rng.choice((1, 1, 1, 2)), len(self.changeable)))
        return self.repaired({name: b"" if rng.random() < 0.005 else mutate(self.valid[name], rng) for name in names})

    def repaired(self, changed: Files) -> Files:
        """Update the hashes with `target.repair`. Return all files that differ from the valid input."""
        files = self.valid | changed
        if self.target.repair:
            self.target.repair(files)
        return {name: data for name, data in files.items() if data != self.valid[name]}

    def attempt(self, changed: Files) -> tuple[str, str]:
        """Read the input with the changed files, and return the result of the function `attempt`. The read may take
        MAX_SECONDS longer than a read of the valid input."""
        for name, data in changed.items():
            (self.folder / name).write_bytes(data)
        place, size = str(self.folder) if self.target.named else "", sum(map(len, (self.valid | changed).values()))
        try:
            read, most = lambda: self.target.read(self.folder), MAX_SECONDS + self._usual
            return attempt(read, size, place, self.target.refusals, most)
        finally:
            for path in self.folder.rglob("*"):
                if path.is_file() and str(path.relative_to(self.folder)) not in self.valid:
                    path.unlink()  # The tested reader has made this file, which the valid input does not contain.
            for name in changed:
                (self.folder / name).write_bytes(self.valid[name])


def attempt(
    read: Callable[[], object],
    size: int,
    place: str,
    refusals: tuple[type[Exception], ...] = (ValueError,),
    most: float = MAX_SECONDS,
) -> tuple[str, str]:
    """Call `read` for an input of `size` bytes. Return ("accepted", ""), ("refused", the error's line), or (a finding,
    its details).

    place: a text that an error must contain, unless it names a flag.
    most: seconds of processor time. A slow read is tried again, because of garbage collections and busy machines.
    """
    for _ in range(3):
        if (outcome := _attempt(read, size, place, refusals, most))[0] != "slow":
            break
    return outcome


def _attempt(
    read: Callable[[], object], size: int, place: str, refusals: tuple[type[Exception], ...], most: float
) -> tuple[str, str]:
    outcome, line = "accepted", ""
    before, start = resident(), time.process_time()
    try:
        with limited_memory():
            read()
    except refusals as error:
        outcome, line = "refused", str(error)
        if "\n" in line or not 0 < len(line) <= MAX_ERROR_LENGTH:
            return f"no line: {origin(error)}", f"{line[:200]!r}, {len(line)} characters"
        if place not in line and "--" not in line:
            return f"names nothing: {origin(error)}", repr(line[:200])
    except AssertionError as error:
        return f"invariant: {origin(error)}", repr(str(error)[:200])
    except BaseException as error:
        return f"exception: {origin(error)}", repr(str(error)[:200])
    seconds, memory = time.process_time() - start, peak() - before
    if seconds > most:
        return "slow", f"{seconds:.1f} s"
    if memory > MEMORY_FACTOR * size + EXTRA_MEMORY:
        return "memory", f"{memory / 2**20:.0f} MiB for {size:,} bytes"
    return outcome, line


def refusal(read: Callable[[], object], size: int, place: str) -> str:
    outcome, line = attempt(read, size, place)
    assert outcome == "refused", (outcome, line)
    return line


def origin(error: BaseException) -> str:
    """Return the type of an error, and the file and function of its last frame in this project."""
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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Raise MemoryError inside the block if the process allocates more than MAX_MEMORY, so that the machine stays
    usable."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY if hard == resource.RLIM_INFINITY else hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


# --- changes of a file -----------------------------------------------------------------------------------------------

MAX_CHANGES = 4  # A changed file has 1 to MAX_CHANGES changes.
MAX_REPLACED = 1 << 12  # The most bytes that are replaced or inserted at once.
# a value of JSON, or a small list or object
VALUE = re.compile(rb'"(?:[^"\\\n]|\\.){0,200}"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null')
BRACKETED = re.compile(rb"[\[{][^\[\]{}]{0,2000}[\]}]")
ODD_VALUES = [
    *b"""null true false 0 -1 1 1.5 -0.0 1e999 -1e999 NaN Infinity [] {} "" "x" "\\ud800" "\\u0000" "\\n" "../x" "/"
    [[]] {"":0} [0] 2147483648 4294967296 9223372036854775807 9223372036854775808 18446744073709551616""".split(),
    b'" "',
    b"9" * 400,
    b"9" * 5000,
    b'"' + b"x" * 5000 + b'"',
    b"[" * 3000 + b"]" * 3000,
    b"[" * 100_000,
    b'{"a":' * 3000 + b"0" + b"}" * 3000,
    b'"\xff"',
    '"\N{PILE OF POO}"'.encode(),
]
ODD_BYTES = b"\0" * 100, b"\xff" * 8, b" " * MAX_REPLACED, b"\n", b"\r\n", b"\xef\xbb\xbf", b"\xed\xa0\x80"


def mutate(data: bytes, rng: Random) -> bytes:
    """Apply one to MAX_CHANGES changes to `data`. A change cuts the data, or replaces a value or bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, MAX_CHANGES))):
        at, pattern = _place(data, rng), rng.choice((VALUE, VALUE, VALUE, BRACKETED))
        found = pattern.search(data, at) or pattern.search(data)
        if rng.random() < 0.05:
            data = data[:at]
        elif found and rng.random() < 0.4:
            data = data[: found.start()] + _other_value(found[0], data, rng) + data[found.end() :]
        else:
            size = rng.choice((0, 1, 1, 1, 2, 4, 8, rng.randrange(MAX_REPLACED)))
            data = data[:at] + _other_bytes(data[at : at + size], data, rng) + data[at + size :]
    return data


def _place(data: bytes, rng: Random) -> int:
    """Choose a position, often near the beginning or the end, because headers are there."""
    near = min(len(data), 1 << rng.randrange(4, 12))
    return rng.choice((rng.randrange(near + 1), len(data) - rng.randrange(near + 1), rng.randrange(len(data) + 1)))


def _other_value(old: bytes, data: bytes, rng: Random) -> bytes:
    """Return a replacement for the value `old`: an entry of ODD_VALUES, a slightly changed number or string, another
    value of the file, or `old` twice."""
    near = old[:1] + rng.choice((b"x", b"", b"\\", b"#1")) + old[1:]
    if old.isdigit() and len(old) < 30:
        near = b"%d" % (int(old) + rng.choice((-1, 1, -int(old), 8, 2**31, 2**53)))
    other = VALUE.search(data, _place(data, rng))
    return rng.choice(
        (rng.choice(ODD_VALUES), near, near, other[0] if other else b"", old + b"," + old, b"[" + old + b"]")
    )


def _other_bytes(old: bytes, data: bytes, rng: Random) -> bytes:
    """Return a replacement for the bytes `old`: nothing, the old bytes with a flipped bit, a different number, noise,
    the old bytes repeated, or bytes from a different place."""
    size, at = len(old), _place(data, rng)
    number, top = int.from_bytes(old, "little"), 1 << 8 * size
    flipped = number ^ 1 << rng.randrange(8 * size + 1)
    numbers = flipped, 1, top - 1, top >> 1, number + 1, number - 1, 2 * number, len(data)
    new = (rng.choice(numbers) % top).to_bytes(size, rng.choice(("little", "little", "big")))
    return rng.choice(
        (b"", new, new, new, rng.randbytes(size), old * 2, old * 9, data[at : at + size], rng.choice(ODD_BYTES))
    )
