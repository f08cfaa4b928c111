"""`--log-straggler`: names slow ranks, and the slow part of their step.

All ranks take equally long for a step, because they wait for the slowest rank. The waiting time of a rank is therefore
subtracted. On a CPU, a thread checks every few milliseconds whether the training thread waits in a collective, and adds
this time to the waiting time of each timer that runs. On a GPU, kernels wait on the device, and the waiting time cannot
be measured. On a GPU, only parts without collectives can be compared: the data loader, and forward and backward without
tensor parallelism.
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
from megatron.gpt2.dist.ranks import format_ranks
from megatron.gpt2.hooks import Hook
from megatron.gpt2.monitor.log_lines import IterationRecord
from megatron.gpt2.monitor.timers import TIMER_ORDER, Timers
from megatron.gpt2.train.trainer import Trainer

# A part of a step is slow if its time is above MIN_RATIO times the median of the other ranks, and above the median by
# MIN_SHARE of the time of a step. The second condition is needed because the times of short parts vary a lot.
MIN_RATIO = 1.5
MIN_SHARE = 0.05
MIN_LINES = 2  # A single slow log line may be chance, so a warning needs two in a row.
SAMPLE_INTERVAL = 0.003  # the seconds between two checks of the training thread


class LogStraggler(Hook):
    """Compares the ranks' step times at each log line."""

    def __init__(self, config: Config) -> None:
        self._wait_sampler: WaitSampler | None = None

    def on_train_begin(self, trainer: Trainer) -> None:
        """Start the detector."""
        self._iteration = trainer.progress.iteration
        self._detector = StragglerDetector(trainer.parallel, trainer.hosts)
        if trainer.device.type == "cpu" and self._wait_sampler is None:
            self._wait_sampler = WaitSampler(trainer.timers)

    def on_log(self, trainer: Trainer, record: IterationRecord) -> list[str]:
        """Return the result of `StragglerDetector.warnings`."""
        waited_ms = self._wait_sampler.take_ms(record.iteration - self._iteration) if self._wait_sampler else {}
        self._iteration = record.iteration
        own_ms = [trainer.timers.last_ms.get(name, 0.0) - waited_ms.get(name, 0.0) for name in TIMER_ORDER]
        all_ms = gather_rows(torch.tensor(own_ms, device=trainer.device)).tolist()
        lines = self._detector.warnings(all_ms, record.ms_per_iteration)
        for line in lines:
            trainer.incidents.note("slow", line)
        return lines

    def on_train_end(self, trainer: Trainer) -> None:
        """Stop the sampling thread."""
        if self._wait_sampler:
            self._wait_sampler.stop()


class WaitSampler:
    """Measures for each timer how long the training thread, which creates this object, waits for other ranks."""

    def __init__(self, timers: Timers) -> None:
        self._timers, self._main = timers, threading.get_ident()
        self._seconds: dict[str, float] = defaultdict(float)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="stragglers", daemon=True)
        self._thread.start()

    def take_ms(self, iterations: int) -> dict[str, float]:
        """Return {timer: milliseconds of waiting per iteration}, the means over the `iterations` since the last
        call."""
        taken, self._seconds = self._seconds, defaultdict(float)
        return {name: 1000 * seconds / iterations for name, seconds in taken.items()}

    def stop(self) -> None:
        """Stop the sampling thread."""
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        before = time.perf_counter()
        while not self._stopped.wait(SAMPLE_INTERVAL):
            now = time.perf_counter()
            frame = sys._current_frames().get(self._main)
            if frame is not None and is_waiting(frame.f_code.co_filename, frame.f_lineno):
                for name in self._timers.running():
                    self._seconds[name] += now - before
            before = now


def is_waiting(filename: str, line: int) -> bool:
    """Return whether a thread whose innermost frame is at this line waits for other ranks: the line is in
    torch.distributed or calls `.wait(`."""
    return "torch/distributed/" in filename or ".wait(" in linecache.getline(filename, line)


class StragglerDetector:
    """Compares the times of all ranks at log lines."""

    def __init__(self, parallel: mpu.ParallelState, hosts: Mapping[int, str]) -> None:
        self._hosts, self._in_a_row = hosts, dict[tuple[int, str], int]()
        self._stage_size = parallel.world_size // parallel.pipeline_model_parallel_size

    def warnings(self, times_ms: Sequence[Sequence[float]], step_ms: float) -> list[str]:
        """Return a warning for each rank and part that has been slow for exactly MIN_LINES log lines in a row.

        times_ms: for each rank, the milliseconds of each timer in TIMER_ORDER, without waiting.
        step_ms: the milliseconds of a step.
        """
        slow: dict[tuple[int, str], tuple[float, float]] = {}
        for rank, times in enumerate(times_ms):
            start = rank - rank % self._stage_size  # the first rank of the stage; other stages have different work
            others = [ms for other, ms in enumerate(times_ms[start : start + self._stage_size], start) if other != rank]
            for part, name in enumerate(TIMER_ORDER):
                median = statistics.median(ms[part] for ms in others) if others else times[part]
                if times[part] > MIN_RATIO * median and times[part] - median > MIN_SHARE * step_ms:
                    slow[rank, name] = times[part], median
            if (rank, "data loader") in slow:
                slow.pop((rank, "batch generator"), None)  # The time of the batch generator includes the data loader.
        self._in_a_row = {key: self._in_a_row.get(key, 0) + 1 for key in slow}
        return [
            f'WARNING: {format_ranks([rank], self._hosts)} takes {ms - median:.0f} ms longer in "{part}" than the '
            f"other ranks of its stage, {ms:.0f} ms per step instead of {median:.0f}, for {MIN_LINES} log lines: "
            "check its machine"
            for (rank, part), (ms, median) in slow.items()
            if self._in_a_row[rank, part] == MIN_LINES
        ]
