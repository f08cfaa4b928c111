"""A number on the device that the host follows some steps late, without waiting for the last step."""

import torch
from torch import Tensor

LATE = 4  # steps


class LateReading:
    """The values of an integer on `device`, each LATE calls after it was given.

    A call starts to copy the present value into pinned memory, and returns the one of LATE calls before, 0 in the first
    ones. Only that old copy is waited for: meanwhile the device has the steps since then to do. So all ranks read the
    same value at the same step, and may branch on it, which they may not on whatever has arrived by chance. On a CPU
    every copy is there at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._copies = torch.zeros(LATE, dtype=torch.int64, pin_memory=self._on_gpu)
        self._values = self._copies.numpy()  # the same memory
        self._arrivals: list[torch.cuda.Event | None] = [None] * LATE
        self._calls = 0

    def __call__(self, value: Tensor) -> int:
        """value: a scalar on the device, int64."""
        place = self._calls % LATE
        self._calls += 1
        if (arrival := self._arrivals[place]) is not None:
            arrival.synchronize()
        before = int(self._values[place])
        self._copies[place].copy_(value, non_blocking=True)
        if self._on_gpu:
            self._arrivals[place] = arrival = torch.cuda.Event()
            arrival.record()
        return before
