"""Which rank is slower than the others, and in which part of a step: --log-straggler.

In a step all ranks take equally long, since they wait for the slowest. What differs is the time of each rank without
its waiting. On a CPU a thread looks every few milliseconds whether the training thread waits in a collective, and
counts that time for the parts of the step that are timed then. On a GPU kernels wait on the device, and their time
cannot be told from a kernel's work: there a part without collectives says something, the data loader, and forward and
backward without tensor parallelism.
"""

import linecache
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

import mpu
from megatron.gpt2.config import Config
from megatron.gpt2.dist.gathering import gather_rows
from megatron.gpt2.dist.ranks import named
from megatron.gpt2.hooks import Hook
from megatron.gpt2.monitor.reporting import IterationRecord
from megatron.gpt2.monitor.timers import NAMES, Timers
from megatron.gpt2.train.run import Run

RATIO = 1.5  # times the median of the other ranks
SHARE = 0.05  # of a step by which a part has to be longer at least: a part can be short
LINES = 2  # log lines in a row: once may be chance
LOOK = 0.003  # seconds between two looks at the training thread


class LogStraggler(Hook):
    """Compares the ranks at each log line."""

    def __init__(self, config: Config) -> None:
        self._slow: SlowRanks | None = None
        self._waiting: Waiting | None = None
        self._iteration = 0

    def begin(self, run: Run) -> None:
        """Begin to look, if there are other ranks."""
        self._iteration = run.progress.iteration
        if run.parallel.world_size > 1 and self._slow is None:
            self._slow = SlowRanks(run.parallel, run.hosts, run.device)
            if run.device.type == "cpu":
                self._waiting = Waiting(run.timers)

    def at_log(self, run: Run, record: IterationRecord) -> list[str]:
        """See `SlowRanks.lines`."""
        if self._slow is None:
            return []
        waited_ms = self._waiting.take_ms(record.iteration - self._iteration) if self._waiting is not None else {}
        self._iteration = record.iteration
        own_ms = {name: ms - waited_ms.get(name, 0.0) for name, ms in run.timers.last_ms.items()}
        lines = self._slow.lines(own_ms, record.ms_per_iteration)
        for line in lines:
            run.incidents.note("slow", line)
        return lines

    def close(self, run: Run) -> None:
        """Look no more."""
        if self._waiting is not None:
            self._waiting.stop()


class Waiting:
    """How long the thread that makes this object waits for other ranks, by the timers that run meanwhile."""

    def __init__(self, timers: Timers) -> None:
        self._timers, self._main = timers, threading.get_ident()
        self._seconds: dict[str, float] = defaultdict(float)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="stragglers", daemon=True)
        self._thread.start()

    def take_ms(self, iterations: int) -> dict[str, float]:
        """Milliseconds of waiting per iteration, over the `iterations` since the last call."""
        taken, self._seconds = self._seconds, defaultdict(float)
        return {name: 1000 * seconds / iterations for name, seconds in taken.items()}

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _look(self) -> None:
        before = time.perf_counter()
        while not self._stopped.wait(LOOK):
            now = time.perf_counter()
            frame = sys._current_frames().get(self._main)
            if frame is not None and waits(frame.f_code.co_filename, frame.f_lineno):
                for name in self._timers.running():
                    self._seconds[name] += now - before
            before = now


def waits(filename: str, line: int) -> bool:
    """Whether a thread whose innermost line is this one waits for other ranks: inside torch's functions for
    collectives, or where our own code waits for one that was begun before."""
    return "torch/distributed/" in filename or ".wait(" in linecache.getline(filename, line)


class SlowRanks:
    """Compares the ranks at log lines. Every rank has one and calls it at the same lines."""

    def __init__(self, parallel: mpu.ParallelState, hosts: Mapping[int, str], device: torch.device) -> None:
        self._hosts, self._device = hosts, device
        a_stage = parallel.world_size // parallel.pipeline_model_parallel_size
        self._stages = [list(range(first, first + a_stage)) for first in range(0, parallel.world_size, a_stage)]
        self._in_a_row: dict[tuple[int, str], int] = {}

    def lines(self, own_ms: Mapping[str, float], step_ms: float) -> list[str]:
        """A warning for each rank and part that has been slow for LINES lines; again when it was not in between.

        own_ms: of this rank, by part, without waiting. step_ms: of a step.
        """
        mine = torch.tensor([round(1000 * own_ms.get(name, 0.0)) for name in NAMES], device=self._device)
        everyone = (gather_rows(mine).double() / 1000).tolist()  # [ranks][parts] ms
        slow = {
            (rank, NAMES[part]): (ms, median)
            for ranks in self._stages  # other stages have other work
            for part in range(len(NAMES))
            for rank, ms, median in _outliers(ranks, part, everyone)
            if ms - median > SHARE * step_ms
        }
        for rank, _ in list(slow):
            if (rank, "data loader") in slow:
                slow.pop((rank, "batch generator"), None)  # of which it is a part
        self._in_a_row = {key: self._in_a_row.get(key, 0) + 1 for key in slow}
        return [
            f'WARNING: {named([rank], self._hosts)} takes {ms - median:.0f} ms longer in "{part}" than the other '
            f"ranks of its stage, {ms:.0f} ms a step for {median:.0f}, since {LINES} log lines: look at its machine"
            for (rank, part), (ms, median) in slow.items()
            if self._in_a_row[rank, part] == LINES
        ]


def _outliers(
    ranks: Sequence[int], part: int, everyone: Sequence[Sequence[float]]
) -> Iterator[tuple[int, float, float]]:
    """The ranks whose part is RATIO times the median of the others, with both in ms."""
    for rank in ranks:
        if others := [everyone[other][part] for other in ranks if other != rank]:
            ms, median = everyone[rank][part], statistics.median(others)
            if ms > RATIO * median:
                yield rank, ms, median
