"""Where the time of an iteration goes: named timers that never wait for the device, and --profile, torch's profiler.

On a GPU a timer is a pair of events put into the current stream, read when the log is written. The log has
already read the loss by then, so the events are complete; one that is not is left for the next line. On a CPU
it is the host's clock.

    with timers("forward"):
        loss = model(tokens)
    ...
    print(timers.line(iterations=100))
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

# The order of the log line. A name that is not here comes after these, in order of first use.
NAMES = ("forward", "backward", "allreduce", "optimizer", "batch generator", "data loader")
OPERATIONS = 15  # in the profiler's table


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
        """Return the milliseconds since the last call."""
        total, self._total = self._total, 0.0
        return 1000 * total


class DeviceTimer:
    """Adds up the device's time between enter and exit, by events of the current stream. Not re-entrant."""

    is_running = False  # for the host

    def __init__(self) -> None:
        self._pending: list[list[torch.cuda.Event]] = []  # pairs: start, end
        self._free: list[list[torch.cuda.Event]] = []  # reused: making one costs more than recording

    def __enter__(self) -> None:
        pair = self._free.pop() if self._free else [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        self._pending.append(pair)

    def __exit__(self, *error: object) -> None:
        self._pending[-1][1].record()

    def take_ms(self) -> float:
        """Return the milliseconds of the intervals that the device has finished and that were not read before."""
        finished = sum(end.query() for _, end in self._pending)  # a stream runs in order: these are the first ones
        done, self._pending = self._pending[:finished], self._pending[finished:]
        self._free += done
        return sum(start.elapsed_time(end) for start, end in done)


class Timers:
    """`with timers(name): ...`, and a line of means for the log. last_ms: what `take_ms` last returned."""

    def __init__(self, device: torch.device) -> None:
        self._make: type[HostTimer | DeviceTimer] = DeviceTimer if device.type == "cuda" else HostTimer
        self._timers: dict[str, HostTimer | DeviceTimer] = {}
        self.last_ms: dict[str, float] = {}

    def __call__(self, name: str) -> HostTimer | DeviceTimer:
        if name not in self._timers:
            self._timers[name] = self._make()
        return self._timers[name]

    def running(self) -> list[str]:
        """The names of the host's timers that run now; another thread may ask."""
        return [name for name, timer in list(self._timers.items()) if timer.is_running]

    def take_ms(self, iterations: int) -> dict[str, float]:
        """Return milliseconds per iteration by name, over the `iterations` since the last call, and start anew."""
        assert iterations > 0, "no iteration has run since the last line"
        names = sorted(self._timers, key=lambda name: NAMES.index(name) if name in NAMES else len(NAMES))
        self.last_ms = {name: self._timers[name].take_ms() / iterations for name in names}
        return self.last_ms

    def line(self, iterations: int) -> str:
        """Return `time (ms) | forward: 12.34 | backward: 24.68 | ...`: means over the `iterations` since the last
        call."""
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
    """Start torch's profiler in a run from iteration `start` + 1 to `end`, or return None if there is nothing to
    profile. Call its `step` after each iteration, and its `stop` if the run ends before `end`.

    The iteration before the first one warms it up. An evaluation between two profiled iterations is in the profile too.
    After the last one it writes a Chrome trace into `folder` and logs a table of the operations that cost most by their
    own time, without that of the operations they call: on a GPU the time of the kernels that an operation starts.

    iterations: (first, last) of --profile, or () for none. log: prints on rank 0 only.
    """
    first, last = (max(iterations[0], start + 1), min(iterations[1], end)) if iterations else (1, 0)
    if first > last:
        if iterations:
            log(
                f"WARNING: --profile {iterations[0]} {iterations[1]}: this run goes from iteration {start + 1} to {end}"
            )
        return None
    before = first - start - 1  # iterations that are not profiled
    trace = folder / f"profile_{first}-{last}_rank_{rank}.json.gz"

    def write(profiled: profile) -> None:
        count = min(profiled.step_num, last - start) - before
        if count > 0:
            new = trace.with_name("tmp-" + trace.name)  # its end says how it is packed
            profiled.export_chrome_trace(str(new))
            os.replace(new, trace)
            table = profiled.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=OPERATIONS)
            (log if rank == 0 else print)(
                f"the costliest operations of {count} iterations, by their own time on the {device.type}:\n{table}\n"
                f"  trace: {trace}, for https://ui.perfetto.dev or chrome://tracing"
            )

    profiler = profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda"),
        acc_events=True,
        schedule=schedule(wait=max(0, before - 1), warmup=min(1, before), active=1 + last - first, repeat=1),
        on_trace_ready=write,
    )
    profiler.start()
    return profiler
