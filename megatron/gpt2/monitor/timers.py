"""Named timers that never wait for the device, and torch's profiler for --profile.

On a GPU a timer records a pair of events in the current stream. The log line reads the events after the loss, when most
of them are complete. The next log line reads the other events. On a CPU a timer reads the host's clock.

    with timers("forward"):
        loss = model(tokens)
    ...
    print(timers.line(iterations=100))
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

# The log line shows the timers in this order, and then other timers in the order of their first use.
TIMER_ORDER = ("forward", "backward", "allreduce", "optimizer", "batch generator", "data loader")
PROFILE_ROWS = 15  # The number of rows of the profiler's table.


class HostTimer:
    """Sums the host's time inside `with` blocks, which must not be nested."""

    def __init__(self) -> None:
        self._total = self._started = 0.0
        self.is_running = False

    def __enter__(self) -> None:
        self.is_running, self._started = True, time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._total += time.perf_counter() - self._started
        self.is_running = False

    def take_ms(self) -> float:
        """Return the milliseconds that the timer has measured since the last call."""
        total, self._total = self._total, 0.0
        return 1000 * total


class DeviceTimer:
    """Sums the device's time inside `with` blocks, which must not be nested. Events in the current stream
    measure the time."""

    is_running = False  # `Timers.running` returns only host timers.

    def __init__(self) -> None:
        self._pending: list[list[torch.cuda.Event]] = []  # [start event, end event] of each measured interval.
        self._free: list[list[torch.cuda.Event]] = []  # Used pairs of events, because creating events is slow.

    def __enter__(self) -> None:
        pair = self._free.pop() if self._free else [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        self._pending.append(pair)

    def __exit__(self, *error: object) -> None:
        self._pending[-1][1].record()

    def take_ms(self) -> float:
        """Return the milliseconds of the intervals that were completed since the last call."""
        finished = sum(end.query() for _, end in self._pending)  # A stream completes intervals in order.
        done, self._pending = self._pending[:finished], self._pending[finished:]
        self._free += done
        return sum(start.elapsed_time(end) for start, end in done)


class Timers:
    """The timers of a run: `with timers(name):` measures the time of its block.

    last_ms: the last result of `take_ms`.
    """

    def __init__(self, device: torch.device) -> None:
        self._make: type[HostTimer | DeviceTimer] = DeviceTimer if device.type == "cuda" else HostTimer
        self._timers: dict[str, HostTimer | DeviceTimer] = {}
        self.last_ms: dict[str, float] = {}

    def __call__(self, name: str) -> HostTimer | DeviceTimer:
        if name not in self._timers:
            self._timers[name] = self._make()
        return self._timers[name]

    def running(self) -> list[str]:
        """Return the names of the host timers that are running. Other threads may call this method."""
        return [name for name, timer in list(self._timers.items()) if timer.is_running]

    def take_ms(self, iterations: int) -> dict[str, float]:
        """Return {name: milliseconds per iteration}, the means over the `iterations` since the last call."""
        assert iterations > 0, "no iteration has run since the last line"
        names = sorted(
            self._timers, key=lambda name: TIMER_ORDER.index(name) if name in TIMER_ORDER else len(TIMER_ORDER)
        )
        self.last_ms = {name: self._timers[name].take_ms() / iterations for name in names}
        return self.last_ms

    def line(self, iterations: int) -> str:
        """Return the line `time (ms) | forward: 12.34 | backward: 24.68 | ...` with the result of `take_ms`."""
        return " | ".join(["time (ms)", *(f"{name}: {ms:.2f}" for name, ms in self.take_ms(iterations).items())])


def start_profiler(
    iterations: tuple[int, ...],
    *,
    start: int,
    end: int,
    rank: int,
    device: torch.device,
    folder: Path,
    log: Callable[[str], None],
) -> profile | None:
    """Start torch's profiler and return it, or return None if this run has no iteration to profile.

    Call `step` of the profiler after each iteration, and `stop` if the run ends before `end`. The iteration before the
    first profiled one is a warmup. Evaluations between profiled iterations are profiled, too. After the last profiled
    iteration, the profiler writes a Chrome trace into `folder` and logs a table of the slowest operations. The table is
    sorted by self time; on a GPU the self time is the time of the kernels of an operation.

    iterations: (first, last) of --profile, or ().
    start, end: the run has the iterations `start` + 1 to `end`.
    log: a function that prints a line on rank 0 only.
    """
    first, last = (max(iterations[0], start + 1), min(iterations[1], end)) if iterations else (1, 0)
    if first > last:
        if iterations:
            log(
                f"WARNING: --profile {iterations[0]} {iterations[1]}: this run has only iterations {start + 1} to {end}"
            )
        return None
    before = first - start - 1  # The number of iterations before the first profiled one.
    trace = folder / f"profile_{first}-{last}_rank_{rank}.json.gz"

    def write(profiled: profile) -> None:
        count = min(profiled.step_num, last - start) - before
        if count > 0:
            profiled.export_chrome_trace(str(trace))
            table = profiled.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=PROFILE_ROWS)
            (log if rank == 0 else print)(
                f"the slowest operations of {count} iterations, by self time on the {device.type}:\n{table}\n"
                f"  trace: {trace}, for https://ui.perfetto.dev or chrome://tracing"
            )

    profiler = profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda"),
        acc_events=True,
        record_shapes=True,
        schedule=schedule(wait=max(0, before - 1), warmup=min(1, before), active=1 + last - first, repeat=1),
        on_trace_ready=write,
    )
    profiler.start()
    return profiler
