#!/usr/bin/env python3
"""The first minutes on a GPU, part 1 of benchmarks/gpu.sh: what must be known before anything is compared.

    python benchmarks/first_minutes.py --output DIR              # on a GPU, under 9 minutes
    python benchmarks/first_minutes.py --output DIR --smoke      # tiny models on the CPU: do all stages run?

The stages, in this order: `machine`, `modes`, `tables`, `kernels`, `steps`, `tests`; the file of each in
benchmarks/gpu/ says what it measures. A stage runs in a process of its own with a time limit, and writes each of its
cases into DIR/first_minutes.json at once. The same command goes on with what is not there yet, or has failed, as long
as GPU and versions are the same. docs/how-to/gpu.md says how to read the results.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch

from benchmarks import report
from benchmarks.gpu.cases import BROKEN, BrokenContext, Cases
from benchmarks.processes import run_limited


@dataclass(frozen=True)
class Stage:
    """limit: seconds at most. least: seconds without which it does not begin. module: of benchmarks/gpu/."""

    module: str
    limit: float
    least: float


STAGES = {
    "machine": Stage("machine", 60, 10),
    "modes": Stage("modes", 100, 30),
    "tables": Stage("tables", 130, 40),
    "kernels": Stage("profiles", 130, 60),
    "steps": Stage("steps", 260, 60),
    "tests": Stage("own_tests", 300, 60),
}


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", metavar="DIR", required=True, help="folder of the results")
    parser.add_argument("--stages", metavar="NAME,NAME", help="these alone")
    parser.add_argument("--again", action="store_true", help="measure also what the JSON in the folder holds already")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="S",
        default=515.0,
        help="of the whole call: a stage that no longer fits is left out (default: 515)",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU: proves the program")
    parser.add_argument("--inside", metavar="STAGE", help=argparse.SUPPRESS)  # this process is a stage's own
    parser.add_argument("--scratch", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--call", metavar="NAME", help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    chosen.stages = chosen.stages.split(",") if chosen.stages else list(STAGES)
    if unknown := set(chosen.stages) - STAGES.keys():
        parser.error(f"--stages: there is no {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    return chosen


def begin(path: Path, stages: list[str], *, smoke: bool, again: bool) -> None:
    """The JSON that the stages write into: an earlier one of the same GPU and versions goes on, without the stages that
    are measured again."""
    head: dict[str, Any] = {**report.header("first minutes"), "smoke": smoke}
    known = report.earlier(path, head, "smoke")
    there = known["stages"] if known else {}
    kept = {name: found for name, found in there.items() if not again or name not in stages}
    report.write(path, {**head, "stages": kept})


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
        rows.append(
            [name, state, str(len(cases)), f"{sum(case['seconds'] for case in cases.values()):.0f}", ", ".join(failed)]
        )
    print("\n" + report.table(["stage", "state", "cases", "seconds", "failed"], rows) + f"\nwrote {path.name}")
    return 0 if all(is_done(path, name) for name in stages) else 1


def inside(chosen: argparse.Namespace, path: Path) -> int:
    """A stage, in this process."""
    from benchmarks.gpu.setting import Setting  # and with it the training program

    cases = Cases(path, chosen.inside, chosen.call)
    try:
        importlib.import_module(f"benchmarks.gpu.{STAGES[chosen.inside].module}").run(
            Setting(chosen.smoke, chosen.scratch), cases
        )
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
            words = ["--inside", name, "--output", str(path.parent), "--scratch", scratch, "--call", call]
            return run_limited(
                [sys.executable, str(Path(__file__).resolve()), *words, *(["--smoke"] if chosen.smoke else [])],
                None,
                limit,
                environment={"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor"},
            )

        run_stages(path, chosen.stages, chosen.budget, start)
    return summary(path, chosen.stages)


if __name__ == "__main__":
    raise SystemExit(main())
