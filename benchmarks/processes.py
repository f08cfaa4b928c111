"""A program in a process of its own with a time limit, whose output is in a file whatever happens to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.report import ROOT

GRACE = 3.0  # seconds that a program has to end what it has started itself


def run_limited(
    command: Sequence[str], log: Path | None, timeout: float, *, environment: Mapping[str, str] | None = None
) -> int | None:
    """Run `command` in the project's folder and return its exit code; None where it was ended after `timeout` seconds,
    with all that it had started. log: takes what it writes, while it writes it; None: this process's own output."""
    unbuffered = {**os.environ, **(environment or {}), "PYTHONUNBUFFERED": "1"}
    with contextlib.nullcontext() if log is None else log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=None if file is None else subprocess.STDOUT,
            cwd=ROOT,
            env=unbuffered,
            start_new_session=True,
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:  # also where this program is told to end
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its compilers, too
            process.wait()
