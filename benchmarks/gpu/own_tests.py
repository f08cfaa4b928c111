"""Stage `tests`: the project's own tests that need a GPU, `tests/gpu`, each with a time limit. What pytest prints is in
a log of its own, which a test that never ends leaves behind as well.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu.cases import Cases
from benchmarks.gpu.setting import Setting
from benchmarks.processes import run_limited

FOLDER = "tests/gpu"
LIMIT, ALL = 60, 300.0  # seconds of one test, and of all of them
OUTCOME = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)


def run(setting: Setting, cases: Cases, timeout: float = ALL) -> None:
    """Its one case. timeout: of all tests."""
    cases.run("pytest", lambda: own_tests(command(setting), cases.folder / "gpu_tests.log", timeout))


def command(setting: Setting) -> list[str]:
    """Without a GPU every test is skipped, which is quick."""
    has_timeout = importlib.util.find_spec("pytest_timeout") is not None
    return [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "-o",
        f"faulthandler_timeout={LIMIT}",
        *([f"--timeout={LIMIT}"] if has_timeout else []),
        FOLDER,
    ]


def own_tests(words: list[str], log: Path, timeout: float) -> dict[str, Any]:
    """The outcome of each test by pytest's own lines; "failed" where one failed, or where they did not end in time."""
    code = run_limited(words, log, timeout)
    text = log.read_text(errors="replace")
    outcomes = dict(OUTCOME.findall(text))
    found: dict[str, Any] = {
        "exit_code": code,
        "log": log.name,
        "counts": dict(Counter(outcomes.values())),
        "outcomes": outcomes,
        "last_line": report.last_line(text),
    }
    if code is None:
        found["failed"] = f"no end after {timeout:.0f} s; last: {found['last_line']}"
    elif code:
        bad = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
        found["failed"] = f"exit code {code}: {', '.join(bad) or found['last_line']}"
    return found
