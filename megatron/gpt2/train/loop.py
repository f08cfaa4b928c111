"""The loop around the steps: log lines, evaluations, checkpoints, and when to stop."""

import time

from megatron.gpt2.dist.elastic import MORE_RANKS
from megatron.gpt2.dist.signals import OUT_OF_TIME
from megatron.gpt2.monitor.profiling import profiler_for
from megatron.gpt2.train.evaluate import evaluate_and_log, sample_text
from megatron.gpt2.train.log_lines import LogLines
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.train_step import train_step


def train(run: Run) -> str:
    """Train until the last iteration of the run, or until it is asked to stop. Returns what asked for the stop, for
    instance "SIGTERM"; empty at the end. Every rank stops after the same step."""
    config, progress, train_iters = run.config.train, run.progress, run.prepared.train_iters
    run.engine.model.train()
    lines = LogLines(run)
    profiler = profiler_for(
        config.profile,
        config.profile_ranks,
        rank=run.parallel.rank,
        start=progress.iteration,
        end=train_iters,
        device=run.device,
        folder=run.prepared.save_directory,
        log=run.log.info,
    )
    while progress.iteration < train_iters:
        with profiler(progress.iteration + 1):
            for hook in run.hooks:
                hook.before_step(run)
            train_step(run)
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
        if reason:
            profiler.finish()
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
    """What asks for a stop after this step, agreed on by all ranks; empty where nothing does."""
    config, iteration = run.config.train, run.progress.iteration
    out_of_time = (
        config.exit_duration_in_mins is not None
        and time.monotonic() - run.progress.started > 60 * config.exit_duration_in_mins
    )
    reason = run.stop.agreed(OUT_OF_TIME if out_of_time else run.prepared.ranks.newcomers)
    if reason in ("", MORE_RANKS) and config.exit_interval and iteration % config.exit_interval == 0:
        return "--exit-interval"
    return reason
