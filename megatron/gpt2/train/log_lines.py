"""The log lines of training, and what is checked with them."""

import contextlib
import time
from collections.abc import Iterator

from megatron.gpt2.checkpoint.best import set_best_aside
from megatron.gpt2.hooks import first
from megatron.gpt2.monitor.incidents import FOLDER
from megatron.gpt2.monitor.reporting import IterationRecord, iteration_line, memory_line, peak_memory
from megatron.gpt2.monitor.run_log import RunLog
from megatron.gpt2.monitor.trackers import open_trackers
from megatron.gpt2.optimizer.late_reading import LateReading
from megatron.gpt2.train.checkpointing import write_config_and_tokenizer
from megatron.gpt2.train.collectives import sum_over_replicas
from megatron.gpt2.train.not_finite import explain
from megatron.gpt2.train.prepare import PreparedRun
from megatron.gpt2.train.run import Run


class LogLines:
    """What happened since the last log line, and the line. In between nothing waits for the device."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._iteration, self._time = run.progress.iteration, time.perf_counter()
        self._consumed = run.progress.consumed_samples
        self._skipped = int(run.engine.optimizer.skipped_steps)
        self._has_shown_memory = False
        self._skipped_in_a_row = LateReading(run.device)

    def step(self) -> None:
        """After each step: the line, where one is due. FloatingPointError where too many steps in a row were skipped,
        DamagedData where ranks that share layers have read different text."""
        run, optimizer, iteration = self._run, self._run.engine.optimizer, self._run.progress.iteration
        in_a_row = self._skipped_in_a_row(optimizer.skipped_in_a_row)
        if iteration % run.config.train.log_interval == 0 or iteration == run.prepared.train_iters:
            run.data.check_ranks_agree(iteration)
            self.log()
            in_a_row = max(in_a_row, int(optimizer.skipped_in_a_row))  # the line has waited for the device
        if in_a_row >= run.config.train.max_skipped_steps:
            where, scale = self._where_not_finite(), optimizer.scaler.scale.item()
            raise FloatingPointError(
                f"{in_a_row} step{'s' * (in_a_row > 1)} in a row had a gradient that is not finite (loss scale "
                f"{scale:g}, learning rate {optimizer.learning_rate.item():.3g}): "
                f"{where}lower --lr, or look at the data of samples before {run.progress.consumed_samples}; "
                "--max-skipped-steps sets the limit"
            )

    def _where_not_finite(self) -> str:
        """The first place of all ranks, and what each of them has of it in a file."""
        run = self._run
        samples = [micro_batch["samples"].tolist() for micro_batch in run.schedule.micro_batches]

        def again() -> None:
            run.schedule(run.schedule.micro_batches)
            run.engine.reducer.finish()

        first = explain(
            again,
            model=run.engine.model,
            reducer=run.engine.reducer,
            optimizer=run.engine.optimizer,
            parallel=run.parallel,
            hosts=run.hosts,
            save_directory=run.prepared.save_directory,
            facts={"iteration": run.progress.iteration, "samples": samples},
        )
        run.incidents.note("not finite", first)
        return f"{first} (the state is in {run.prepared.save_directory}/{FOLDER}); " if first else ""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training (an evaluation, a save): its time stays out of the means."""
        start = time.perf_counter()
        yield
        self._time += time.perf_counter() - start

    def log(self) -> None:
        """Write the line of this iteration, and keep its numbers. Every rank calls it; it waits for the device."""
        run, progress, optimizer = self._run, self._run.progress, self._run.engine.optimizer
        iterations = progress.iteration - self._iteration
        skipped_in_all = int(optimizer.skipped_steps)  # waits for the device
        skipped = skipped_in_all - self._skipped
        loss = sum_over_replicas([progress.loss_sum], run.parallel).item()
        progress.loss_sum.zero_()
        now = time.perf_counter()
        seconds, self._time = now - self._time, now
        samples = progress.consumed_samples - self._consumed
        tokens_per_second = samples * run.config.data.seq_length / seconds
        record = IterationRecord(
            progress.iteration,
            progress.consumed_samples,
            loss / (iterations - skipped) if iterations > skipped else None,
            optimizer.learning_rate.item(),
            optimizer.scaler.scale.item(),
            None if optimizer.found_inf.item() else optimizer.grad_norm.item(),
            1000 * seconds / iterations,
            tokens_per_second,
            run.mfu(tokens_per_second),
            peak_memory(run.device),
        )
        end = run.prepared.batch_schedule.after_steps(
            run.prepared.train_iters - progress.iteration, progress.consumed_samples
        )
        run.log.record(record)
        run.log.info(
            iteration_line(
                record,
                train_iters=run.prepared.train_iters,
                skipped=skipped,
                seconds_to_go=(end - progress.consumed_samples) * seconds / samples,
            )
        )
        run.log.info(run.timers.line(iterations))
        for hook in run.hooks:
            for line in hook.at_log(run, record):
                run.log.info(line)
        if not self._has_shown_memory:
            run.log.info(memory_line(run.device, first(hook.expected_memory(run) for hook in run.hooks)))
        self._has_shown_memory, self._iteration, self._skipped = True, progress.iteration, skipped_in_all
        self._consumed = progress.consumed_samples


def open_log(prepared: PreparedRun, iteration: int, *, active: bool) -> RunLog:
    """The log of a run that continues at `iteration`. The active rank also puts aside what an earlier run left, and
    writes config.json and the tokenizer."""
    trackers = open_trackers(prepared.config, start_iteration=iteration, active=active)
    log = RunLog(
        str(prepared.config.checkpoint.save),
        train_iters=prepared.train_iters,
        start_iteration=iteration,
        trackers=trackers,
        active=active,
    )
    if active:
        if iteration == 0:
            set_best_aside(prepared.save_directory, log.info)
        write_config_and_tokenizer(prepared)
    return log
