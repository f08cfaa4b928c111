#!/usr/bin/env python3
"""Measure a GPU before comparisons: part 1 of benchmarks/gpu.sh.

    python benchmarks/gpu_first_minutes.py --output DIR              # on a GPU, under 9 minutes
    python benchmarks/gpu_first_minutes.py --output DIR --smoke      # a quick check with tiny models on the CPU

The stages are `machine`, `expandable`, `modes`, `tests`, `steps`, `kernels` and `tables`, in this order, see
benchmarks/gpu/stages.py and tables.py. A stage runs in a separate process with a time limit. The stage writes each
measured case to DIR/first_minutes.json immediately:

    {"stages": {<stage>: {"complete": true, "cases": {<case>: {..., "seconds": 1.2}}}}}

A timeout therefore loses only one case. The same command measures the missing and failed cases, as long as GPU and
versions are the same. docs/how-to/gpu.md explains the results.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # The project need not be installed.

import torch

from benchmarks import harness

BROKEN = 3  # exit code after an error that made the CUDA context unusable


# the time limit of each stage in seconds
STAGES = {
    "machine": 45,
    "expandable": 15,
    "modes": 60,
    "tests": 45,
    "steps": 200,
    "kernels": 90,
    "tables": 60,
}
ENVIRONMENT = {"expandable": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}


class CudaContextError(Exception):
    """Raised if all further CUDA calls would fail, so that the stage continues in a new process."""


class CaseRecorder:
    """Measures and records the cases of one stage.

    path: the JSON file. call: an id of the current start of the program. Recorded cases are skipped, except cases that
        failed in an earlier start.
    """

    def __init__(self, path: Path, stage: str, call: str) -> None:
        self.folder, self._path, self._stage, self._call = path.parent, path, stage, call

    def run(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Measure a case, unless it is recorded. `work` returns JSON; an exception is recorded as {"failed": …}."""
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
            found = {"failed": harness.last_line(text), "traceback": harness.strip_paths(text).splitlines()}
            del error
        head = {"seconds": round(time.monotonic() - began, 2), "call": self._call, "commit": harness.git_commit()}
        self._change(lambda stage: stage["cases"].update({name: {**found, **head}}))
        plain = {k: f"{v:,.4g}" if isinstance(v, float) else f"{v}" for k, v in found.items() if is_plain(v)}
        figures = ", ".join(f"{key} {value}" for key, value in plain.items()) or f"{len(found)} entries"
        print(f"{self._stage}: {name}: {'FAILED: ' * ('failed' in found)}{figures}", flush=True)
        if broken:
            raise CudaContextError
        free_memory()

    def finish(self) -> None:
        """Record that all cases of the stage were tried."""
        self._change(lambda stage: stage.update(complete=True))

    def _change(self, change: Callable[[dict[str, Any]], None]) -> None:
        result = json.loads(self._path.read_text())
        change(result["stages"].setdefault(self._stage, {"complete": False, "cases": {}}))
        harness.write_json(self._path, result)


def is_plain(value: object) -> bool:
    return isinstance(value, (int, float, str)) and len(str(value)) < 80


def is_broken(error: Exception) -> bool:
    """Return True if all CUDA calls fail after `error`. After an out-of-memory error, later CUDA calls still work."""
    return not isinstance(error, torch.cuda.OutOfMemoryError) and "CUDA error" in str(error)


def free_memory() -> None:
    """Free the memory of a case, and reset the recorded peak of CUDA memory for the next case."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--stages", metavar="NAME,NAME", default=",".join(STAGES), help="only these")
    parser.add_argument("--again", action="store_true", help="measure recorded cases again")
    expected = "compute the losses of `modes` on the CPU in fp32, with which a GPU's are compared"
    parser.add_argument("--expected-losses", action="store_true", help=expected)
    # Only the program itself gives these flags, when it starts the process of a stage.
    for internal in ("--inside", "--scratch", "--call"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    args = harness.parse_args(parser, argv)
    args.stages = args.stages.split(",")
    if unknown := set(args.stages) - STAGES.keys():
        parser.error(f"--stages: there is no {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    return args


def begin(path: Path, stages: list[str], *, smoke: bool, again: bool) -> None:
    """Write the JSON file for the stages. Keep the results of an earlier file if GPU and versions are the same, except
    the results of stages to measure again."""
    head: dict[str, Any] = {**harness.header("first minutes"), "smoke": smoke}
    known = harness.load_earlier(path, head, "smoke") or {"stages": {}}
    kept = {name: found for name, found in known["stages"].items() if not again or name not in stages}
    harness.write_json(path, {**head, "stages": kept})


def is_done(path: Path, name: str) -> bool:
    """Return True if all cases of a stage were measured, and none failed."""
    stage = json.loads(path.read_text())["stages"].get(name, {})
    return bool(stage.get("complete")) and not any("failed" in case for case in stage["cases"].values())


def run_stages(path: Path, stages: list[str], start: Callable[[str, float], int | None]) -> None:
    """Run the stages in order. start(name, limit in seconds): returns an exit code, or None after a timeout."""
    for name in stages:
        end = time.monotonic() + STAGES[name]
        if is_done(path, name):
            print(f"{name}: already measured", flush=True)
            continue
        while (code := start(name, end - time.monotonic())) == BROKEN and time.monotonic() < end:
            print(f"{name}: continues in a new process", flush=True)
        if code is None:
            print(f"{name}: STOPPED after {STAGES[name]} s; the same command continues here", flush=True)
        elif code:
            print(f"{name}: ENDED with exit code {code}", flush=True)


def summary(path: Path, stages: list[str]) -> int:
    """Print a line for each stage. Return 0 if all are done, else 1."""
    found = json.loads(path.read_text())["stages"]
    rows = []
    for name in stages:
        cases = found.get(name, {"cases": {}})["cases"]
        failed = [case for case, result in cases.items() if "failed" in result]
        state = "done" if is_done(path, name) else "failed" if failed else "not complete"
        seconds = f"{sum(case['seconds'] for case in cases.values()):.0f}"
        rows.append([name, state, str(len(cases)), seconds, ", ".join(failed)])
    print("\n" + harness.format_table(["stage", "state", "cases", "seconds", "failed"], rows) + f"\nwrote {path.name}")
    return 0 if all(is_done(path, name) for name in stages) else 1


def run_stage(args: argparse.Namespace, path: Path) -> int:
    """Run a stage in this process."""
    from benchmarks.gpu import stages  # The import of `stages` also imports the training program.

    cases = CaseRecorder(path, args.inside, args.call)
    try:
        stages.STAGES[args.inside](stages.StageConfig(args.smoke, args.scratch), cases)
    except CudaContextError:
        return BROKEN
    cases.finish()
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    path = Path(args.output).resolve() / "first_minutes.json"
    # An exit through SystemExit also ends the started processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.inside:
        return run_stage(args, path)
    if args.expected_losses:
        from benchmarks.gpu.stages import write_expected_losses

        return write_expected_losses(args.output)
    if not args.smoke and not torch.cuda.is_available():
        print(
            "benchmarks/gpu_first_minutes.py: torch finds no GPU; use --smoke to try the program on the CPU",
            file=sys.stderr,
        )
        return 2
    begin(path, args.stages, smoke=args.smoke, again=args.again)
    call = str(time.time_ns())
    with tempfile.TemporaryDirectory() as scratch:

        def start(name: str, limit: float) -> int | None:
            words = ["--inside", name, "--output", path.parent, "--scratch", scratch, "--call", call]
            command = [sys.executable, Path(__file__).resolve(), *words, *["--smoke"] * args.smoke]
            environment = {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor", **ENVIRONMENT.get(name, {})}
            return harness.run_limited(command, None, limit, environment=environment)

        run_stages(path, args.stages, start)
    return summary(path, args.stages)


if __name__ == "__main__":
    raise SystemExit(main())
