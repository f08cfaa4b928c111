"""`--rewind-on-spike`: returns to a checkpoint when the loss jumps, and skips the samples since this checkpoint.

The training of PaLM (arXiv:2204.02311, section 5.1) had about 20 loss spikes at irregular times. The authors restarted
training about 100 steps before each spike and skipped 200 to 500 batches. The spikes did not occur again. With other
weights, the skipped batches caused no spike. OPT (arXiv:2205.01068, section 2.5) was restarted when the loss had
diverged. Neither paper gives a threshold. The default of 1.5 times the median is far above the usual differences
between log lines (some percent), and below a diverged loss.
"""

import statistics
from collections import deque

from data_utils.command_line import plural
from megatron.gpt2.checkpoint.writer import rename_newer_checkpoints
from megatron.gpt2.config import Config
from megatron.gpt2.dist.gathering import gather_ints
from megatron.gpt2.hooks import Hook
from megatron.gpt2.monitor.log_lines import IterationRecord
from megatron.gpt2.train.trainer import Trainer

WINDOW = 10  # the largest number of log lines for the median
MIN_LOSSES = 3  # the smallest number of log lines for the median
MAX_REWINDS = 3  # the largest number of rewinds; the cause of further spikes is probably not in the samples


class SpikeDetector:
    """Compares a loss with the median of the last log lines.

    factor: a loss above `factor` times the median is a spike.
    """

    def __init__(self, factor: float) -> None:
        self._factor, self._losses, self.rewinds = factor, deque[float](maxlen=WINDOW), 0

    def median_if_spike(self, loss: float | None) -> float | None:
        """Return the median if `loss` is a spike and the run may rewind. Otherwise return None.

        loss: the loss of a log line, or None if all steps since the previous log line were skipped.
        """
        if loss is None:
            return None
        median = statistics.median(self._losses) if len(self._losses) >= MIN_LOSSES else None
        if median is not None and loss > self._factor * median and self.rewinds < MAX_REWINDS:
            return median
        self._losses.append(loss)
        return None


class RewindOnSpike(Hook):
    """Loads the last checkpoint before a spike, in the same process, and skips the samples since this checkpoint."""

    def __init__(self, config: Config) -> None:
        assert config.train.rewind_on_spike is not None
        self._detector = SpikeDetector(config.train.rewind_on_spike)
        self._last_clean, self._spike = 0, ""

    def on_train_begin(self, trainer: Trainer) -> None:
        """Remember the iteration of the start: earlier checkpoints are from before any spike."""
        self._last_clean = trainer.progress.iteration

    def on_log(self, trainer: Trainer, record: IterationRecord) -> list[str]:
        """Check whether the loss of the log line is a spike."""
        if (median := self._detector.median_if_spike(record.lm_loss)) is None:
            self._last_clean = record.iteration
        else:
            assert record.lm_loss is not None
            self._spike = (
                f"the loss is {record.lm_loss:.4f}, {record.lm_loss / median:.2f} times the median of the log lines "
                "before"
            )
        return []

    def maybe_rewind(self, trainer: Trainer) -> bool:
        """If the log line has shown a spike, load the last checkpoint before it and skip the samples since this
        checkpoint."""
        if not self._spike:
            return False
        folder, spike, newest = trainer.context.save_directory, f"{trainer.progress.iteration} {self._spike}", -1
        self._spike = ""
        trainer.checkpoints.finish()
        if trainer.parallel.rank == 0:
            newest = rename_newer_checkpoints(folder, self._last_clean, trainer.log.info)
        if has_earlier := max(gather_ints(newest, trainer.device)) >= 0:
            self._detector.rewinds += 1
            skipped, rewinds_left = trainer.rewind(folder), MAX_REWINDS - self._detector.rewinds
            outcome = (
                f": the run is back at iteration {trainer.progress.iteration} and skips {plural(skipped, 'sample')} "
                f"(--rewind-on-spike; {plural(rewinds_left, 'more rewind')}, then none)"
            )
        else:
            self._detector.rewinds = MAX_REWINDS
            outcome = ", and there is no earlier checkpoint: the run continues, and further spikes are ignored"
        line = f"WARNING: at iteration {spike}{outcome}"
        trainer.log.info(line)
        trainer.incidents.note("spike", line)
        return has_earlier
