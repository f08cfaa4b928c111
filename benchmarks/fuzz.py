#!/usr/bin/env python3
"""Everything that is read from outside, with changed inputs: a long run of what tests/fuzz/ tries for some seconds.

    python benchmarks/fuzz.py --inputs 1000000     # over all targets; hours on two cores
    python benchmarks/fuzz.py --targets ".idx" JSONL --inputs 20000

The same command goes on where an interrupted one stopped, also at a later commit: the report says how many inputs each
commit had. Exit codes: 0 where every input was taken or refused within the limits, 1 where one was not; its seed is in
the report.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

from benchmarks import report
from tests.fuzz.running import EXAMPLES, Tried, try_inputs
from tests.fuzz.target import LONGEST_LINE, MOST_MORE, MOST_SECONDS, MOST_TIMES
from tests.fuzz.targets import TARGETS, target_of

CHUNK_SECONDS = 20.0  # about what a worker process lives
FIRST_CHUNK = 50
LIMITS = {
    "seconds": MOST_SECONDS,
    "memory": f"{MOST_TIMES} times the input and {MOST_MORE >> 20} MiB",
    "characters of an error": LONGEST_LINE,
}


class Campaign:
    """The inputs of all targets, tried by several workers at once. The report is written after every chunk."""

    def __init__(self, path: Path, targets: list[str], inputs: int, seconds: float) -> None:
        self.path, self.targets, self.end = path, targets, time.monotonic() + seconds
        share, more = divmod(inputs, len(targets))
        self.wanted = {name: share + (number < more) for number, name in enumerate(targets)}
        self.result: dict[str, Any] = {
            **report.header("fuzz"),
            "limits": LIMITS,
            "seconds": 0.0,
            "commits": {},
            "targets": {},
        }
        if found := report.earlier(path, self.result, "limits"):
            self.result |= {key: found[key] for key in ("targets", "seconds", "commits")}
        self.before = self.result["seconds"]
        self.begun, self.lock, self.busy = time.monotonic(), threading.Lock(), set[str]()

    def run(self, workers: int) -> None:
        """Until each target has had its inputs, or the time is over."""
        with ThreadPoolExecutor(workers) as pool:
            for done in [pool.submit(self._work) for _ in range(workers)]:
                done.result()

    def _work(self) -> None:
        while chunk := self._next():
            name, first, count = chunk
            tried = try_inputs(target_of, name, first, count)
            with self.lock:
                self._add(name, tried)
                self.busy.remove(name)

    def _next(self) -> tuple[str, int, int] | None:
        """The target with the smallest share of its inputs done, its next seed, and how many; None at the end."""
        with self.lock:
            open_targets = [
                name for name in self.targets if name not in self.busy and self._done(name) < self.wanted[name]
            ]
            if not open_targets or time.monotonic() > self.end:
                return None
            name = min(open_targets, key=lambda name: self._done(name) / self.wanted[name])
            self.busy.add(name)
            known, done = self.result["targets"].get(name), self._done(name)
            size = max(FIRST_CHUNK, int(CHUNK_SECONDS * done / max(known["seconds"], 0.1))) if known else FIRST_CHUNK
            return name, done, min(size, self.wanted[name] - done)

    def _done(self, name: str) -> int:
        return int(self.result["targets"].get(name, {}).get("inputs", 0))

    def _add(self, name: str, tried: Tried) -> None:
        row = self.result["targets"].setdefault(
            name, {"inputs": 0, "taken": 0, "refused": 0, "seconds": 0.0, "findings": {}}
        )
        row["inputs"] = tried.next
        commits = self.result["commits"]
        commits[self.result["commit"]] = commits.get(self.result["commit"], 0) + tried.next - tried.first
        row["taken"] += tried.taken
        row["refused"] += tried.refused
        row["seconds"] = round(row["seconds"] + tried.seconds, 1)
        for what, found in tried.findings.items():
            known = row["findings"].setdefault(what, {**found, "count": 0, "seeds": []})
            known["count"] += found["count"]
            known["seeds"] = [*known["seeds"], *found["seeds"]][:EXAMPLES]
            print(f"{name}: {what} {found['seeds']}: {found['example']}", flush=True)
        self.result["seconds"] = round(self.before + time.monotonic() - self.begun, 1)
        rows = self.result["targets"].values()
        kinds = [(what, found["count"]) for row in rows for what, found in row["findings"].items()]
        self.result |= {
            "inputs": sum(row["inputs"] for row in rows),
            "crashes": sum(count for what, count in kinds if what.startswith(("crash", "hang"))),
            "over_the_limits": sum(count for what, count in kinds if what in ("slow", "memory")),
            "findings": sum(count for _, count in kinds),
        }
        report.write(self.path, self.result)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1_000_000, metavar="N", help="over all targets (default: 10^6)")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS), metavar="NAME")
    parser.add_argument("--hours", type=float, default=4.0, help="after which the run stops, to be gone on with")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--output", metavar="DIR", help="folder of the result (default: benchmarks/results)")
    chosen = parser.parse_args(argv)
    output = Path(chosen.output) if chosen.output else report.RESULTS
    campaign = Campaign(output / "fuzz.json", chosen.targets, chosen.inputs, 3600 * chosen.hours)
    campaign.run(chosen.workers)
    result = campaign.result
    print(
        report.table(
            ["target", "inputs", "taken", "refused", "findings", "inputs/s"],
            [
                [
                    name,
                    f"{row['inputs']:,}",
                    f"{row['taken']:,}",
                    f"{row['refused']:,}",
                    str(sum(found["count"] for found in row["findings"].values())),
                    f"{row['inputs'] / max(row['seconds'], 0.1):.0f}",
                ]
                for name, row in result["targets"].items()
            ],
        )
    )
    print(
        f"{report.machine_line(result)}: {result.get('inputs', 0):,} inputs in {result['seconds']:,.0f} s; "
        f"{result.get('crashes', 0)} crashes, {result.get('over_the_limits', 0)} over the limits, "
        f"{result.get('findings', 0)} findings in all"
    )
    return 1 if result.get("findings") else 0


if __name__ == "__main__":
    raise SystemExit(main())
