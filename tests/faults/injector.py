"""Faults at chosen moments of a training run.

    python -m tests.faults.injector --fault kill:rank=1:step=3 --fault full:rank=0:step=5 -- [flags of pretrain_gpt2]

This process is patched, and the ranks are forked from it; under torchrun each process is a rank. A fault is a kind and
its settings: rank (or "any") and step (both counted from 0; the step that is about to be done) say where, attempt (0)
after how many restarts, "any" in each of them. `inside=save` puts it into the save of iteration `step`, at the file
operation `event` (default 1) of this rank in its folder. Other settings are the kind's own.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron.gpt2.commands.pretrain_gpt2 import main as train
from megatron.gpt2.dist.launch import attempt
from megatron.gpt2.train import loop
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.train_step import train_step


@dataclass(frozen=True)
class Fault:
    """What `--fault` says. details: settings of its kind, as (name, value)."""

    kind: str
    rank: int | None
    step: int
    attempt: int | None = 0
    inside: str = ""
    event: int = 1
    details: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def read(text: str) -> Fault:
        kind, *settings = text.split(":")
        own: dict[str, Any] = {}
        details = []
        for name, _, text_of in (setting.partition("=") for setting in settings):
            value = next(
                (
                    read(text_of)
                    for read, form in ((int, r"-?\d+"), (float, r"[\d.]+"), (str, ".*"))
                    if re.fullmatch(form, text_of)
                )
            )
            if name in ("rank", "step", "attempt", "inside", "event"):
                own[name] = None if name in ("attempt", "rank") and value == "any" else value
            else:
                details.append((name, value))
        if kind not in FAULTS:
            raise SystemExit(f"error: --fault {text}: {kind} is none of {', '.join(FAULTS)}")
        return Fault(kind, **own, details=tuple(details))

    def is_now(self) -> bool:
        """Whether this process is the rank, and this the attempt."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return self.attempt in (None, attempt()) and self.rank in (None, rank)

    def happen(self, run: Run | None) -> None:
        FAULTS[self.kind](run, **dict(self.details))


def kill(run: Run | None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def machine(run: Run | None) -> None:
    """The machine is gone: its launcher and all of its ranks, before any of them can say a word."""
    launcher = os.getppid()
    os.kill(launcher, signal.SIGSTOP)  # else it would tell its ranks to end
    own = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for process in [*(int(number) for number in own if int(number) != os.getpid()), launcher, os.getpid()]:
        os.kill(process, signal.SIGKILL)


def hold(run: Run | None) -> None:
    """The rank waits until a signal has asked it to stop: the launcher's, when a machine has come (--elastic)."""
    assert run is not None
    while not run.stop._asked:
        time.sleep(0.01)


def stop(run: Run | None) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def cut(run: Run | None) -> None:
    """The network is gone: each socket that is connected is shut down."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and not one.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                ):  # no network ends the listening
                    one.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed meanwhile
            continue


def full(run: Run | None) -> None:
    """No file may grow any more, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


FAULTS: dict[str, Callable[..., None]] = {
    "kill": kill,
    "machine": machine,
    "hold": hold,
    "stop": stop,
    "cut": cut,
    "full": full,
}
if find_spec("tests.faults.state_faults"):
    FAULTS |= import_module("tests.faults.state_faults").KINDS


def inject(texts: Sequence[str]) -> None:
    """Patch this process, so that the faults come in it and in what it forks."""
    faults = [Fault.read(text) for text in texts]
    events = dict.fromkeys((fault for fault in faults if fault.inside), 0)

    def step(run: Run) -> None:
        for fault in faults:
            if not fault.inside and fault.step == run.progress.iteration and fault.is_now():
                fault.happen(run)
        train_step(run)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.mkdir", "os.remove"):
            return
        if not isinstance(args[0], str | os.PathLike) or event == "open" and not args[2] & os.O_ACCMODE:
            return  # what only reads comes at a start, too
        for fault in events:
            if f"iter_{fault.step:07d}" in os.fspath(args[0]) and fault.is_now():
                events[fault] += 1
                if events[fault] == fault.event:
                    fault.happen(None)

    mock.patch.object(loop, "train_step", step).start()
    if events:
        sys.addaudithook(audit)


def main(argv: Sequence[str]) -> int:
    words, faults = list(argv), []
    while words[:1] == ["--fault"]:
        faults.append(words[1])
        del words[:2]
    inject(faults)
    return train(words[words[:1] == ["--"] :])  # torchrun takes a "--" that comes first for its own


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
