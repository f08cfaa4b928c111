"""The training program: `python -m megatron.pretrain_gpt2 [flags]`, alone or under a launcher (launch/launchers.py).

Exit codes: 0 where the run ended as asked (also after SIGTERM), 1 where it failed, 2 for bad input, which is
answered in one line by one rank.
"""

import functools
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from data_utils import DamagedData
from data_utils.command_line import line_buffered, program
from megatron.gpt2 import device as devices
from megatron.gpt2.config import require
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.agent import Kept
from megatron.gpt2.dist.elastic import AGAIN, MORE_RANKS, StoodBy
from megatron.gpt2.dist.errors import refuse, refuse_memory
from megatron.gpt2.dist.launchers import Launch, read_launch
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.dist.rendezvous import leave, meet, name_lost
from megatron.gpt2.dist.run_program import ended_by
from megatron.gpt2.dist.spawn import start_ranks
from megatron.gpt2.hooks import StopRun, first
from megatron.gpt2.monitor.ended import FINISHED, clear_ended, mark_ended
from megatron.gpt2.monitor.incidents import Incidents, rank_name
from megatron.gpt2.train.evaluate import evaluate_and_log, sample_text
from megatron.gpt2.train.loop import train
from megatron.gpt2.train.report import closing, is_finished_line, log_start, newest_iteration
from megatron.gpt2.train.run import Run, build_run
from megatron.gpt2.train.setup import PreparedRun, prepare_run


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare -> build -> train -> report the run of the command line `argv` (default: this process's). Returns the
    exit code."""
    line_buffered()
    built = build(sys.argv[1:] if argv is None else argv)
    if isinstance(built, int):
        return built
    run, ranks = built, built.prepared.ranks
    try:
        return train_and_report(run)
    except (FloatingPointError, StopRun) as error:
        note_error(run, error)
        run.log.info(f"stopped: {error}")  # on every rank after the same step
        run.checkpoints.saver.finish()
        return 1
    except DamagedData as error:
        note_error(run, error)
        run.log.note(f"stopped: {error}")
        return refuse(error, ranks)
    except (RuntimeError, MemoryError) as error:
        note_error(run, error)
        run.log.note("stopped: " + " ".join(str(error).split())[:300])
        if devices.is_out_of_memory(error):
            return refuse_out_of_memory(run.prepared, error)
        if any(hook.explains(run, error) for hook in run.hooks) or name_lost(ranks):
            return 1
        raise
    except Exception as error:  # a bug of ours
        note_error(run, error)
        raise
    finally:
        run.close()
        leave(ranks)


def note_error(run: Run, error: BaseException) -> None:
    """Keep, for whoever finds out why the run died, what ended it and at which line of this program."""
    package = str(Path(__file__).parents[1])
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(package)]
    at = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    run.incidents.note("error", " ".join(f"{type(error).__name__}: {error}".split())[:3000], at=at)


def build(words: Sequence[str]) -> Run | int:
    """The run of a command line, or the exit code where there is nothing to train in this process: it has started
    other ranks, which have ended, the run is finished already, or the input was refused."""
    ranks = Ranks()
    prepared: PreparedRun | None = None
    warnings: list[str] = []  # from before the run has a log
    try:
        launch, words = read_launch(words)
        if launch.starts:
            # A flag that cannot be is refused, and --help answered, before there are ranks.
            where = parse(words).checkpoint
            newest = functools.partial(newest_iteration, where, alone=launch.starts == launch.world_size)
            return start_ranks(main, words, launch, Kept(Path(str(where.save)), newest))
        ranks = launch.ranks()
        if ranks.world_size > 1:
            # Until the run can save, SIGTERM is the launcher's answer to another rank's exit: leave as that one did.
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(2))
        arguments = parse(words)
        save = Path(str(arguments.checkpoint.save))
        ranks = noting(ranks, save, launch)
        usable = None
        if launch.elastic:
            require(
                bool(arguments.config.train.global_batch_size or arguments.config.train.growth),
                "--elastic needs --global-batch-size: without it the batch would change with the number of ranks",
            )
            require(
                "train.micro_batch_size" in arguments.given or not arguments.continues,
                "--elastic needs --micro-batch-size where no model is named: it decides how many ranks can take "
                "part, before there is a checkpoint to ask",
            )
            usable = arguments.config.usable_ranks
        ranks = noting(meet(launch, usable), save, launch)  # among those that came it may have another number
        devices.set_threads(ranks)

        def log(line: str) -> None:
            if ranks.rank == 0 and line:
                print(line, flush=True)
            if line.startswith("WARNING"):
                warnings.append(line)

        log(launch.notice)
        prepared = prepare_run(arguments, ranks, log)
        if prepared.is_finished:
            log(
                is_finished_line(
                    arguments.checkpoint, prepared.source, prepared.start["iteration"], prepared.train_iters
                )
            )
            if ranks.rank == 0:
                mark_ended(save, FINISHED, prepared.start["iteration"], 0)
            ranks.end(0)
            ranks.leave()
            return 0
        run = build_run(prepared, log)
        if ranks.rank == 0:
            clear_ended(save)
        run.incidents.note(
            "start",
            f"on {ranks.world_size} ranks from iteration {run.progress.iteration}",
            command=[sys.executable, *sys.argv],
            layout={
                "world_size": ranks.world_size,
                "tensor": run.parallel.tensor_model_parallel_size,
                "pipeline": run.parallel.pipeline_model_parallel_size,
                "data": run.parallel.data_parallel_size,
            },
        )
    except StoodBy as ended:
        return ended.code
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if prepared is not None and devices.is_out_of_memory(error):
            prepared.incidents.refused(str(error))
            return refuse_out_of_memory(prepared, error)
        return ended_by(error, ranks)
    for line in warnings:
        run.log.note(line)
    return run


def noting(ranks: Ranks, save: Path, launch: Launch) -> Ranks:
    """`ranks`, which keep their incidents in the --save folder."""
    incidents = Incidents(save, rank_name(ranks.rank), attempt=launch.attempt, host=launch.host)
    return replace(ranks, incidents=incidents)


def refuse_out_of_memory(prepared: PreparedRun, error: BaseException) -> int:
    """Print what was expected and what was there, and leave. Returns the exit code."""
    ranks = prepared.ranks
    line = first(hook.explain_out_of_memory(prepared) for hook in prepared.hooks)
    code = refuse_memory(line or f"out of memory on rank {ranks.rank}: {error}", ranks)
    leave(ranks)
    return code


def train_and_report(run: Run) -> int:
    """From the start table to the closing report. Returns the exit code, 1 where the last iteration is not saved."""
    log_start(run)
    reason, valid, sample = train(run), None, ""
    iteration, saver = run.progress.iteration, run.checkpoints.saver
    saver.finish()
    if saver.saved_iteration != iteration:
        run.save()  # before the evaluations: they can take long, and a second Ctrl-C must not cost the run
        saver.finish()
    is_saved = saver.saved_iteration == iteration
    missing = "" if is_saved else f"iteration {iteration} is not saved"
    if reason:
        goes_on = f"{missing}: the same command begins before it" if missing else "the same command continues"
        run.log.info(f"stopped by {reason} at iteration {iteration}: {goes_on}")
    else:
        valid = evaluate_and_log(run, "valid", final=True)
        evaluate_and_log(run, "test", final=True)
        sample = sample_text(run)
        saver.finish()  # --keep-best may have begun with one
        run.log.note(f"finished, but {missing}" if missing else "finished")
    code = (AGAIN if reason == MORE_RANKS else 0) if is_saved else 1
    run.incidents.note("end", reason or FINISHED, exit_code=code)
    if is_saved:
        run.checkpoints.remove_local()
    if run.parallel.rank == 0 and is_saved:
        mark_ended(run.prepared.save_directory, reason or FINISHED, iteration, code)
    run.data.loader.close()
    run.stop.close()
    run.prepared.ranks.end(code)
    # The other ranks are not needed for the report, which can take a while.
    leave(run.prepared.ranks)
    plot = run.log.close(title=run.prepared.save_directory.name)
    if run.parallel.rank == 0:
        if not reason:
            print(closing(run, valid, sample, plot, missing))
        if missing:
            print(f"error: {missing}: {saver.problem}", file=sys.stderr, flush=True)
    return code


cli = program(main)

if __name__ == "__main__":
    cli()
