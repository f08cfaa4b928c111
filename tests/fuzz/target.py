"""A kind of input from outside: how a valid one is made, changed by seed and read, and within which limits.

A reader may take the changed input, or refuse it by an error of `refusals` in one line. Anything else is a finding: a
crash, another exception, more processor time or memory than the limits, or something taken that breaks an invariant.
"""

from __future__ import annotations

import contextlib
import resource
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.mutations import mutate

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
    says which file or flag is meant."""

    name: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    files: str = "**/*"
    repair: Callable[[Files], None] | None = None
    refusals: tuple[type[Exception], ...] = (ValueError, OSError)
    named: bool = True


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

    def attempt(self, seed: int) -> tuple[str, str]:
        """Read input number `seed`. ("taken" or "refused", "") or (a finding, an example of it)."""
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
            )
        finally:
            for path in self.folder.rglob("*"):
                if path.is_file() and str(path.relative_to(self.folder)) not in self.valid:
                    path.unlink()  # what the reader wrote
            for name in changed:
                (self.folder / name).write_bytes(self.valid[name])

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def attempt(
    read: Callable[[], object], size: int, refusals: tuple[type[Exception], ...], place: str
) -> tuple[str, str]:
    """What `read` does with an input of `size` bytes, as `Input.attempt`. place: what an error has to name, a flag
    apart; "": nothing."""
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
    if seconds > MOST_SECONDS and outcome[0] in ("taken", "refused"):
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
