"""Stop a run after a step on SIGTERM, SIGUSR1 or Ctrl-C, on every rank after the same step.

The first signal asks the run to finish its step, save and exit. A second signal ends the process at once. A thread
handles them, because Python runs signal handlers only between two bytecode instructions, and a step can spend minutes
in one call of torch.
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
MORE_RANKS = "new ranks (--elastic)"
FOLDER_LOST = "another run in the --save folder"
# Reasons to stop, by priority. The highest index of all ranks wins.
_REASONS = ("", MORE_RANKS, OUT_OF_TIME, "SIGUSR1", "SIGTERM", "Ctrl-C", FOLDER_LOST)
_PRIORITY = {signal.SIGUSR2: 1, signal.SIGUSR1: 3, signal.SIGTERM: 4, signal.SIGINT: 5}  # the launcher sends SIGUSR2
# A repeated signal within this time is ignored. Slurm sends SIGTERM to the launcher and to its ranks, and the launcher
# forwards it to them. Ctrl-C is only repeated on purpose.
REPEAT_SECONDS = {signal.SIGUSR1: 5.0, signal.SIGTERM: 5.0, signal.SIGINT: 0.0}


class StopSignal:
    """Collects stop requests of all ranks. Use it as a context manager, or call `close`.

    Each step starts an all-reduce of one CPU integer over a separate gloo group, and reads the result of the previous
    step. So the ranks do not wait for the device, and a request in step i stops all ranks after step i + 1. Every rank
    must create a StopSignal, after the process group.

    timeout: of the gloo group, None for torch's default.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._requested = 0
        self._group, self._rank = None, 0
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group, self._rank = dist.new_group(backend="gloo", timeout=timeout), dist.get_rank()
        self._shared = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None
        self._wakeup_read, self._wakeup_write = socket.socketpair()
        self._wakeup_write.setblocking(False)
        self._before = {number: signal.signal(number, self._handle_signal) for number in _PRIORITY}
        # Python's C-level handler writes the signal number to this socket at once.
        self._wakeup_fd_before = signal.set_wakeup_fd(self._wakeup_write.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run_thread, name="signals", daemon=True)
        self._thread.start()

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Store a stop request. Runs in the main thread."""
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C also ends a process that hangs in a library
        self._requested = max(self._requested, _PRIORITY[signal.Signals(number)])

    def _run_thread(self) -> None:
        """Print the first signal and exit on the second one, until the socket is closed."""
        first: dict[int, float] = {}
        while numbers := self._wakeup_read.recv(64):
            for number in [signal.Signals(number) for number in numbers if number in REPEAT_SECONDS]:
                name, window, now = _REASONS[_PRIORITY[number]], REPEAT_SECONDS[number], time.monotonic()
                if number not in first:
                    first[number] = now
                    after = f" after {window:g} s or more" if window else ""
                    self._print(f"{name}: the step is finished and saved first; {name} again{after} quits at once")
                elif now - first[number] >= window:
                    self._print(
                        f"{name} again: the run ends at once; the same command continues from the last checkpoint"
                    )
                    os._exit(128 + number)

    def _print(self, line: str) -> None:
        if self._rank == 0:
            os.write(2, f"\n{line}\n".encode())  # not print(): the main thread may be inside print()

    def agreed(self, reason: str = "") -> str:
        """Return the reason to stop now, or "". All ranks call it once per step and get the same result.

        reason: a reason of this rank in addition to signals, such as OUT_OF_TIME. It may differ between ranks.
        """
        mine = max(self._requested, _REASONS.index(reason))
        if self._group is None:
            return _REASONS[mine]
        self._wait()
        agreed = int(self._shared)
        self._shared = torch.tensor([mine], dtype=torch.int32)
        self._pending = dist.all_reduce(self._shared, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return _REASONS[agreed]

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def close(self) -> None:
        """Finish the last all-reduce, which all ranks have started, and restore the previous handlers."""
        self._wait()
        self.restore()

    def restore(self) -> None:
        """Restore the previous handlers and end the thread without the last all-reduce, which other ranks may not reach
        after an error."""
        if self._wakeup_write.fileno() < 0:
            return  # already restored
        signal.set_wakeup_fd(self._wakeup_fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._wakeup_write.close()
        self._thread.join()
        self._wakeup_read.close()

    def __enter__(self) -> StopSignal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.restore()
