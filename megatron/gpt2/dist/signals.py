"""Stopping between two steps, on every rank after the same step.

The first SIGTERM, SIGUSR1 or Ctrl-C asks the run to finish its step, save and exit; a second one ends the process at
once. A thread answers them: a step can spend minutes inside one call of torch, and Python runs its signal handlers only
between two instructions of its own.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from datetime import timedelta
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

OUT_OF_TIME = "--exit-duration-in-mins"
MORE_RANKS = "ranks that came (--elastic)"
# Why a run stops, by urgency: the greatest number of all ranks counts.
_REASONS = ("", MORE_RANKS, OUT_OF_TIME, "SIGUSR1", "SIGTERM", "Ctrl-C")
_OF_SIGNAL = {signal.SIGUSR2: 1, signal.SIGUSR1: 3, signal.SIGTERM: 4, signal.SIGINT: 5}  # SIGUSR2 is the launcher's
# Seconds within which a second signal counts as the first one: Slurm sends SIGTERM to a launcher and to its ranks, and
# the launcher passes it on to them. Pressing Ctrl-C twice is always meant.
ECHO = {signal.SIGUSR1: 5.0, signal.SIGTERM: 5.0, signal.SIGINT: 0.0}


class StopSignal:
    """Whether any rank was asked to stop. Use it as a context manager, or close it.

    The ranks agree without waiting for the device, and nearly without waiting at all: each step starts an all-reduce of
    one CPU integer over a gloo group of its own, and reads the one that the step before started. A request in step i
    thus ends all ranks after step i + 1. Every rank makes a StopSignal, after the process group exists.

    timeout: of the group, None for torch's default.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._asked = 0
        self._group, self._rank = None, 0
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group, self._rank = dist.new_group(backend="gloo", timeout=timeout), dist.get_rank()
        self._shared = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None
        self._heard, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._before = {number: signal.signal(number, self._ask) for number in _OF_SIGNAL}
        # The system's own handler writes the number of a signal there at once, whatever Python is at.
        self._bell_before = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._answer, name="signals", daemon=True)
        self._thread.start()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between two instructions."""
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process even inside a library that hangs
        self._asked = max(self._asked, _OF_SIGNAL[signal.Signals(number)])

    def _answer(self) -> None:
        """In the thread, until the bell is closed."""
        first: dict[int, float] = {}
        while numbers := self._heard.recv(64):
            for number in [signal.Signals(number) for number in numbers if number in ECHO]:
                name, echo, now = _REASONS[_OF_SIGNAL[number]], ECHO[number], time.monotonic()
                if number not in first:
                    first[number] = now
                    after = f" after {echo:g} s or more" if echo else ""
                    self._print(f"{name}: the step is finished and saved first; {name} again{after} quits at once")
                elif now - first[number] >= echo:
                    self._print(
                        f"{name} again: the run ends at once; the same command continues from the last checkpoint"
                    )
                    os._exit(128 + number)

    def _print(self, line: str) -> None:
        if self._rank == 0:
            os.write(2, f"\n{line}\n".encode())  # not print(): the main thread may be in the middle of another one

    def agreed(self, reason: str = "") -> str:
        """Why to stop now, or "". Each rank calls it once per step, and all ranks get the same answer.

        reason: what asks this rank to stop in addition to signals: OUT_OF_TIME if its clock says so. Clocks differ, the
        answer does not.
        """
        mine = max(self._asked, _REASONS.index(reason))
        if self._group is None:
            return _REASONS[mine]
        self._wait()
        answer = int(self._shared)
        self._shared = torch.tensor([mine], dtype=torch.int32)
        self._pending = dist.all_reduce(self._shared, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return _REASONS[answer]

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def close(self) -> None:
        """Finish the last exchange, which all ranks have started, and put the former handlers back."""
        self._wait()
        self.restore()

    def restore(self) -> None:
        """Put the former handlers back and end the thread, without the last exchange: after an error the other ranks
        may never come to it."""
        if self._bell.fileno() < 0:
            return  # done already
        signal.set_wakeup_fd(self._bell_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._bell.close()
        self._thread.join()
        self._heard.close()

    def __enter__(self) -> StopSignal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.restore()
