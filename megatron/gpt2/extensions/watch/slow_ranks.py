"""Which rank is slower than the others, and in which part of a step: --log-straggler.

In a step all ranks take equally long, since they wait for the slowest. The time of each rank without its waiting
differs. On a CPU a thread looks every few milliseconds whether the training thread waits in a collective, and
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
from collections.abc import Mapping, Sequence

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
            self._slow = SlowRanks(run.parallel, run.hosts)
            if run.device.type == "cpu":
                self._waiting = Waiting(run.timers)

    def at_log(self, run: Run, record: IterationRecord) -> list[str]:
        """See `SlowRanks.lines`."""
        if self._slow is None:
            return []
        waited_ms = self._waiting.take_ms(record.iteration - self._iteration) if self._waiting is not None else {}
        self._iteration = record.iteration
        own_us = [round(1000 * (run.timers.last_ms.get(name, 0.0) - waited_ms.get(name, 0.0))) for name in NAMES]
        everyone_us = gather_rows(torch.tensor(own_us, device=run.device))
        lines = self._slow.lines((everyone_us.double() / 1000).tolist(), record.ms_per_iteration)
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
    """Compares the times of all ranks at log lines."""

    def __init__(self, parallel: mpu.ParallelState, hosts: Mapping[int, str]) -> None:
        self._hosts, self._in_a_row = hosts, dict[tuple[int, str], int]()
        self._stage_size = parallel.world_size // parallel.pipeline_model_parallel_size

    def lines(self, everyone: Sequence[Sequence[float]], step_ms: float) -> list[str]:
        """Return a warning for each rank and part that has been slow for LINES lines; again if it was not in between.

        everyone: [ranks][NAMES], milliseconds without waiting. step_ms: of a step.
        """
        slow: dict[tuple[int, str], tuple[float, float]] = {}
        for rank, times in enumerate(everyone):
            first = rank - rank % self._stage_size  # other stages have other work
            others = [ms for other, ms in enumerate(everyone[first : first + self._stage_size], first) if other != rank]
            for part, name in enumerate(NAMES):
                median = statistics.median(ms[part] for ms in others) if others else times[part]
                if times[part] > RATIO * median and times[part] - median > SHARE * step_ms:
                    slow[rank, name] = times[part], median
            if (rank, "data loader") in slow:
                slow.pop((rank, "batch generator"), None)  # of which it is a part
        self._in_a_row = {key: self._in_a_row.get(key, 0) + 1 for key in slow}
        return [
            f'WARNING: {named([rank], self._hosts)} takes {ms - median:.0f} ms longer in "{part}" than the other '
            f"ranks of its stage, {ms:.0f} ms a step for {median:.0f}, since {LINES} log lines: look at its machine"
            for (rank, part), (ms, median) in slow.items()
            if self._in_a_row[rank, part] == LINES
        ]
