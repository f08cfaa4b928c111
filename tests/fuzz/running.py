"""Inputs of a target, tried in a process of their own, so that one that ends it or never returns is found."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.distributed import CONTEXT
from tests.fuzz.target import Input, Target

SILENCE = 60.0  # seconds, of an input that as a rule takes a millisecond
EXAMPLES = 5  # seeds that are kept of each finding
SEED, TAKEN, REFUSED = range(3)  # of the numbers that both processes see


@dataclasses.dataclass
class Tried:
    """What came of the inputs from seed `first` to before `next`. findings: {what: {"count",
    "seeds", "example"}}."""

    first: int
    next: int
    taken: int = 0
    refused: int = 0
    seconds: float = 0.0
    findings: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def add(self, what: str, seed: int, example: str = "") -> None:
        """Count a finding."""
        found = self.findings.setdefault(what, {"count": 0, "seeds": [], "example": example})
        found["count"] += 1
        found["seeds"] = [*found["seeds"], seed][:EXAMPLES]


def try_inputs(
    find_target: Callable[[str], Target], name: str, first: int, count: int, silence: float = SILENCE
) -> Tried:
    """Try the inputs `first` to before `first` + `count` of the target. find_target: at the top level of a module; it
    is called with `name` in the worker."""
    tried, end = Tried(first, first), first + count
    begun = time.monotonic()
    while tried.next < end:
        numbers = CONTEXT.Array("q", [tried.next, 0, 0], lock=False)
        receive, send = CONTEXT.Pipe(duplex=False)
        folder = tempfile.mkdtemp(prefix="fuzz_")
        worker = CONTEXT.Process(target=_work, args=(find_target, name, end, folder, numbers, send), daemon=True)
        worker.start()
        send.close()
        over = _listen(tried, receive, numbers, silence)
        if not over:
            worker.kill()
        worker.join()
        shutil.rmtree(folder, ignore_errors=True)
        tried.taken, tried.refused = tried.taken + numbers[TAKEN], tried.refused + numbers[REFUSED]
        tried.next = numbers[SEED]
        if not over:
            tried.add(f"hang: nothing for {silence:g} s", tried.next)
        elif worker.exitcode:
            assert worker.exitcode < 0, f"{name}: the worker ended with exit code {worker.exitcode}"
            tried.add(f"crash: {signal.Signals(-worker.exitcode).name}", tried.next)
        tried.next += tried.next < end
    tried.seconds = time.monotonic() - begun
    return tried


def _listen(tried: Tried, receive: Connection, numbers: Any, silence: float) -> bool:
    """Take the worker's findings. True once it has ended; False where it is stuck in one input."""
    stuck, since = numbers[SEED], time.monotonic()
    while True:
        if receive.poll(1.0):
            try:
                tried.add(*receive.recv())
            except EOFError:
                return True
        if numbers[SEED] != stuck:
            stuck, since = numbers[SEED], time.monotonic()
        elif time.monotonic() - since > silence:
            return False


def _work(
    find_target: Callable[[str], Target], name: str, end: int, folder: str, numbers: Any, send: Connection
) -> None:
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  of a process that ends with it
    given = Input(find_target(name), Path(folder) / "input")
    for seed in range(numbers[SEED], end):
        numbers[SEED] = seed
        what, example = given.attempt(seed)
        if what == "taken":
            numbers[TAKEN] += 1
        elif what == "refused":
            numbers[REFUSED] += 1
        else:
            send.send((what, seed, example.replace(folder, "")))
    numbers[SEED] = end
