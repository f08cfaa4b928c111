"""Faults at chosen moments of a training run: `plant(Fault(kill, rank=1, step=3))` in the process of each rank, or in
the launcher from which the ranks are forked."""

from __future__ import annotations

import os
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.gpt2.dist.launch import attempt
from megatron.gpt2.train import loop
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.train_step import train_step


@dataclass
class Fault:
    """What happens once on `rank`, before the step after iteration `step`: a function of the run, see below.

    attempt: after how many restarts, None for each of them. in_save: not before the step but inside the save of
    iteration `step`, at the in_save-th file operation of the rank in its folder; the function gets no run.
    """

    happen: Callable[..., None]
    rank: int
    step: int
    attempt: int | None = 0
    in_save: int = 0
    seen: int = 0  # operations, or steps

    def is_now(self) -> bool:
        """Count an operation or a step; whether it is the one."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        if self.rank != rank or self.attempt not in (None, attempt()):
            return False
        self.seen += 1
        return self.seen == max(self.in_save, 1)


def plant(*faults: Fault) -> None:
    """Patch this process, so that the faults come in it and in what it forks. Those of an earlier call are over."""

    def step(run: Run) -> None:
        for fault in faults:
            if not fault.in_save and fault.step == run.progress.iteration and fault.is_now():
                fault.happen(run)
        train_step(run)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.mkdir", "os.remove"):
            return
        if not isinstance(args[0], str | os.PathLike) or event == "open" and not args[2] & os.O_ACCMODE:
            return  # what only reads comes at a start, too
        for fault in faults:
            if fault.in_save and f"iter_{fault.step:07d}" in os.fspath(args[0]) and fault.is_now():
                fault.happen()

    mock.patch.object(loop, "train_step", step).start()
    if any(fault.in_save for fault in faults):
        sys.addaudithook(audit)


# What ends a process, or keeps it from going on.


def kill(run: Run | None = None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(run: Run) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def machine(run: Run) -> None:
    """The machine is gone: its launcher and all of its ranks, before any of them can say a word."""
    launcher = os.getppid()
    os.kill(launcher, signal.SIGSTOP)  # else it would tell its ranks to end
    own = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for process in [*(int(number) for number in own if int(number) != os.getpid()), launcher, os.getpid()]:
        os.kill(process, signal.SIGKILL)


def hold(run: Run) -> None:
    """The rank waits until a signal has asked it to stop: the launcher's, when a machine has come (--elastic)."""
    while not run.stop._asked:
        time.sleep(0.01)


def hang(run: Run) -> None:
    """The rank never comes back, and lives."""
    while True:
        time.sleep(3600)


def cut(run: Run) -> None:
    """The network is gone: each socket that is connected is shut down."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or never connected
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)  # which no network ends
                    if one.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                        one.shutdown(socket.SHUT_RDWR)


def full(run: Run) -> None:
    """No file may grow any more, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


# What a rank survives: a run has to notice it by itself.


def nan(run: Run, name: str = "") -> None:
    """From now on the gradient of a parameter, or of the last one, holds a NaN on this rank."""
    parameters = dict(run.engine.model.named_parameters())
    parameter = parameters[name or list(parameters)[-1]]

    def poison(gradient: Tensor) -> Tensor:
        poisoned = gradient.clone()
        poisoned.view(-1)[0] = float("nan")
        return poisoned

    parameter.register_hook(poison)  # type: ignore[no-untyped-call]


def flip(run: Run, kind: str = "weight", name: str = "", element: int = 0, bit: int = 20) -> None:
    """One bit of a weight, a master or a moment is another one; by default of the largest that this rank has."""
    tensors = {"weight": {n: p.detach() for n, p in run.engine.model.named_parameters()}}.get(kind) or {
        state.name: state.values for state in run.engine.optimizer.tensors() if state.kind == kind
    }
    run.engine.gatherer.wait()
    values = tensors[name or max(tensors, key=lambda name: tensors[name].numel())].view(-1)
    bits = values.view(torch.int16 if values.element_size() == 2 else torch.int32)
    bits[element] ^= 1 << bit % (8 * values.element_size() - 1)


def break_weight(run: Run, name: str) -> None:
    """A weight is infinite, and its master too."""
    flat = run.engine.flat
    index, part, _ = flat.owned_part_of(name)
    flat.masters[index][part][0] = float("inf")
    flat.view(flat.params, name).view(-1)[0] = float("inf")


def spike(run: Run) -> None:
    """The next step reads noise."""
    read, left = run.data.to_device, [1]

    def noisy(text: Tensor, samples: Tensor | None = None) -> Any:
        if left and samples is not None:
            left.pop()
            text = torch.randint_like(text, int(text.max()) + 1)
        return read(text, samples)

    mock.patch.object(run.data, "to_device", noisy).start()


def slow(run: Run, part: str, seconds: float) -> None:
    """From now on a part of each step takes so much longer on this rank."""
    timer = run.timers(part)
    enter = type(timer).__enter__

    class Slow(type(timer)):  # type: ignore[misc]
        def __enter__(self) -> None:
            enter(self)
            time.sleep(seconds)

    timer.__class__ = Slow
