"""A loss that jumps: --rewind-on-spike.

PaLM (arXiv:2204.02311, section 5.1) met about 20 spikes, at no regular times. It restarted about 100 steps before each
and skipped 200 to 500 batches, after which the spike did not come back; the same batches did no harm elsewhere. OPT
(arXiv:2205.01068, section 2.5) restarted where the loss had diverged. Neither gives a factor. 1.5 times the median is
far above what the means of log lines differ by, some percent, and below a loss that has diverged.
"""

import dataclasses
import statistics
from collections import deque

from megatron.gpt2.checkpoint.writer import set_newer_aside
from megatron.gpt2.config import Config
from megatron.gpt2.dist.gathering import gather_over_ranks
from megatron.gpt2.hooks import Hook
from megatron.gpt2.monitor.reporting import IterationRecord
from megatron.gpt2.train.checkpointing import load_run
from megatron.gpt2.train.run import Run

MEMORY = 10  # log lines whose median counts
LEAST = 3  # lines without which there is none
MOST = 3  # rewinds of a process: a loss that jumps again and again has another cause than its samples


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


class RewindOnSpike(Hook):
    """Puts the run back to the checkpoint before a spike, in the same process, and past the samples since then."""

    def __init__(self, config: Config) -> None:
        assert config.train.rewind_on_spike is not None
        self._spikes = Spikes(config.train.rewind_on_spike)
        self._clean, self._spike = 0, ""

    def begin(self, run: Run) -> None:
        """The state is clean until a log line says otherwise."""
        self._clean = run.progress.iteration

    def at_log(self, run: Run, record: IterationRecord) -> list[str]:
        """Look at the loss of the line."""
        if (median := self._spikes.above(record.lm_loss)) is None:
            self._clean = record.iteration
        else:
            assert record.lm_loss is not None
            self._spike = (
                f"the loss is {record.lm_loss:.4f}, {record.lm_loss / median:.2f} times the median of the log lines "
                "before"
            )
        return []

    def went_back(self, run: Run) -> bool:
        """Load the newest checkpoint from before the spike, if the line showed one, and let the samples since then
        out."""
        if not self._spike:
            return False
        spike, self._spike = self._spike, ""
        progress, prepared = run.progress, run.prepared
        run.checkpoints.saver.finish()
        run.engine.gatherer.wait()
        self._spikes.rewinds += 1
        at, end = progress.iteration, progress.consumed_samples
        found = set_newer_aside(prepared.save_directory, self._clean, run.log.info) if run.parallel.rank == 0 else -1
        if max(gather_over_ranks(found, run.device)) < 0:
            self._spikes.rewinds = MOST
            tell(
                run,
                f"WARNING: at iteration {at} {spike}, and no checkpoint from before is there to go back to: the run "
                "goes on as it is, and no further spike is looked for",
            )
            return False
        # Whatever the flags said of the checkpoint that the run began with.
        own = dataclasses.replace(prepared.config.checkpoint, finetune=False, no_load_optim=False, no_load_rng=False)
        source = dataclasses.replace(
            prepared, source=str(prepared.save_directory), config=dataclasses.replace(prepared.config, checkpoint=own)
        )
        iteration, consumed, _ = load_run(source, run.parallel, run.engine, run.log.info)
        run.checkpoints.remove_local()
        run.engine.optimizer.skipped_in_a_row.zero_()
        progress.iteration, progress.consumed_samples = iteration, consumed
        progress.skipped_samples += end - consumed
        progress.loss_sum.zero_()
        run.data.rewind(consumed, progress.skipped_samples)
        run.log.rewind(iteration)
        run.incidents.iteration = iteration
        if run.timers.last_ms:
            run.timers.take_ms(1)
        for hook in run.hooks:
            hook.begin(run)
        left = MOST - self._spikes.rewinds
        tell(
            run,
            f"WARNING: at iteration {at} {spike}: the run is back at iteration {iteration} and skips "
            f"{end - consumed} samples (--rewind-on-spike; {left} more rewind{'s' * (left != 1)}, then none)",
        )
        return True


def tell(run: Run, line: str) -> None:
    """Print a line, and keep it in the history and the incidents."""
    run.log.info(line)
    run.incidents.note("spike", line)
