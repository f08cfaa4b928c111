"""Which of several ways to compute the same thing is fastest on this processor: timed once, then kept.

What wins on a processor with AMX loses on one without, so no rule is right for both. The ways of an operation are
timed when it is first used, by turns, on tensors of its kind (dtype, shape class): for `SECONDS`, or longer where that
is too short for `ROUNDS` of each. Another way than the first must be faster by `MARGIN`.

Ways differ in rounding, so what was chosen is kept in `choices_file()`, by processor, cores, threads, torch version and
the variables that take instructions away. What is promised: two runs on one machine compute by the same ways, and so do
all ranks on it, for the first to ask measures while the others wait and then read. What is not: that machines of two
kinds agree, or that runs do whose user has no folder to write to; they measure anew in each process. Deleting the file
has everything measured again.

$MPU_KERNELS fixes it: "first" takes the first way everywhere, without timing; "linear=transposed,weight_gradient=parts"
names ways, the other operations being measured.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

Way = Callable[..., Any]

VARIABLE = "MPU_KERNELS"
MARGIN = 1.05
SECONDS = 0.03  # of timing, but at least `ROUNDS` of each way
ROUNDS = 3
LOCK_SECONDS = 10.0  # the longest that a process waits for another one's timing


def fastest(times: Mapping[str, float]) -> str:
    """The first of `times` that no later one beats by `MARGIN`, so that two runs on one machine agree."""
    names = iter(times)
    chosen = next(names)
    for name in names:
        if times[name] * MARGIN < times[chosen]:
            chosen = name
    return chosen


class Kernels:
    """The ways to compute one operation, by name. All take the same arguments and give the same result within rounding;
    none changes its arguments, and all draw the same random numbers, if any."""

    all: ClassVar[dict[str, Kernels]] = {}

    def __init__(self, operation: str, ways: dict[str, Way], timed: Callable[[Way], Way] = lambda way: way) -> None:
        """timed: makes of a way what is timed in its place, such as its forward and backward together."""
        self.operation, self.ways, self._timed = operation, ways, timed
        self._found: dict[Any, Way] = {}
        Kernels.all[operation] = self

    def best(self, kind: tuple[Any, ...], inputs: Callable[[], tuple[Any, ...]]) -> Way:
        """The way for arguments of `kind`, which `inputs` makes an example of. Inside a compiled region nothing is
        measured: the way is the one that this process found before, or the first."""
        way = self._found.get(kind)
        if way is None:
            if torch.compiler.is_compiling():
                return next(iter(self.ways.values()))
            way = self._found[kind] = self.ways[self._choose(kind, inputs)]
        return way

    def forget(self) -> None:
        """What this process found; the file stays."""
        self._found.clear()

    def _choose(self, kind: tuple[Any, ...], inputs: Callable[[], tuple[Any, ...]]) -> str:
        forced = _forced()
        if self.operation in forced:
            return forced[self.operation]
        if "first" in forced:
            return next(iter(self.ways))
        path, key = choices_file(), " ".join(map(str, (self.operation, *kind)))
        with _lock(path):
            kept, here = _read(path), machine()
            mine = kept[here] = kept[here] if isinstance(kept.get(here), dict) else {}
            entry = mine.get(key)
            for name in self.ways:  # anything can stand in the file
                if isinstance(entry, dict) and entry.get("chosen") == name:
                    return name
            times = time_ways({name: self._timed(way) for name, way in self.ways.items()}, inputs())
            chosen = fastest(times)
            mine[key] = {"chosen": chosen, "ms": {name: round(ms, 4) for name, ms in times.items()}}
            _write(path, kept)
        return chosen


def time_ways(ways: Mapping[str, Way], arguments: tuple[Any, ...]) -> dict[str, float]:
    """Milliseconds of each way, its fastest run: the ways take turns, so that a busy moment hits all of them, and what
    else runs on the machine can only add to a time."""
    times = {name: float("inf") for name in ways}
    # What a caller keeps of tensors (activation checkpointing counts them) has nothing to do with those of the timing.
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        for way in ways.values():
            way(*arguments)  # warms up
        began, rounds = time.perf_counter(), 0
        while rounds < ROUNDS or time.perf_counter() - began < SECONDS:
            for name, way in ways.items():
                start = time.perf_counter()
                way(*arguments)
                times[name] = min(times[name], 1e3 * (time.perf_counter() - start))
            rounds += 1
    return times


def choices_file() -> Path | None:
    """kernels.json in the user's cache; None for a user without a home."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return folder / "gpt2-model-parallel" / "kernels.json" if folder.is_absolute() else None


def machine() -> str:
    """What a choice holds for."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        first = ""
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    # Virtual machines call different processors by one name; their features tell them apart.
    wanted = ("cpu family", "model", "stepping", "flags", "Features", "CPU implementer", "CPU part", "cache size")
    features = hashlib.sha256(repr([facts.get(name) for name in wanted]).encode()).hexdigest()[:8]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limits = [f"{name}={os.environ[name]}" for name in (
        "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")
        if name in os.environ]
    name = facts.get("model name") or platform.processor() or platform.machine()
    return ", ".join([f"{name} ({features})", f"{cores} cores", f"{torch.get_num_threads()} threads",
                      f"torch {torch.__version__}", *limits])


def _forced() -> dict[str, str]:
    """$MPU_KERNELS as {operation: way}, with "first" as a key of its own. ValueError where it names none."""
    forced = {}
    for item in filter(None, os.environ.get(VARIABLE, "").split(",")):
        operation, _, way = item.strip().partition("=")
        ways = {"first": [""], **{name: [*kernels.ways] for name, kernels in Kernels.all.items()}}
        if way not in ways.get(operation, ()):
            raise ValueError(f"{VARIABLE}={os.environ[VARIABLE]}: {item!r} is neither \"first\" nor an operation with "
                             "one of its ways: " + "; ".join(
                                 f"{name}={'|'.join(found)}" for name, found in ways.items() if name != "first"))
        forced[operation] = way
    return forced


def _read(path: Path | None) -> dict[str, Any]:
    """What is kept; nothing where the file is absent, damaged or something else: the next choice replaces it."""
    try:
        kept = json.loads(path.read_bytes()) if path else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _write(path: Path | None, kept: dict[str, Any]) -> None:
    """Replace the file as a whole; where that cannot be, the choice holds for this process."""
    if path is None:
        return
    new = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".kernels", delete=False) as file:
            new = file.name
            json.dump(kept, file, indent=1, sort_keys=True)
        os.replace(new, path)
    except OSError:
        if new is not None:
            with contextlib.suppress(OSError):
                os.unlink(new)


@contextlib.contextmanager
def _lock(path: Path | None) -> Iterator[None]:
    """One process at a time where the filesystem has locks; nobody waits for ever."""
    try:
        if path is None:
            raise OSError
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("w")
    except OSError:
        yield
        return
    with file:
        end = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.002)
            except OSError:
                break
        yield
