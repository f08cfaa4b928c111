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


class Waiting:
    """Seconds that this process has waited for other ranks, as far as somebody counts them."""

    seconds = 0.0


class HostTimer:
    """Adds up the host's time between enter and exit. Not re-entrant. waited_ms: of the time that the last `take_ms`
    took, for other ranks."""

    def __init__(self) -> None:
        self._total = self._started = self._waited = self._waited_before = 0.0
        self.waited_ms = 0.0

    def __enter__(self) -> None:
        self._started, self._waited_before = time.perf_counter(), Waiting.seconds

    def __exit__(self, *error: object) -> None:
        self._total += time.perf_counter() - self._started
        self._waited += Waiting.seconds - self._waited_before

    def take_ms(self) -> float:
        """Milliseconds since the last call."""
        total, self.waited_ms = self._total, 1000 * self._waited
        self._total = self._waited = 0.0
        return 1000 * total


class DeviceTimer:
    """Adds up the device's time between enter and exit, by events of the current stream. Not re-entrant."""

    waited_ms = 0.0  # the host does not

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
    """`with timers(name): ...`, and a line of means for the log. own_ms: what `take_ms` last returned, without the time
    in which this rank waited for others; on a GPU, where kernels wait, with it."""

    def __init__(self, device: torch.device) -> None:
        self._make: type[HostTimer | DeviceTimer] = DeviceTimer if device.type == "cuda" else HostTimer
        self._timers: dict[str, HostTimer | DeviceTimer] = {}
        self.own_ms: dict[str, float] = {}

    def __call__(self, name: str) -> HostTimer | DeviceTimer:
        timer = self._timers.get(name)
        if timer is None:
            timer = self._timers[name] = self._make()
        return timer

    def take_ms(self, iterations: int) -> dict[str, float]:
        """Milliseconds per iteration by name, over the `iterations` since the last call; starts anew."""
        assert iterations > 0, "no iteration has run since the last line"
        names = [name for name in NAMES if name in self._timers]
        names += [name for name in self._timers if name not in NAMES]
        times = {name: self._timers[name].take_ms() / iterations for name in names}
        self.own_ms = {name: ms - self._timers[name].waited_ms / iterations for name, ms in times.items()}
        return times

    def line(self, iterations: int) -> str:
        """`time (ms) | forward: 12.34 | backward: 24.68 | ...`: means over the `iterations` since the last call."""
        return " | ".join(["time (ms)", *(f"{name}: {ms:.2f}" for name, ms in self.take_ms(iterations).items())])
