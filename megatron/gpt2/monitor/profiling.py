"""--profile START END: torch's profiler over these iterations, a Chrome trace and a table of what costs most."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

OPERATIONS = 15  # in the table


class Profiler:
    """Profiles the iterations from `first` to `last`: `with profiler(iteration): ...` around each iteration.

    The iteration before `first` warms it up; around all others it does nothing. An evaluation between two profiled
    iterations is in the profile too. trace: the file of the Chrome trace. log: takes the table.
    """

    def __init__(self, first: int, last: int, *, device: torch.device, trace: Path, log: Callable[[str], None]) -> None:
        self._first, self._last, self._device, self._trace, self._log = first, last, device, trace, log
        self._profile: profile | None = None
        self._seen = 0

    def __call__(self, iteration: int) -> contextlib.AbstractContextManager[None]:
        return self._around(iteration) if self._first - 1 <= iteration <= self._last else contextlib.nullcontext()

    @contextlib.contextmanager
    def _around(self, iteration: int) -> Iterator[None]:
        if self._profile is None:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type == "cuda")
            warmup = int(iteration < self._first)
            self._profile = profile(
                activities=activities,
                acc_events=True,
                schedule=schedule(wait=0, warmup=warmup, active=1 + self._last - self._first),
            )
            self._profile.start()
        else:
            self._profile.step()
        yield
        self._seen += iteration >= self._first
        if iteration == self._last:
            self.finish()

    def finish(self) -> None:
        """Write the trace and print the table, if anything was profiled; also where training stops before `last`."""
        if self._profile is None:
            return
        self._profile.stop()
        if self._seen:
            new = self._trace.with_name("tmp-" + self._trace.name)  # its end says how it is packed
            self._profile.export_chrome_trace(str(new))
            os.replace(new, self._trace)
            table = operation_table(self._profile.key_averages(), self._seen, self._device.type)
            self._log(f"{table}\n  trace: {self._trace}, for https://ui.perfetto.dev or chrome://tracing")
        self._profile = None


def profiler_for(
    iterations: tuple[int, ...],
    ranks: tuple[int, ...],
    *,
    rank: int,
    start: int,
    end: int,
    device: torch.device,
    folder: Path,
    log: Callable[[str], None],
) -> Profiler:
    """The profiler of this rank in a run from iteration `start` + 1 to `end`.

    iterations: (first, last) of --profile, or () for none. ranks: those of --profile-ranks. folder: for the trace.
    log: prints on rank 0 alone. Where there is nothing to profile, the profiler never does anything.
    """
    first, last = (max(iterations[0], start + 1), min(iterations[1], end)) if iterations else (0, -2)
    if iterations and first > last:
        log(f"WARNING: --profile {iterations[0]} {iterations[1]}: this run goes from iteration {start + 1} to {end}")
    if first > last or rank not in ranks:
        first, last = 0, -2
    return Profiler(
        first,
        last,
        device=device,
        trace=folder / f"profile_{first}-{last}_rank_{rank}.json.gz",
        log=log if rank == 0 else lambda text: print(text, flush=True),
    )


def operation_table(averages: Any, iterations: int, device_type: str) -> str:
    """A table of the OPERATIONS costliest operations, by their own time: without that of the operations they call.

    averages: of `torch.profiler.profile.key_averages`. On a GPU the time is that of the kernels that an operation
    starts, on a CPU the processor's.
    """

    def own(event: Any) -> float:  # µs
        return event.self_device_time_total if device_type == "cuda" else event.self_cpu_time_total

    events = [event for event in averages if event.device_type.name == "CPU" and own(event) > 0]
    total = sum(map(own, events)) or 1.0
    lines = [
        f"the costliest operations of {iterations} iterations, by their own time on the {device_type}:",
        f"  {'ms an iteration':>15}  {'share':>6}  {'calls':>8}  operation",
    ]
    for event in sorted(events, key=own, reverse=True)[:OPERATIONS]:
        name = "(between operations)" if event.key.startswith("ProfilerStep") else event.key
        lines.append(
            f"  {own(event) / 1000 / iterations:15.3f}  {own(event) / total:6.1%}  "
            f"{event.count / iterations:8.1f}  {name}"
        )
    return "\n".join(lines)
