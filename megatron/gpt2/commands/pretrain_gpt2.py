"""Train a GPT-2 with Megatron's flags, as a single process or under a launcher (dist/launch.py).

docs/how-to/operations.md lists the exit codes. Only one rank prints the line about bad input.
"""

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from data_utils.command_line import configure_output
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.launch import Launch, read_launch
from megatron.gpt2.dist.ranks import print_status
from megatron.gpt2.dist.rendezvous import StandbyExit, shutdown_distributed
from megatron.gpt2.dist.run_program import SaveFolder, start_ranks
from megatron.gpt2.monitor.incidents import FINISHED, write_ended
from megatron.gpt2.train.checkpointing import newest_iteration
from megatron.gpt2.train.evaluate import evaluate_and_log, sample_text
from megatron.gpt2.train.loop import train
from megatron.gpt2.train.setup import build_context
from megatron.gpt2.train.start_and_end import ProcessState, final_report, log_start, report_finished
from megatron.gpt2.train.trainer import Trainer, build_trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line `argv` (default: sys.argv[1:]), set up the run, train and report. Return the exit
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
    """Start all ranks of the current machine. An error in a flag, or --help, ends the program before any rank starts.
    Return the exit code."""
    checkpoint_config = parse(args).checkpoint
    newest = functools.partial(
        newest_iteration, checkpoint_config, one_machine=launch.ranks_to_start == launch.world_size
    )
    return start_ranks(main, args, launch, SaveFolder(Path(str(checkpoint_config.save)), newest))


def finish_run(trainer: Trainer, reason: str) -> int:
    """Save, evaluate and report after the last step. Return the exit code, which is 1 if the last iteration is not
    saved.

    reason: why the run stopped, or "" at the end.
    """
    iteration, checkpoints, rank_info = trainer.progress.iteration, trainer.checkpoints, trainer.context.rank_info
    valid, sample = None, ""
    checkpoints.finish()
    if checkpoints.saved_iteration != iteration:
        # Save before the evaluations, which can take long, because a second Ctrl-C would lose the last steps.
        checkpoints.save()
        checkpoints.finish()
    missing = "" if checkpoints.saved_iteration == iteration else f"iteration {iteration} is not saved"
    code = 1 if missing else 0
    if reason:
        earlier = " from an earlier checkpoint" * bool(missing)
        trainer.log.info(f"stopped by {reason} at iteration {iteration}: the same command continues{earlier}")
    else:
        valid = evaluate_and_log(trainer, "valid", final=True)
        evaluate_and_log(trainer, "test", final=True)
        sample = sample_text(trainer, count=3)
        checkpoints.finish()  # --keep-best may have started an asynchronous save.
        trainer.log.note(f"finished, but {missing}" if missing else "finished")
    if missing:
        trainer.incidents.note("error", f"{missing}: {checkpoints.last_error}", cause="failed save")
    trainer.incidents.note("end", reason or FINISHED, exit_code=code)
    if not missing:
        checkpoints.remove_local()
        if rank_info.rank == 0:
            write_ended(trainer.context.save_directory, reason or FINISHED, iteration, code)
    trainer.stop_signal.close()
    rank_info.end(code)
    shutdown_distributed(rank_info)  # Write the report last, because it can take a while and needs no other rank.
    # The name of the folder may be invalid UTF-8, which a plot cannot show.
    name = os.fsencode(trainer.context.save_directory.name).decode(errors="replace")
    plot = trainer.log.close(title=name)
    if rank_info.rank == 0:
        if not reason:
            print(final_report(trainer, valid, sample, plot, missing))
        if missing:
            print_status(f"{missing}: {checkpoints.last_error}")
    return code
