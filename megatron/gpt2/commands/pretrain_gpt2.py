"""Train a GPT-2 with Megatron's flags, as a single process or under a launcher (dist/launch.py).

Exit codes: 0 if the run ended as requested (also after SIGTERM), 1 if it failed, 2 for bad input. For bad input one
rank prints one line.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from data_utils import DamagedData
from data_utils.command_line import configure_output
from megatron.gpt2 import device as devices
from megatron.gpt2.checkpoint.save_folder import FolderInUse
from megatron.gpt2.config import require
from megatron.gpt2.config.arguments import Arguments, parse
from megatron.gpt2.dist.launch import Launch, read_launch
from megatron.gpt2.dist.ranks import MissingRanksError, RankInfo
from megatron.gpt2.dist.rendezvous import StandbyExit, join_rendezvous, report_lost_ranks, shutdown_distributed
from megatron.gpt2.dist.run_program import SaveFolder, exit_with_error, handle_error, report_out_of_memory, start_ranks
from megatron.gpt2.dist.signals import exit_on_sigterm
from megatron.gpt2.hooks import Hook, StopRun
from megatron.gpt2.monitor.incidents import FINISHED, IncidentLog, is_out_of_memory, rank_file_name, write_ended
from megatron.gpt2.train.evaluate import evaluate_and_log, sample_text
from megatron.gpt2.train.loop import train
from megatron.gpt2.train.setup import Log, RunContext, build_context
from megatron.gpt2.train.start_and_end import final_report, finished_message, log_start, newest_iteration
from megatron.gpt2.train.trainer import Trainer, build_trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line `argv` (default: this process's), set up the run, train and report. Return the exit
    code."""
    configure_output(line_buffering=True)
    process = ProcessState()
    try:
        launch, args = read_launch(sys.argv[1:] if argv is None else argv)
        process.elastic = launch.elastic
        if launch.ranks_to_start:
            return start_all_ranks(launch, args)
        arguments = process.join(launch, args)
        process.context = context = build_context(arguments, process.rank_info, process.log)
        if context.is_finished:
            return report_finished(context, process.log)
        process.trainer = trainer = build_trainer(context, process.log)
        log_start(trainer, process.warnings)
        reason = train(trainer)
        return finish_run(trainer, reason)
    except StandbyExit as ended:
        return ended.code
    except Exception as error:
        return process.exit_code_of(error)
    finally:
        if process.trainer is not None:
            process.trainer.close()
            shutdown_distributed(process.rank_info)


def start_all_ranks(launch: Launch, args: Sequence[str]) -> int:
    """Start the ranks of this machine. Flags are checked, and --help is answered, before any rank starts. Return the
    exit code."""
    checkpoint_config = parse(args).checkpoint
    newest = functools.partial(
        newest_iteration, checkpoint_config, one_machine=launch.ranks_to_start == launch.world_size
    )
    return start_ranks(main, args, launch, SaveFolder(Path(str(checkpoint_config.save)), newest))


@dataclass
class ProcessState:
    """The state of this process that error handling needs.

    warnings: lines from the time before the run has a log.
    """

    rank_info: RankInfo = field(default_factory=RankInfo)
    context: RunContext | None = None
    trainer: Trainer | None = None
    elastic: bool = False
    warnings: list[str] = field(default_factory=list)

    def log(self, line: str) -> None:
        """Print a line on rank 0, before the run has a log."""
        if self.rank_info.rank == 0 and line:
            print(line, flush=True)
        if line.startswith("WARNING"):
            self.warnings.append(line)

    def join(self, launch: Launch, args: Sequence[str]) -> Arguments:
        """Parse the command line and join the other ranks."""
        self.rank_info = launch.rank_info()
        if self.rank_info.world_size > 1:
            exit_on_sigterm(2)  # Until the run can save, SIGTERM ends the process.
        arguments = parse(args)
        save, usable = str(arguments.checkpoint.save), None

        def with_incident_log(rank_info: RankInfo) -> RankInfo:
            """Return `rank_info` with an incident log in the --save folder."""
            name = rank_file_name(rank_info.rank)
            return replace(rank_info, incidents=IncidentLog(save, name, attempt=launch.restart_count, host=launch.host))

        self.rank_info = with_incident_log(self.rank_info)
        if launch.elastic:
            require(
                bool(arguments.config.train.global_batch_size or arguments.config.train.growth_flag),
                "--elastic needs --global-batch-size: without it the batch would change with the number of ranks",
            )
            require(
                "train.micro_batch_size" in arguments.given or not arguments.continues,
                "--elastic needs --micro-batch-size if no model is named: it decides how many ranks can be used, "
                "before a checkpoint is read",
            )
            usable = arguments.config.usable_ranks
        self.rank_info = with_incident_log(join_rendezvous(launch, usable))  # This call may change the rank's number.
        devices.set_threads(self.rank_info)
        self.log(launch.notice)
        return arguments

    def exit_code_of(self, error: Exception) -> int:
        """Print a line with the reason and return the exit code. Raise `error` again if it is a bug of the program."""
        trainer, rank_info = self.trainer, self.rank_info
        if self.elastic and isinstance(error, MissingRanksError | FolderInUse):
            error.exit_code = 1  # A lost machine or network may return, so launchers try again.
        if trainer is not None:
            trainer.incidents.error(error)
            if isinstance(error, FloatingPointError | StopRun):
                trainer.log.info(f"stopped: {error}")  # All ranks stop after the same step.
                with contextlib.suppress(StopRun):  # The storage may be too slow for a pending save.
                    trainer.checkpoints.finish()
                return 1
            trainer.log.note("stopped: " + " ".join(str(error).split())[:300])
        if self.context is not None and is_out_of_memory(error):
            if trainer is None:
                self.context.incidents.refused(error)
            line = self.context.hooks.first(Hook.explain_out_of_memory, self.context)
            code = report_out_of_memory(line or f"out of memory on rank {rank_info.rank}: {error}", rank_info)
            shutdown_distributed(rank_info)
            return code
        if trainer is None and isinstance(error, ValueError | OSError | RuntimeError | MemoryError):
            return handle_error(error, rank_info)
        if isinstance(error, DamagedData):
            return exit_with_error(error, rank_info)
        if trainer is not None and isinstance(error, RuntimeError):
            explained = any(trainer.hooks.call(Hook.handle_error, trainer, error))
            if explained or report_lost_ranks(rank_info):
                return 1
        raise error


def report_finished(context: RunContext, log: Log) -> int:
    """Print that the run is already finished. Return the exit code."""
    iteration = context.resume_metadata["iteration"]
    log(finished_message(context.arguments.checkpoint, context.source, iteration, context.train_iters))
    if context.rank_info.rank == 0:
        write_ended(context.save_directory, FINISHED, iteration, 0)
    context.rank_info.end(0)
    context.rank_info.leave()
    return 0


def finish_run(trainer: Trainer, reason: str) -> int:
    """Save, evaluate and report after the last step. Return the exit code, which is 1 if the last iteration is not
    saved.

    reason: why the run stopped, or "" at the end.
    """
    iteration, checkpoints, rank_info = trainer.progress.iteration, trainer.checkpoints, trainer.context.rank_info
    valid, sample = None, ""
    checkpoints.finish()
    if checkpoints.saved_iteration != iteration:
        # Evaluations can take long. A save before them protects the last steps against a second Ctrl-C.
        checkpoints.save()
        checkpoints.finish()
    missing = "" if checkpoints.saved_iteration == iteration else f"iteration {iteration} is not saved"
    code = 1 if missing else 0
    if reason:
        goes_on = (
            f"{missing}: the same command continues from an earlier checkpoint"
            if missing
            else "the same command continues"
        )
        trainer.log.info(f"stopped by {reason} at iteration {iteration}: {goes_on}")
    else:
        valid = evaluate_and_log(trainer, "valid", final=True)
        evaluate_and_log(trainer, "test", final=True)
        sample = sample_text(trainer, count=3)
        checkpoints.finish()  # --keep-best may have started an asynchronous save.
        trainer.log.note(f"finished, but {missing}" if missing else "finished")
    if missing:
        trainer.incidents.note("error", f"{missing}: {checkpoints.problem}", cause="full disk")
    trainer.incidents.note("end", reason or FINISHED, exit_code=code)
    if not missing:
        checkpoints.remove_local()
        if rank_info.rank == 0:
            write_ended(trainer.context.save_directory, reason or FINISHED, iteration, code)
    trainer.data.loader.close()
    trainer.stop_signal.close()
    rank_info.end(code)
    shutdown_distributed(rank_info)  # The report can take a while and does not need the other ranks.
    # The name is not UTF-8 in some locales.
    name = os.fsencode(trainer.context.save_directory.name).decode(errors="replace")
    plot = trainer.log.close(title=name)
    if rank_info.rank == 0:
        if not reason:
            print(final_report(trainer, valid, sample, plot, missing))
        if missing:
            print(f"error: {missing}: {checkpoints.problem}", file=sys.stderr, flush=True)
    return code
