"""The training loop: steps, log lines, evaluations, checkpoints, and the decision to stop."""

import collections
import contextlib
import itertools
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from data_utils.command_line import plural
from megatron.gpt2.dist.gathering import all_reduce_over_data_and_pipeline
from megatron.gpt2.dist.signals import FOLDER_LOST, MORE_RANKS, OUT_OF_TIME
from megatron.gpt2.hooks import Hook
from megatron.gpt2.monitor.log_lines import IterationRecord, iteration_line, memory_line, peak_memory
from megatron.gpt2.monitor.timers import start_profiler
from megatron.gpt2.train.evaluate import evaluate_and_log, sample_text
from megatron.gpt2.train.not_finite import find_first_not_finite
from megatron.gpt2.train.train_step import train_step
from megatron.gpt2.train.trainer import Trainer
from mpu import kernels

READ_DELAY = 4  # The host reads a value this number of steps after the device has computed it.


def train(trainer: Trainer) -> str:
    """Train until the last iteration, or until a stop is requested. Return the reason of the stop, e.g. "SIGTERM", or
    "" after the last iteration. Every rank stops after the same step.

    Raises FloatingPointError if too many steps in a row were skipped. Raises DamagedData if ranks of a model-parallel
    group have read different text, and StopRun if a save cannot go on or a hook ends the run.
    """
    config, progress, train_iters = trainer.config.train, trainer.progress, trainer.context.train_iters
    trainer.state.model.train()
    training_log = IterationLogger(trainer)
    profiler = start_profiler(
        config.profile if trainer.parallel.rank in config.profile_ranks else (),
        start=progress.iteration,
        end=train_iters,
        rank=trainer.parallel.rank,
        device=trainer.device,
        folder=trainer.context.save_directory,
        log=trainer.log.info,
    )
    while progress.iteration < train_iters:
        trainer.hooks.call(Hook.on_step_begin, trainer)
        train_step(trainer)
        if profiler is not None:
            profiler.step()
        samples = trainer.current_global_batch_size
        progress.count_step(samples)
        trainer.incidents.iteration = progress.iteration
        trainer.hooks.call(Hook.on_step_end, trainer)
        trainer.log.count_iteration()
        skipped_in_a_row = training_log.log_if_due()
        check_skipped_steps(trainer, skipped_in_a_row)
        if any(trainer.hooks.call(Hook.maybe_rewind, trainer)):
            training_log = IterationLogger(trainer)
            continue
        if progress.iteration == train_iters:
            # A stop request in the last step changes nothing, because the run saves and evaluates anyway.
            break
        if trainer.current_global_batch_size != samples:
            trainer.log.info(
                f"the batch grows: {plural(trainer.current_global_batch_size, 'sample')} a step from "
                f"iteration {progress.iteration + 1} on"
            )
        if progress.iteration % config.eval_interval == 0:
            with training_log.paused():
                if evaluate_and_log(trainer, "valid"):
                    sample_text(trainer)
                trainer.log.report()

        reason = stop_reason(trainer)
        if reason and profiler is not None:
            profiler.stop()
        save_interval = trainer.config.checkpoint.save_interval
        if reason or (save_interval and progress.iteration % save_interval == 0):
            with training_log.paused():
                trainer.checkpoints.save()
                trainer.log.report()
        elif not reason:
            trainer.checkpoints.save_locally()
        if reason:
            return reason
    return ""


def stop_reason(trainer: Trainer) -> str:
    """Return why all ranks stop after this step, or "" if they continue."""
    config, iteration = trainer.config.train, trainer.progress.iteration
    minutes = (time.monotonic() - trainer.progress.started) / 60
    out_of_time = config.exit_duration_in_mins is not None and minutes > config.exit_duration_in_mins
    own_reason = FOLDER_LOST if trainer.checkpoints.is_lost else OUT_OF_TIME if out_of_time else ""
    reason = trainer.stop_signal.agreed(own_reason)
    if reason in ("", MORE_RANKS) and config.exit_interval and iteration % config.exit_interval == 0:
        return "--exit-interval"
    return reason


def check_skipped_steps(trainer: Trainer, in_a_row: int) -> None:
    """Raise FloatingPointError if --max-skipped-steps steps in a row were skipped."""
    if in_a_row >= trainer.config.train.max_skipped_steps:
        location, optimizer = find_first_not_finite(trainer), trainer.state.optimizer
        raise FloatingPointError(
            f"{plural(in_a_row, 'step')} in a row had a gradient that is not finite (loss scale "
            f"{optimizer.scaler.scale.item():g}, learning rate {optimizer.learning_rate.item():.3g}): "
            f"{location}lower --lr, or look at the data of samples before {trainer.progress.consumed_samples}; "
            "--max-skipped-steps sets the limit"
        )


class DelayedScalarReader:
    """Reads an integer from `device` while the device works on later steps: each value is returned READ_DELAY calls
    later.

    A call starts an asynchronous copy of the current value into pinned memory. The call returns the value of READ_DELAY
    calls before; the first calls return 0. The host waits only for the old copy. If a value is equal on all ranks, all
    ranks read it at the same step, so a branch may depend on it.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        buffers = torch.zeros(READ_DELAY + 1, dtype=torch.int64, pin_memory=self._on_gpu)
        self._buffers = itertools.cycle(buffers.unbind())
        self._copies = collections.deque[tuple[Tensor, torch.cuda.Event | None]]()

    def __call__(self, value: Tensor) -> int:
        """Submit `value`, an int64 scalar on the device. Return the value that was submitted READ_DELAY calls
        before."""
        copy = next(self._buffers).copy_(value, non_blocking=True)
        self._copies.append((copy, torch.cuda.current_stream().record_event() if self._on_gpu else None))
        if len(self._copies) <= READ_DELAY:
            return 0
        before, arrival = self._copies.popleft()
        if arrival is not None:
            arrival.synchronize()
        return int(before)


class IterationLogger:
    """Writes a log line every --log-interval iterations. Between log lines the logger only waits for a value that is
    READ_DELAY steps old."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._has_shown_memory = False
        self._skipped_in_a_row = DelayedScalarReader(trainer.device)
        self._begin_line(int(trainer.state.optimizer.skipped_steps), time.perf_counter())

    def _begin_line(self, skipped: int, now: float) -> None:
        progress = self._trainer.progress
        self._iteration, self._consumed = progress.iteration, progress.consumed_samples
        self._skipped, self._time = skipped, now

    def log_if_due(self) -> int:
        """Write a log line if one is due. Return how many steps in a row were skipped, which is equal on all ranks.
        The result may be READ_DELAY steps old, so that the host does not wait for the current step."""
        trainer, optimizer, iteration = self._trainer, self._trainer.state.optimizer, self._trainer.progress.iteration
        in_a_row = self._skipped_in_a_row(optimizer.skipped_in_a_row)
        if iteration % trainer.config.train.log_interval == 0 or iteration == trainer.context.train_iters:
            trainer.data.check_batches_match(iteration)
            self.log()
            # int() does not wait here, because the log line has already waited for the device.
            in_a_row = max(in_a_row, int(optimizer.skipped_in_a_row))
        return in_a_row

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of an evaluation or a save from the mean time per step."""
        start = time.perf_counter()
        yield
        self._time += time.perf_counter() - start

    def log(self) -> None:
        """Write the log line and the metrics of this iteration, and wait for the device. Every rank must call this
        method."""
        trainer, progress, optimizer = self._trainer, self._trainer.progress, self._trainer.state.optimizer
        iterations, samples = progress.iteration - self._iteration, progress.consumed_samples - self._consumed
        skipped_in_all = int(optimizer.skipped_steps)  # int() waits for the device.
        skipped = skipped_in_all - self._skipped
        loss = all_reduce_over_data_and_pipeline([progress.loss_sum], trainer.parallel).item()
        progress.loss_sum.zero_()
        now = time.perf_counter()
        seconds = now - self._time
        tokens_per_second = samples * trainer.config.data.seq_length / seconds
        record = IterationRecord(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            lm_loss=loss / (iterations - skipped) if iterations > skipped else None,
            learning_rate=optimizer.learning_rate.item(),
            loss_scale=optimizer.scaler.scale.item(),
            grad_norm=None if optimizer.found_inf.item() else optimizer.grad_norm.item(),
            ms_per_iteration=1000 * seconds / iterations,
            tokens_per_second=tokens_per_second,
            mfu=trainer.mfu(tokens_per_second),
            memory_bytes=peak_memory(trainer.device),
        )
        train_iters = trainer.context.train_iters
        end = trainer.context.batch_schedule.samples_after_steps(
            train_iters - progress.iteration, progress.consumed_samples
        )
        to_go = (end - progress.consumed_samples) * seconds / samples
        trainer.log.record(record)
        trainer.log.info(iteration_line(record, train_iters=train_iters, skipped=skipped, seconds_to_go=to_go))
        trainer.log.info(trainer.timers.line(iterations))
        for lines in trainer.hooks.call(Hook.on_log, trainer, record):
            for line in lines:
                trainer.log.info(line)
        for line in kernels.new_choices():
            trainer.log.info(line)
        if not self._has_shown_memory:
            expected = trainer.hooks.first_result(Hook.expected_memory, trainer)
            trainer.log.info(memory_line(trainer.device, expected.peak if expected else None))
            self._has_shown_memory = True
        self._begin_line(skipped_in_all, now)
