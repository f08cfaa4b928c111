"""Stop a run after a step on SIGTERM, SIGHUP, SIGUSR1 or Ctrl-C, on every rank after the same step.

The first signal asks the run to finish its step, save and exit. A second signal ends the process at once. A thread
handles signals, because Python runs signal handlers only between two bytecode instructions, and one call of torch can
take minutes.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

OUT_OF_TIME = "--exit-duration-in-mins"
MORE_RANKS = "new ranks (--elastic)"
FOLDER_LOST = "another run in the --save folder"
# If ranks have different reasons to stop, the reason that is last in this tuple is used.
_REASONS = ("", MORE_RANKS, OUT_OF_TIME, "SIGUSR1", "SIGHUP", "SIGTERM", "Ctrl-C", FOLDER_LOST)
_REASON_OF = {
    signal.SIGUSR2: MORE_RANKS,  # The launcher sends SIGUSR2 when a machine joins.
    signal.SIGUSR1: "SIGUSR1",
    signal.SIGHUP: "SIGHUP",
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "Ctrl-C",
}
# {signal: seconds within which a second such signal is ignored}. Slurm sends SIGTERM to the launcher and to the ranks,
# and the launcher forwards SIGTERM to the ranks. A second Ctrl-C always counts, because a user presses the keys on
# purpose.
REPEAT_SECONDS = {signal.SIGUSR1: 5.0, signal.SIGHUP: 5.0, signal.SIGTERM: 5.0, signal.SIGINT: 0.0}


class SignalThread:
    """Handles signals in a thread, even while the main thread is inside a call of torch.

    in_thread: a function that the thread calls with each signal in `numbers`.
    in_main: the handler that Python calls later in the main thread.
    """

    def __init__(
        self,
        numbers: Collection[signal.Signals],
        in_thread: Callable[[signal.Signals], object],
        in_main: Callable[[int, FrameType | None], Any] = lambda number, frame: None,
    ) -> None:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._before = {
            number: signal.signal(number, in_main)
            for number in numbers
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # nohup sets SIG_IGN.
        }
        # Python's C-level handler immediately writes the number of each signal to this socket.
        self._fd_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, args=(in_thread,), name="signals", daemon=True)
        self._thread.start()

    def _run(self, in_thread: Callable[[signal.Signals], object]) -> None:
        while numbers := self._read.recv(64):
            for number in numbers:
                if number in self._before:
                    in_thread(signal.Signals(number))

    def close(self) -> None:
        """Restore the previous handlers and end the thread."""
        if self._write.fileno() >= 0:
            signal.set_wakeup_fd(self._fd_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._write.close()
            self._thread.join()
            self._read.close()


def exit_on_sigterm(code: int) -> SignalThread:
    """On SIGTERM, end this process at once with the exit code `code`. A launcher sends SIGTERM to the other ranks after
    one rank has exited, and may report the highest exit code."""
    return SignalThread([signal.SIGTERM], lambda number: os._exit(code))


class StopSignal:
    """Collects the stop requests of all ranks. Call `close` at the end, or `restore` after an error. Every rank must
    create a StopSignal after it has created the process group.

    Each step starts an all-reduce of one CPU integer over a separate gloo group, and reads the result of the previous
    step. So the ranks do not wait for the device, and a request in step i stops all ranks after step i + 1.

    timeout: the timeout of the gloo group; None for torch's default.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._requested = 0
        self._group, self._rank = None, 0
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group, self._rank = dist.new_group(backend="gloo", timeout=timeout), dist.get_rank()
        self._shared = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None
        self._first: dict[int, float] = {}  # {signal: the time of the first such signal}
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._signals = SignalThread(_REASON_OF, self._report, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        """Store a stop request. Python calls this handler in the main thread."""
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # A second Ctrl-C also ends a process that hangs in a library.
        self._requested = max(self._requested, _REASONS.index(_REASON_OF[signal.Signals(number)]))

    def _report(self, number: signal.Signals) -> None:
        """Print the first signal, and exit on the second one. `SignalThread` calls this method in its own thread."""
        if number not in REPEAT_SECONDS:
            return
        if number == signal.SIGHUP:  # Writing to a terminal that no longer exists would be an error.
            for descriptor in self._terminals:
                if not os.isatty(descriptor):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        name, window, now = _REASON_OF[number], REPEAT_SECONDS[number], time.monotonic()
        if number not in self._first:
            self._first[number] = now
            after = f" after {window:g} s or more" if window else ""
            self._print(f"{name}: the step is finished and saved first; {name} again{after} quits at once")
        elif now - self._first[number] >= window:
            self._print(f"{name} again: the run ends at once; the same command continues from the last checkpoint")
            os._exit(128 + number)

    def _print(self, line: str) -> None:
        if self._rank == 0:
            # print() is not possible here, because the main thread may be inside print().
            os.write(2, f"\n{line}\n".encode())

    def agreed(self, reason: str = "") -> str:
        """Return the reason to stop now, or "". All ranks must call this method once per step, and all get the same
        result.

        reason: a reason to stop of this rank only, in addition to signals, or "".
        """
        own_reason = max(self._requested, _REASONS.index(reason))
        if self._group is None:
            return _REASONS[own_reason]
        self._wait()
        agreed = int(self._shared)
        self._shared = torch.tensor([own_reason], dtype=torch.int32)
        self._pending = dist.all_reduce(self._shared, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return _REASONS[agreed]

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def close(self) -> None:
        """Wait for the last all-reduce, which all ranks have started, and restore the previous signal handlers."""
        self._wait()
        self.restore()

    def restore(self) -> None:
        """Restore the previous signal handlers without waiting for the last all-reduce, which other ranks may not have
        started after an error."""
        self._signals.close()
