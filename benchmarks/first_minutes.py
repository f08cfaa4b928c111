#!/usr/bin/env python3
"""The first minutes on a GPU, part 1 of benchmarks/gpu.sh: what must be known before anything is compared.

    python benchmarks/first_minutes.py --output DIR              # on a GPU, under 9 minutes
    python benchmarks/first_minutes.py --output DIR --smoke      # tiny models on the CPU: do all stages run?

The stages, in this order: `machine`, `modes`, `tables`, `kernels`, `steps`, `tests`; benchmarks/gpu/stages.py and
tables.py say what each measures. A stage runs in a process of its own with a time limit, and writes each of its cases
into DIR/first_minutes.json as soon as it is measured:

    {"stages": {<stage>: {"complete": true, "cases": {<case>: {..., "seconds": 1.2}}}}}

So a time-out loses one case. The same command goes on with what is not there yet, or has failed, as long as GPU and
versions are the same. docs/how-to/gpu.md says how to read the results.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch

from benchmarks import harness

BROKEN = 3  # the exit code of a process whose CUDA context an error has left unusable


@dataclass(frozen=True)
class Stage:
    """limit: seconds at most. least: seconds without which it does not begin."""

    limit: float
    least: float


STAGES = {
    "machine": Stage(60, 10),
    "modes": Stage(100, 30),
    "tables": Stage(130, 40),
    "kernels": Stage(130, 60),
    "steps": Stage(260, 60),
    "tests": Stage(300, 60),
}


class BrokenContext(Exception):
    """CUDA answers everything with an error from now on: the stage goes on in another process."""


class Cases:
    """Measures and records the cases of one stage. path: the part's JSON. call: names this call of the part. A case
    that stands there already is not measured again; one that failed is, by a later call."""

    def __init__(self, path: Path, stage: str, call: str) -> None:
        self.folder, self._path, self._stage, self._call = path.parent, path, stage, call

    def run(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Measure a case, unless it is there. What `work` returns is JSON; what it raises becomes {"failed": …}."""
        known = json.loads(self._path.read_text())["stages"].get(self._stage, {"cases": {}})["cases"].get(name)
        if known and ("failed" not in known or known["call"] == self._call):
            return
        began, broken = time.monotonic(), False
        try:
            found = work()
        except Exception as error:
            text = traceback.format_exc()
            print(text, flush=True)
            broken = is_broken(error)
            found = {"failed": harness.last_line(text), "traceback": harness.without_paths(text).splitlines()}
            del error
        head = {"seconds": round(time.monotonic() - began, 2), "call": self._call, "commit": harness.commit()}
        self._change(lambda stage: stage["cases"].update({name: {**found, **head}}))
        plain = {k: f"{v:,.4g}" if isinstance(v, float) else f"{v}" for k, v in found.items() if is_plain(v)}
        figures = ", ".join(f"{key} {value}" for key, value in plain.items()) or f"{len(found)} entries"
        print(f"{self._stage}: {name}: {'FAILED: ' * ('failed' in found)}{figures}", flush=True)
        if broken:
            raise BrokenContext
        free()

    def finish(self) -> None:
        """Every case of the stage was measured, or failed."""
        self._change(lambda stage: stage.update(complete=True))

    def _change(self, change: Callable[[dict[str, Any]], None]) -> None:
        result = json.loads(self._path.read_text())
        change(result["stages"].setdefault(self._stage, {"complete": False, "cases": {}}))
        harness.write(self._path, result)


def is_plain(value: object) -> bool:
    return isinstance(value, (int, float, str)) and len(str(value)) < 80


def is_broken(error: Exception) -> bool:
    """Whether CUDA answers every later call with the same error, unlike memory that is lacking."""
    return not isinstance(error, torch.cuda.OutOfMemoryError) and "CUDA error" in str(error)


def free() -> None:
    """Free what a case has left, so that the next one finds the device empty and a peak of its own."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--stages", metavar="NAME,NAME", default=",".join(STAGES), help="only these")
    parser.add_argument("--again", action="store_true", help="measure also what the JSON in the folder holds already")
    budget = "of the whole call: a stage that no longer fits is left out (default: 515)"
    parser.add_argument("--budget", type=float, metavar="S", default=515.0, help=budget)
    for internal in ("--inside", "--scratch", "--call"):  # this process is a stage's own
        parser.add_argument(internal, help=argparse.SUPPRESS)
    chosen = harness.options(parser, argv)
    chosen.stages = chosen.stages.split(",")
    if unknown := set(chosen.stages) - STAGES.keys():
        parser.error(f"--stages: there is no {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    return chosen


def begin(path: Path, stages: list[str], *, smoke: bool, again: bool) -> None:
    """The JSON that the stages write into: an earlier one of the same GPU and versions goes on, without the stages that
    are measured again."""
    head: dict[str, Any] = {**harness.header("first minutes"), "smoke": smoke}
    known = harness.earlier(path, head, "smoke") or {"stages": {}}
    kept = {name: found for name, found in known["stages"].items() if not again or name not in stages}
    harness.write(path, {**head, "stages": kept})


def is_done(path: Path, name: str) -> bool:
    """Whether a stage has measured all of its cases, and none has failed."""
    stage = json.loads(path.read_text())["stages"].get(name, {})
    return bool(stage.get("complete")) and not any("failed" in case for case in stage["cases"].values())


def run_stages(path: Path, stages: list[str], budget: float, start: Callable[[str, float], int | None]) -> None:
    """One after the other, each as `start(name, limit in seconds)` runs it: an exit code, None after a time-out."""
    end = time.monotonic() + budget
    for name in stages:
        stage, stage_end = STAGES[name], min(end, time.monotonic() + STAGES[name].limit)
        if is_done(path, name):
            print(f"{name}: is there already", flush=True)
            continue
        if (left := stage_end - time.monotonic()) < stage.least:
            print(f"{name}: NOT RUN: {left:.0f} s are left; the same command goes on with it", flush=True)
            continue
        while (code := start(name, stage_end - time.monotonic())) == BROKEN and time.monotonic() < stage_end:
            print(f"{name}: goes on in another process", flush=True)
        if code is None:
            print(f"{name}: CUT after {stage.limit:.0f} s at most; the same command goes on with it", flush=True)
        elif code:
            print(f"{name}: ENDED with exit code {code}", flush=True)


def summary(path: Path, stages: list[str]) -> int:
    """Print a line for each stage; 1 unless all of them are done."""
    found = json.loads(path.read_text())["stages"]
    rows = []
    for name in stages:
        cases = found.get(name, {"cases": {}})["cases"]
        failed = [case for case, result in cases.items() if "failed" in result]
        state = "done" if is_done(path, name) else "failed" if failed else "not complete"
        seconds = f"{sum(case['seconds'] for case in cases.values()):.0f}"
        rows.append([name, state, str(len(cases)), seconds, ", ".join(failed)])
    print("\n" + harness.table(["stage", "state", "cases", "seconds", "failed"], rows) + f"\nwrote {path.name}")
    return 0 if all(is_done(path, name) for name in stages) else 1


def inside(chosen: argparse.Namespace, path: Path) -> int:
    """A stage, in this process."""
    from benchmarks.gpu import stages  # and with it the training program

    cases = Cases(path, chosen.inside, chosen.call)
    try:
        stages.STAGES[chosen.inside](stages.Setting(chosen.smoke, chosen.scratch), cases)
    except BrokenContext:
        return BROKEN
    cases.finish()
    return 0


def main(argv: list[str] | None = None) -> int:
    chosen = options(argv)
    path = Path(chosen.output).resolve() / "first_minutes.json"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended as well
    if chosen.inside:
        return inside(chosen, path)
    if not chosen.smoke and not torch.cuda.is_available():
        print("benchmarks/first_minutes.py: torch sees no GPU; --smoke tries the program on the CPU", file=sys.stderr)
        return 2
    begin(path, chosen.stages, smoke=chosen.smoke, again=chosen.again)
    call = str(time.time_ns())
    with tempfile.TemporaryDirectory() as scratch:

        def start(name: str, limit: float) -> int | None:
            words = ["--inside", name, "--output", path.parent, "--scratch", scratch, "--call", call]
            command = [sys.executable, Path(__file__).resolve(), *words, *["--smoke"] * chosen.smoke]
            cache = {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor"}
            return harness.run_limited(command, None, limit, environment=cache)

        run_stages(path, chosen.stages, chosen.budget, start)
    return summary(path, chosen.stages)


if __name__ == "__main__":
    raise SystemExit(main())
