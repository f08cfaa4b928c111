"""The loop around the steps: log lines, evaluations, checkpoints, and when to stop."""

import contextlib
import time
from collections.abc import Iterator

from megatron.gpt2.dist.gathering import sum_over_replicas
from megatron.gpt2.dist.signals import MORE_RANKS, OUT_OF_TIME
from megatron.gpt2.hooks import first
from megatron.gpt2.monitor.reporting import IterationRecord, iteration_line, memory_line, peak_memory
from megatron.gpt2.monitor.timers import start_profiler
from megatron.gpt2.optimizer.optimizer import LateReading
from megatron.gpt2.train.evaluate import evaluate_and_log, sample_text
from megatron.gpt2.train.not_finite import explain
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.train_step import train_step


def train(run: Run) -> str:
    """Train until the last iteration of the run, or until it is asked to stop. Returns what asked for the stop, for
    instance "SIGTERM"; empty at the end. Every rank stops after the same step.

    Raises FloatingPointError if too many steps in a row were skipped, DamagedData if ranks that share layers have read
    different text, StopRun if a hook ends the run.
    """
    config, progress, train_iters = run.config.train, run.progress, run.prepared.train_iters
    run.engine.model.train()
    lines = LogLines(run)
    profiler = start_profiler(
        config.profile if run.parallel.rank in config.profile_ranks else (),
        start=progress.iteration,
        end=train_iters,
        rank=run.parallel.rank,
        device=run.device,
        folder=run.prepared.save_directory,
        log=run.log.info,
    )
    while progress.iteration < train_iters:
        for hook in run.hooks:
            hook.before_step(run)
        train_step(run)
        if profiler is not None:
            profiler.step()
        progress.step(samples := run.samples_of_step)
        run.incidents.iteration = progress.iteration
        for hook in run.hooks:
            hook.after_step(run)
        run.log.step()
        lines.step()
        if any(hook.went_back(run) for hook in run.hooks):
            lines = LogLines(run)
            continue
        if progress.iteration == train_iters:
            break  # whatever asks for a stop in the last step: all that is left is to save and to evaluate
        if run.samples_of_step != samples:
            run.log.info(
                f"the batch grows: {run.samples_of_step} samples a step from iteration {progress.iteration + 1} on"
            )
        if progress.iteration % config.eval_interval == 0:
            with lines.paused():
                if evaluate_and_log(run, "valid"):
                    sample_text(run)
                run.log.report()

        reason = stop_reason(run)
        if reason and profiler is not None:
            profiler.stop()
        save_interval = run.config.checkpoint.save_interval
        if reason or (save_interval and progress.iteration % save_interval == 0):
            with lines.paused():
                run.save()
                run.log.report()
        elif not reason:
            run.save_locally()
        if reason:
            return reason
    return ""


def stop_reason(run: Run) -> str:
    """What asks for a stop after this step, agreed on by all ranks; empty if nothing does."""
    config, iteration = run.config.train, run.progress.iteration
    minutes = (time.monotonic() - run.progress.started) / 60
    out_of_time = config.exit_duration_in_mins is not None and minutes > config.exit_duration_in_mins
    reason = run.stop.agreed(OUT_OF_TIME if out_of_time else "")
    if reason in ("", MORE_RANKS) and config.exit_interval and iteration % config.exit_interval == 0:
        return "--exit-interval"
    return reason


class LogLines:
    """What happened since the last log line, and the line. In between nothing waits for the device."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._has_shown_memory = False
        self._skipped_in_a_row = LateReading(run.device)
        self._begin_line(int(run.engine.optimizer.skipped_steps), time.perf_counter())

    def _begin_line(self, skipped: int, now: float) -> None:
        progress = self._run.progress
        self._iteration, self._consumed = progress.iteration, progress.consumed_samples
        self._skipped, self._time = skipped, now

    def step(self) -> None:
        """After each step: the line, if one is due."""
        run, optimizer, iteration = self._run, self._run.engine.optimizer, self._run.progress.iteration
        in_a_row = self._skipped_in_a_row(optimizer.skipped_in_a_row)
        if iteration % run.config.train.log_interval == 0 or iteration == run.prepared.train_iters:
            run.data.check_ranks_agree(iteration)
            self.log()
            in_a_row = max(in_a_row, int(optimizer.skipped_in_a_row))  # the line has waited for the device
        if in_a_row >= run.config.train.max_skipped_steps:
            where = explain(run)
            raise FloatingPointError(
                f"{in_a_row} step{'s' * (in_a_row > 1)} in a row had a gradient that is not finite (loss scale "
                f"{optimizer.scaler.scale.item():g}, learning rate {optimizer.learning_rate.item():.3g}): "
                f"{where}lower --lr, or look at the data of samples before {run.progress.consumed_samples}; "
                "--max-skipped-steps sets the limit"
            )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training (an evaluation, a save): its time stays out of the means."""
        start = time.perf_counter()
        yield
        self._time += time.perf_counter() - start

    def log(self) -> None:
        """Write the line of this iteration, and keep its numbers. Every rank calls it; it waits for the device."""
        run, progress, optimizer = self._run, self._run.progress, self._run.engine.optimizer
        iterations, samples = progress.iteration - self._iteration, progress.consumed_samples - self._consumed
        skipped_in_all = int(optimizer.skipped_steps)  # waits for the device
        skipped = skipped_in_all - self._skipped
        loss = sum_over_replicas([progress.loss_sum], run.parallel).item()
        progress.loss_sum.zero_()
        now = time.perf_counter()
        seconds = now - self._time
        tokens_per_second = samples * run.config.data.seq_length / seconds
        record = IterationRecord(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            lm_loss=loss / (iterations - skipped) if iterations > skipped else None,
            learning_rate=optimizer.learning_rate.item(),
            loss_scale=optimizer.scaler.scale.item(),
            grad_norm=None if optimizer.found_inf.item() else optimizer.grad_norm.item(),
            ms_per_iteration=1000 * seconds / iterations,
            tokens_per_second=tokens_per_second,
            mfu=run.mfu(tokens_per_second),
            memory_bytes=peak_memory(run.device),
        )
        train_iters = run.prepared.train_iters
        end = run.prepared.batch_schedule.after_steps(train_iters - progress.iteration, progress.consumed_samples)
        to_go = (end - progress.consumed_samples) * seconds / samples
        run.log.record(record)
        run.log.info(iteration_line(record, train_iters=train_iters, skipped=skipped, seconds_to_go=to_go))
        run.log.info(run.timers.line(iterations))
        for hook in run.hooks:
            for line in hook.at_log(run, record):
                run.log.info(line)
        if not self._has_shown_memory:
            run.log.info(memory_line(run.device, first(hook.expected_memory(run) for hook in run.hooks)))
            self._has_shown_memory = True
        self._begin_line(skipped_in_all, now)
