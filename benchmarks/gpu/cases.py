"""The cases of a stage, each written into the part's JSON as soon as it is measured:

    {"stages": {<stage>: {"complete": true, "cases": {<case>: {..., "seconds": 1.2}}}}}

So a time-out loses one case. A case that stands there already is not measured again; one that failed is, by a later
call of the part.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import report

BROKEN = 3  # the exit code of a process whose CUDA context an error has left unusable


class BrokenContext(Exception):
    """CUDA answers everything with an error from now on: the stage goes on in another process."""


class Cases:
    """Measures and records the cases of one stage. path: the part's JSON. call: names this call of the part."""

    def __init__(self, path: Path, stage: str, call: str) -> None:
        self._path, self._stage, self._call = path, stage, call

    @property
    def folder(self) -> Path:
        """Where results and logs lie."""
        return self._path.parent

    def run(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Measure a case, unless it is there. What `work` returns is JSON; what it raises becomes {"failed": …}."""
        cases = self._read()["cases"]
        known = cases.get(name)
        if known and ("failed" not in known or known["call"] == self._call):
            return
        began, broken = time.monotonic(), False
        try:
            found = work()
        except Exception as error:
            text = traceback.format_exc()
            print(text, flush=True)
            broken = is_broken(error)
            found = {"failed": report.last_line(text), "traceback": report.without_paths(text).splitlines()}
            del error
        self._record(
            name,
            {**found, "seconds": round(time.monotonic() - began, 2), "call": self._call, "commit": report.commit()},
        )
        print(f"{self._stage}: {name}: {line_of(found)}", flush=True)
        if broken:
            raise BrokenContext
        free()

    def finish(self) -> None:
        """Every case of the stage was measured, or failed."""
        result = json.loads(self._path.read_text())
        result["stages"].setdefault(self._stage, {"cases": {}})["complete"] = True
        report.write(self._path, result)

    def _read(self) -> dict[str, Any]:
        stages = json.loads(self._path.read_text())["stages"]
        return dict(stages.get(self._stage, {"cases": {}}))

    def _record(self, name: str, found: dict[str, Any]) -> None:
        result = json.loads(self._path.read_text())
        result["stages"].setdefault(self._stage, {"complete": False, "cases": {}})["cases"][name] = found
        report.write(self._path, result)


def is_broken(error: Exception) -> bool:
    """Whether CUDA answers every later call with the same error. Memory that is lacking is no such error."""
    return not isinstance(error, torch.cuda.OutOfMemoryError) and "CUDA error" in str(error)


def free() -> None:
    """What a case has left, so that the next one finds the device empty and a peak of its own."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def line_of(found: dict[str, Any]) -> str:
    """The plain figures of a case in one line."""
    if "failed" in found:
        return f"FAILED: {found['failed']}"
    plain = {key: value for key, value in found.items() if isinstance(value, (int, float, str))}
    return (
        ", ".join(
            f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in plain.items()
            if len(str(value)) < 80
        )
        or f"{len(found)} entries"
    )
