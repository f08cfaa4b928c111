"""Which rank is slower than the others, and in which part of a step: --log-straggler.

In a step all ranks take equally long, since they wait for the slowest. What differs is the time of each rank without
its waiting. A CPU waits in `Work.wait`, whoever began the collective and wherever, so it is counted there. On a GPU
kernels wait on the device, and their time cannot be told from a kernel's work: there a part without collectives says
something, the data loader, and forward and backward without tensor parallelism.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

import mpu
from megatron.gpt2.dist.gathering import gather_rows
from megatron.gpt2.dist.ranks import named
from megatron.gpt2.monitor.timers import NAMES, Waiting

RATIO = 1.5  # times the median of the other ranks
SHARE = 0.05  # of a step by which a part has to be longer at least: a part can be short
LINES = 2  # log lines in a row: once may be chance


@contextlib.contextmanager
def counting_waits() -> Iterator[None]:
    """Inside, `Waiting` counts."""
    work_class: Any = dist.Work
    wait = work_class.wait

    def counted(work: dist.Work, *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return wait(work, *arguments, **options)
        finally:
            Waiting.seconds += time.perf_counter() - began

    work_class.wait = counted
    try:
        yield
    finally:
        work_class.wait = wait


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
