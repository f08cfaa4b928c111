"""`--rewind-on-spike`: returns to a checkpoint when the loss jumps, and skips the samples since then.

PaLM (arXiv:2204.02311, section 5.1) had about 20 loss spikes at irregular times. It restarted about 100 steps before
each spike and skipped 200 to 500 batches; then the spike did not occur again. The same batches did no harm elsewhere.
OPT (arXiv:2205.01068, section 2.5) restarted when the loss had diverged. Neither paper gives a threshold. The default
of 1.5 times the median is far above the usual differences between log lines (some percent), and below a diverged loss.
"""

import dataclasses
import statistics
from collections import deque

from data_utils.command_line import plural
from megatron.gpt2.checkpoint.writer import rename_newer_checkpoints
from megatron.gpt2.config import Config
from megatron.gpt2.dist.gathering import gather_ints
from megatron.gpt2.hooks import Hook
from megatron.gpt2.monitor.reporting import IterationRecord
from megatron.gpt2.train.checkpointing import load_checkpoint
from megatron.gpt2.train.trainer import Trainer

WINDOW = 10  # log lines in the median
MIN_LOSSES = 3  # log lines that the median needs
MAX_REWINDS = 3  # rewinds per process: a loss that keeps jumping has a different cause than its samples


class SpikeDetector:
    """Compares a loss with the median of the last log lines. factor: a loss above factor · median is a spike."""

    def __init__(self, factor: float) -> None:
        self._factor, self._losses, self.rewinds = factor, deque[float](maxlen=WINDOW), 0

    def median_if_spike(self, loss: float | None) -> float | None:
        """Return the median if `loss` is a spike and the run may rewind, otherwise None. loss: the loss of a log line,
        or None if all of its steps were skipped."""
        if loss is None:
            return None
        median = statistics.median(self._losses) if len(self._losses) >= MIN_LOSSES else None
        if median is not None and loss > self._factor * median and self.rewinds < MAX_REWINDS:
            return median
        self._losses.append(loss)
        return None


class RewindOnSpike(Hook):
    """Loads the last checkpoint before a spike, in the same process, and skips the samples since then."""

    def __init__(self, config: Config) -> None:
        assert config.train.rewind_on_spike is not None
        self._detector = SpikeDetector(config.train.rewind_on_spike)
        self._last_clean, self._spike = 0, ""

    def begin(self, trainer: Trainer) -> None:
        """Take the loss as normal until a log line shows a spike."""
        self._last_clean = trainer.progress.iteration

    def on_log(self, trainer: Trainer, record: IterationRecord) -> list[str]:
        """Check the loss of the log line."""
        if (median := self._detector.median_if_spike(record.lm_loss)) is None:
            self._last_clean = record.iteration
        else:
            assert record.lm_loss is not None
            self._spike = (
                f"the loss is {record.lm_loss:.4f}, {record.lm_loss / median:.2f} times the median of the log lines "
                "before"
            )
        return []

    def rewound(self, trainer: Trainer) -> bool:
        """Reload the last checkpoint before the spike, if there was one, and skip the samples since then."""
        if not self._spike:
            return False
        spike, self._spike = self._spike, ""
        progress, context = trainer.progress, trainer.context
        trainer.checkpoints.saver.finish()
        trainer.state.param_gather.wait()
        self._detector.rewinds += 1
        at, end = progress.iteration, progress.consumed_samples
        found = (
            rename_newer_checkpoints(context.save_directory, self._last_clean, trainer.log.info)
            if trainer.parallel.rank == 0
            else -1
        )
        if max(gather_ints(found, trainer.device)) < 0:
            self._detector.rewinds = MAX_REWINDS
            log_spike(
                trainer,
                f"WARNING: at iteration {at} {spike}, and there is no earlier checkpoint: the run continues, and "
                "further spikes are ignored",
            )
            return False
        # Load the whole state: these flags apply only to the checkpoint that the run started from.
        own = dataclasses.replace(context.config.checkpoint, finetune=False, no_load_optim=False, no_load_rng=False)
        source = dataclasses.replace(
            context, source=str(context.save_directory), config=dataclasses.replace(context.config, checkpoint=own)
        )
        iteration, consumed, _ = load_checkpoint(source, trainer.parallel, trainer.state, trainer.log.info)
        trainer.checkpoints.remove_local()
        trainer.state.optimizer.skipped_in_a_row.zero_()
        progress.iteration, progress.consumed_samples = iteration, consumed
        progress.skipped_samples += end - consumed
        progress.loss_sum.zero_()
        trainer.data.rewind(consumed, progress.skipped_samples)
        trainer.log.rewind(iteration)
        trainer.incidents.iteration = iteration
        if trainer.timers.last_ms:
            trainer.timers.take_ms(1)
        for hook in trainer.hooks:
            hook.begin(trainer)
        left = MAX_REWINDS - self._detector.rewinds
        log_spike(
            trainer,
            f"WARNING: at iteration {at} {spike}: the run is back at iteration {iteration} and skips "
            f"{plural(end - consumed, 'sample')} (--rewind-on-spike; {plural(left, 'more rewind')}, then none)",
        )
        return True


def log_spike(trainer: Trainer, line: str) -> None:
    """Log a line, and record it in the history and as an incident."""
    trainer.log.info(line)
    trainer.incidents.note("spike", line)
