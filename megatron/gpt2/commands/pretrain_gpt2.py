"""Train a GPT-2 with any flags of Megatron's, alone or under a launcher (dist/launch.py).

Exit codes: 0 if the run ended as asked (also after SIGTERM), 1 if it failed, 2 for bad input, which is answered in one
line by one rank.
"""

import functools
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from data_utils import DamagedData
from data_utils.command_line import line_buffered
from megatron.gpt2 import device as devices
from megatron.gpt2.config import require
from megatron.gpt2.config.arguments import Arguments, parse
from megatron.gpt2.dist.launch import Launch, read_launch
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.dist.rendezvous import StoodBy, leave, meet, name_lost
from megatron.gpt2.dist.run_program import Kept, ended_by, refuse, refuse_memory, start_ranks
from megatron.gpt2.hooks import StopRun, first
from megatron.gpt2.monitor.incidents import FINISHED, Incidents, is_out_of_memory, mark_ended, rank_name
from megatron.gpt2.train.evaluate import evaluate_and_log, sample_text
from megatron.gpt2.train.loop import train
from megatron.gpt2.train.report import closing, is_finished_line, log_start, newest_iteration
from megatron.gpt2.train.run import Run, build_run
from megatron.gpt2.train.setup import Log, PreparedRun, prepare_run


def main(argv: Sequence[str] | None = None) -> int:
    """Parse -> set up -> train -> report the run of the command line `argv` (default: this process's). Returns the exit
    code."""
    line_buffered()
    this = ThisRank()
    try:
        launch, words = read_launch(sys.argv[1:] if argv is None else argv)
        if launch.starts:
            return start_all(launch, words)
        arguments = this.join(launch, words)
        this.prepared = prepared = prepare_run(arguments, this.ranks, this.log)
        if prepared.is_finished:
            return report_finished(prepared, this.log)
        this.run = run = build_run(prepared, this.log)
        log_start(run, this.warnings)
        reason = train(run)
        return report(run, reason)
    except StoodBy as ended:
        return ended.code
    except Exception as error:
        return this.exit_code_of(error)
    finally:
        if this.run is not None:
            this.run.close()
            leave(this.ranks)


def start_all(launch: Launch, words: Sequence[str]) -> int:
    """Start the ranks of this machine. A flag that cannot be is refused, and --help answered, before there are ranks.
    Returns the exit code."""
    where = parse(words).checkpoint
    newest = functools.partial(newest_iteration, where, alone=launch.starts == launch.world_size)
    return start_ranks(main, words, launch, Kept(Path(str(where.save)), newest))


@dataclass
class ThisRank:
    """What this process has, whenever something ends it. warnings: from before the run has a log."""

    ranks: Ranks = field(default_factory=Ranks)
    prepared: PreparedRun | None = None
    run: Run | None = None
    warnings: list[str] = field(default_factory=list)

    def log(self, line: str) -> None:
        """Print a line from before the run has a log, on rank 0."""
        if self.ranks.rank == 0 and line:
            print(line, flush=True)
        if line.startswith("WARNING"):
            self.warnings.append(line)

    def join(self, launch: Launch, words: Sequence[str]) -> Arguments:
        """Read the command line, and meet the other ranks."""
        self.ranks = launch.ranks()
        if self.ranks.world_size > 1:
            # Until the run can save, SIGTERM is the launcher's answer to another rank's exit: leave as that one did.
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(2))
        arguments = parse(words)
        save, usable = str(arguments.checkpoint.save), None

        def noting(ranks: Ranks) -> Ranks:
            """`ranks`, which keep their incidents in the --save folder."""
            name = rank_name(ranks.rank)
            return replace(ranks, incidents=Incidents(save, name, attempt=launch.attempt, host=launch.host))

        self.ranks = noting(self.ranks)
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
        self.ranks = noting(meet(launch, usable))  # among those that came it may have another number
        devices.set_threads(self.ranks)
        self.log(launch.notice)
        return arguments

    def exit_code_of(self, error: Exception) -> int:
        """The exit code, after the line that says why. Raises `error` if it is a bug of ours."""
        run, ranks = self.run, self.ranks
        if run is not None:
            run.incidents.error(error)
            if isinstance(error, FloatingPointError | StopRun):
                run.log.info(f"stopped: {error}")  # on every rank after the same step
                run.checkpoints.saver.finish()
                return 1
            run.log.note("stopped: " + " ".join(str(error).split())[:300])
        if self.prepared is not None and is_out_of_memory(error):
            if run is None:
                self.prepared.incidents.refused(error)
            line = first(hook.explain_out_of_memory(self.prepared) for hook in self.prepared.hooks)
            code = refuse_memory(line or f"out of memory on rank {ranks.rank}: {error}", ranks)
            leave(ranks)
            return code
        if run is None and isinstance(error, ValueError | OSError | RuntimeError | MemoryError):
            return ended_by(error, ranks)
        if isinstance(error, DamagedData):
            return refuse(error, ranks)
        if run is not None and isinstance(error, RuntimeError):
            explained = any(hook.explains(run, error) for hook in run.hooks)
            if explained or name_lost(ranks):
                return 1
        raise error


def report_finished(prepared: PreparedRun, log: Log) -> int:
    """Say that there is nothing to train. Returns the exit code."""
    iteration = prepared.start["iteration"]
    log(is_finished_line(prepared.arguments.checkpoint, prepared.source, iteration, prepared.train_iters))
    if prepared.ranks.rank == 0:
        mark_ended(prepared.save_directory, FINISHED, iteration, 0)
    prepared.ranks.end(0)
    prepared.ranks.leave()
    return 0


def report(run: Run, reason: str) -> int:
    """After the last step: save, evaluate and report. reason: what asked for the stop, empty at the end. Returns the
    exit code, 1 if the last iteration is not saved."""
    iteration, saver, ranks, valid, sample = run.progress.iteration, run.checkpoints.saver, run.prepared.ranks, None, ""
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
    code = 0 if is_saved else 1
    if missing:
        run.incidents.note("error", f"{missing}: {saver.problem}", cause="full disk")
    run.incidents.note("end", reason or FINISHED, exit_code=code)
    if is_saved:
        run.checkpoints.remove_local()
        if ranks.rank == 0:
            mark_ended(run.prepared.save_directory, reason or FINISHED, iteration, code)
    run.data.loader.close()
    run.stop.close()
    ranks.end(code)
    leave(ranks)  # the others are not needed for the report, which can take a while
    plot = run.log.close(title=run.prepared.save_directory.name)
    if ranks.rank == 0:
        if not reason:
            print(closing(run, valid, sample, plot, missing))
        if missing:
            print(f"error: {missing}: {saver.problem}", file=sys.stderr, flush=True)
    return code
