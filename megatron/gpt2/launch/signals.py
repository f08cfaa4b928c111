"""Stopping between two steps, on every rank after the same one.

SIGTERM, or Ctrl-C once, asks the run to finish its step, save and exit; Ctrl-C twice quits at once.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

# By urgency: the greatest number of all ranks counts.
_REASONS = ("", "--exit-duration-in-mins", "SIGTERM", "Ctrl-C")


class StopSignal:
    """Whether any rank was asked to stop. Use as a context manager, or close it.

    Ranks agree without waiting for the device, and nearly without waiting at all: each step starts an all-reduce of
    one CPU integer over a gloo group of its own, and reads the one that the step before started. What a rank is asked
    in step i thus ends all ranks after step i + 1. Every rank makes one, after the process group exists.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._asked = 0
        self._group, self._rank = None, 0
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group, self._rank = dist.new_group(backend="gloo", timeout=timeout), dist.get_rank()
        self._shared = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        reason = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process even inside a library that hangs
        if self._rank == 0 and not self._asked:
            # Not print(): the signal may have come in the middle of another one.
            os.write(2, f"\n{reason}: the step is finished and saved first; Ctrl-C quits at once\n".encode())
        self._asked = max(self._asked, _REASONS.index(reason))

    def agreed(self, out_of_time: bool = False) -> str:
        """Why to stop now, or "". Each rank calls it once a step, and all get the same answer.

        out_of_time: this rank's clock says that --exit-duration-in-mins is over; clocks differ, the answer does not.
        """
        mine = max(self._asked, int(out_of_time))
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
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __enter__(self) -> StopSignal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._restore()  # the other ranks may never come to the last exchange
