"""Where the time of an iteration goes: named timers that never wait for the device.

On a GPU a timer is a pair of events put into the current stream, read when the log is written. The log has
already read the loss by then, so the events are complete; one that is not is left for the next line. On a CPU
it is the host's clock.

    with timers("forward"):
        loss = model(tokens)
    ...
    print(timers.line(iterations=100))
"""

import math
import time

import torch

# The order of the log line. A name that is not here comes after these, in order of first use.
NAMES = ("forward", "backward", "allreduce", "optimizer", "batch generator", "data loader")


class HostTimer:
    """Adds up the host's time between enter and exit. Not re-entrant."""

    def __init__(self) -> None:
        self._total = self._started = 0.0
        self.is_running = False

    def __enter__(self) -> None:
        self.is_running, self._started = True, time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._total += time.perf_counter() - self._started
        self.is_running = False

    def take_ms(self) -> float:
        """Milliseconds since the last call."""
        total, self._total = self._total, 0.0
        return 1000 * total


class DeviceTimer:
    """Adds up the device's time between enter and exit, by events of the current stream. Not re-entrant."""

    is_running = False  # for the host

    def __init__(self) -> None:
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # reused: making one costs more than recording

    def __enter__(self) -> None:
        pair = (
            self._free.pop()
            if self._free
            else (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        )
        pair[0].record()
        self._pending.append(pair)

    def __exit__(self, *error: object) -> None:
        self._pending[-1][1].record()

    def take_ms(self) -> float:
        """Milliseconds of the intervals that the device has finished and that were not read before."""
        finished = sum(end.query() for _, end in self._pending)  # a stream runs in order: these are the first ones
        done, self._pending = self._pending[:finished], self._pending[finished:]
        self._free += done
        return math.fsum(start.elapsed_time(end) for start, end in done)


class Timers:
    """`with timers(name): ...`, and a line of means for the log. last_ms: what `take_ms` last returned."""

    def __init__(self, device: torch.device) -> None:
        self._make: type[HostTimer | DeviceTimer] = DeviceTimer if device.type == "cuda" else HostTimer
        self._timers: dict[str, HostTimer | DeviceTimer] = {}
        self.last_ms: dict[str, float] = {}

    def __call__(self, name: str) -> HostTimer | DeviceTimer:
        timer = self._timers.get(name)
        if timer is None:
            timer = self._timers[name] = self._make()
        return timer

    def running(self) -> list[str]:
        """The names of the host's timers that run now; another thread may ask."""
        return [name for name, timer in list(self._timers.items()) if timer.is_running]

    def take_ms(self, iterations: int) -> dict[str, float]:
        """Milliseconds per iteration by name, over the `iterations` since the last call; starts anew."""
        assert iterations > 0, "no iteration has run since the last line"
        names = [name for name in NAMES if name in self._timers]
        names += [name for name in self._timers if name not in NAMES]
        self.last_ms = {name: self._timers[name].take_ms() / iterations for name in names}
        return self.last_ms

    def line(self, iterations: int) -> str:
        """`time (ms) | forward: 12.34 | backward: 24.68 | ...`: means over the `iterations` since the last call."""
        return " | ".join(["time (ms)", *(f"{name}: {ms:.2f}" for name, ms in self.take_ms(iterations).items())])
