"""A loss that jumps: --rewind-on-spike.

PaLM (arXiv:2204.02311, section 5.1) met about 20 spikes, at no regular times. It restarted about 100 steps before each
and skipped 200 to 500 batches, after which the spike did not come back; the same batches did no harm elsewhere. OPT
(arXiv:2205.01068, section 2.5) restarted where the loss had diverged. Neither gives a factor. 1.5 times the median is
far above what the means of log lines differ by, some percent, and below a loss that has diverged.
"""

import statistics
from collections import deque

MEMORY = 10  # log lines whose median counts
LEAST = 3  # lines without which there is none
MOST = 3  # rewinds of a process: a loss that jumps again and again has another cause than its samples


class LossSpike(Exception):
    """A log line's loss is far above those before it. clean: the iteration of the line before."""

    def __init__(self, clean: int, loss: float, median: float) -> None:
        super().__init__(f"the loss is {loss:.4f}, {loss / median:.2f} times the median of the log lines before")
        self.clean = clean


class Spikes:
    """The losses of the last log lines. factor: of their median, above which a loss is a spike."""

    def __init__(self, factor: float) -> None:
        self._factor, self._losses, self.rewinds = factor, deque[float](maxlen=MEMORY), 0

    def above(self, loss: float | None) -> float | None:
        """The median, where `loss` is a spike and the run is to go back; None where it is not. loss: of a log line,
        None where all of its steps were skipped."""
        if loss is None:
            return None
        median = statistics.median(self._losses) if len(self._losses) >= LEAST else None
        if median is not None and loss > self._factor * median and self.rewinds < MOST:
            return median
        self._losses.append(loss)
        return None
