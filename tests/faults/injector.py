"""Inject faults at chosen moments of a training run: call `plant(Fault(kill, rank=1, step=3))` in the process of each
rank, or in the launcher before it forks the ranks."""

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

from megatron.gpt2.dist.launch import restart_count
from megatron.gpt2.train import loop
from megatron.gpt2.train.train_step import train_step
from megatron.gpt2.train.trainer import Trainer


@dataclass
class Fault:
    """A fault that happens once on `rank`, before the step after iteration `step`. `action` is one of the functions
    below and gets the trainer.

    attempt: the number of restarts before the fault; None: in every attempt.
    in_save: inject the fault into the save of iteration `step` instead, at this file operation of the rank in the
        checkpoint's folder. `action` then gets no argument.
    """

    action: Callable[..., None]
    rank: int
    step: int
    attempt: int | None = 0
    in_save: int = 0
    seen: int = 0  # The number of counted steps or file operations.

    def is_due(self) -> bool:
        """Count a step or a file operation of this rank. Return whether the fault must happen now."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        if self.rank != rank or self.attempt not in (None, restart_count()):
            return False
        self.seen += 1
        return self.seen == max(self.in_save, 1)


def plant(*faults: Fault) -> None:
    """Patch this process and its future children, so that `faults` happen in these processes."""

    def step(trainer: Trainer) -> None:
        for fault in faults:
            if not fault.in_save and fault.step == trainer.progress.iteration and fault.is_due():
                fault.action(trainer)
        train_step(trainer)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.mkdir", "os.remove"):
            return
        if not isinstance(args[0], str | os.PathLike) or event == "open" and not args[2] & os.O_ACCMODE:
            return  # Reads also occur at the start of a run.
        for fault in faults:
            if fault.in_save and f"iter_{fault.step:07d}" in os.fspath(args[0]) and fault.is_due():
                fault.action()

    mock.patch.object(loop, "train_step", step).start()
    if any(fault.in_save for fault in faults):
        sys.addaudithook(audit)


# These faults end a process or block it.


def kill(trainer: Trainer | None = None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(trainer: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def machine(trainer: Trainer) -> None:
    """Lose the machine: kill its launcher and all of its ranks before they can report anything."""
    launcher = os.getppid()
    os.kill(launcher, signal.SIGSTOP)  # A running launcher would end its other ranks.
    own = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for process in [*(int(number) for number in own if int(number) != os.getpid()), launcher, os.getpid()]:
        os.kill(process, signal.SIGKILL)


def hold(trainer: Trainer) -> None:
    """Block the rank until a signal asks it to stop. With --elastic, the launcher sends a signal when a machine
    joins."""
    while not trainer.stop_signal._requested:
        time.sleep(0.01)


def hang(trainer: Trainer) -> None:
    """Block the rank forever."""
    while True:
        time.sleep(3600)


def cut(trainer: Trainer) -> None:
    """Cut the network: shut down each connected socket."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # The socket is already closed, or was never connected.
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    # A listening socket has no connection that a lost network could cut.
                    listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if connection.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                        connection.shutdown(socket.SHUT_RDWR)


def full(trainer: Trainer) -> None:
    """Let no file grow, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


# A rank survives these faults, so the run must detect them.


def nan(trainer: Trainer, name: str = "") -> None:
    """Put a NaN into the gradient of a parameter, by default of the last parameter, in all later steps of the rank."""
    parameters = dict(trainer.state.model.named_parameters())
    parameter = parameters[name or list(parameters)[-1]]

    def poison(gradient: Tensor) -> Tensor:
        poisoned = gradient.clone()
        poisoned.view(-1)[0] = float("nan")
        return poisoned

    parameter.register_hook(poison)  # type: ignore[no-untyped-call]


def flip(trainer: Trainer, kind: str = "weight", name: str = "", element: int = 0, bit: int = 20) -> None:
    """Flip one bit of a weight, a master or a moment, by default in the rank's largest tensor."""
    tensors = {"weight": {n: p.detach() for n, p in trainer.state.model.named_parameters()}}.get(kind) or {
        state.name: state.values for state in trainer.state.optimizer.state_shards() if state.kind == kind
    }
    trainer.state.param_gather.finish_param_sync()
    values = tensors[name or max(tensors, key=lambda name: tensors[name].numel())].view(-1)
    bits = values.view(torch.int16 if values.element_size() == 2 else torch.int32)
    bits[element] ^= 1 << bit % (8 * values.element_size() - 1)


def break_weight(trainer: Trainer, name: str) -> None:
    """Set a weight and its master to infinity."""
    buffer = trainer.state.buffer
    index, part, _ = buffer.owned_part(name)
    buffer.masters[index][part][0] = float("inf")
    buffer.view(buffer.params, name).view(-1)[0] = float("inf")


def spike(trainer: Trainer) -> None:
    """Replace the next batch by random tokens."""
    read, left = trainer.data.to_device, [1]

    def noisy(text: Tensor, samples: Tensor | None = None) -> Any:
        if left and samples is not None:
            left.pop()
            text = torch.randint_like(text, int(text.max()) + 1)
        return read(text, samples)

    mock.patch.object(trainer.data, "to_device", noisy).start()


def slow(trainer: Trainer, part: str, seconds: float) -> None:
    """Make a part of each later step take `seconds` longer on this rank."""
    timer = trainer.timers(part)
    enter = type(timer).__enter__

    class Slow(type(timer)):  # type: ignore[misc]
        def __enter__(self) -> None:
            enter(self)
            time.sleep(seconds)

    timer.__class__ = Slow
