"""The start and the end of a training process: it joins the other ranks, prints a table and a report, and exits."""

import contextlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from data_utils import DamagedData
from data_utils.command_line import Log, how_to_call, plural, require
from megatron.gpt2.checkpoint.save_folder import FolderInUse
from megatron.gpt2.config import DataConfig, flag_name, non_default_values
from megatron.gpt2.config.arguments import Arguments, parse
from megatron.gpt2.device import PRECISIONS, set_threads
from megatron.gpt2.dist.launch import Launch
from megatron.gpt2.dist.ranks import MissingRanksError, RankInfo, print_status
from megatron.gpt2.dist.rendezvous import join_rendezvous, report_lost_ranks, shutdown_distributed
from megatron.gpt2.dist.run_program import BAD_INPUT, exit_with_error, handle_error
from megatron.gpt2.dist.signals import exit_on_sigterm
from megatron.gpt2.hooks import Hook, StopRun
from megatron.gpt2.model.gpt2 import count_parameters
from megatron.gpt2.monitor.html_report import METRICS
from megatron.gpt2.monitor.incidents import (
    ENDED,
    FINISHED,
    IncidentLog,
    is_out_of_memory,
    rank_file_name,
    read_records,
    write_ended,
)
from megatron.gpt2.monitor.log_lines import EvaluationRecord, closing_report, start_table
from megatron.gpt2.train.checkpointing import loadable_checkpoint
from megatron.gpt2.train.evaluate import baseline_bits_per_byte
from megatron.gpt2.train.setup import RunContext
from megatron.gpt2.train.trainer import Trainer


@dataclass
class ProcessState:
    """The parts of the run that exist so far, for error messages.

    warnings: warnings that were printed before the run had a log.
    """

    rank_info: RankInfo = field(default_factory=RankInfo)
    context: RunContext | None = None
    trainer: Trainer | None = None
    elastic: bool = False
    warnings: list[str] = field(default_factory=list)

    def log(self, line: str) -> None:
        """Print a line on rank 0. `build_trainer` later makes the log of the run."""
        if self.rank_info.rank == 0 and line:
            print(line, flush=True)
        if line.startswith("WARNING"):
            self.warnings.append(line)

    def join(self, launch: Launch, args: Sequence[str]) -> Arguments:
        """Parse the command line and join the other ranks."""
        self.rank_info = launch.rank_info()
        if self.rank_info.world_size > 1:
            exit_on_sigterm(2)  # Before the run can save, SIGTERM ends the process.
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
        self.rank_info = with_incident_log(join_rendezvous(launch, usable))  # With --elastic, ranks get new numbers.
        set_threads(self.rank_info)
        self.log(launch.notice)
        return arguments

    def exit_code_of(self, error: Exception) -> int:
        """Print one line about `error`, which ends the run, and return the exit code. Raise `error` again if it is a
        bug of the program."""
        trainer, rank_info = self.trainer, self.rank_info
        if self.elastic and isinstance(error, MissingRanksError | FolderInUse):
            error.exit_code = 1  # Launchers start again after this exit code.
        if trainer is not None:
            trainer.incidents.error(error)
            if isinstance(error, FloatingPointError | StopRun):
                trainer.log.info(f"stopped: {error}")
                # After such an error all ranks stop at the same step, so they can wait for a save. The save fails if
                # the storage is too slow.
                with contextlib.suppress(StopRun):
                    trainer.checkpoints.finish()
                return 1
            trainer.log.note("stopped: " + " ".join(str(error).split())[:300])
        if self.context is not None and is_out_of_memory(error):
            if trainer is None:
                self.context.incidents.refused(error)
            # Only the first rank that runs out of memory prints an error.
            if rank_info.rendezvous is None or rank_info.rendezvous.store.add("out of memory", 1) == 1:
                line = self.context.hooks.first_result(Hook.explain_out_of_memory, self.context)
                print_status(line or f"out of memory on rank {rank_info.rank}: {error}")
            shutdown_distributed(rank_info)
            return BAD_INPUT
        if trainer is None and isinstance(error, ValueError | OSError | RuntimeError | MemoryError):
            return handle_error(error, rank_info)
        if isinstance(error, DamagedData):
            return exit_with_error(error, rank_info)
        if trainer is not None and isinstance(error, RuntimeError):
            explained = any(trainer.hooks.call(Hook.handle_error, trainer, error))
            if explained or report_lost_ranks(rank_info):
                return 1
        raise error


def log_start(trainer: Trainer, warnings: Sequence[str]) -> None:
    """Record the start in the incident log. Log the start table, and warnings about the data.

    warnings: warnings that were printed before the run had a log. The warnings are added to the history of the run.
    """
    context, config, parallel, progress = trainer.context, trainer.config, trainer.parallel, trainer.progress
    if parallel.rank == 0:
        (context.save_directory / ENDED).unlink(missing_ok=True)
    tp, pp, dp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.data_parallel_size,
    )
    trainer.incidents.note(
        "start",
        f"on {plural(parallel.world_size, 'rank')} from iteration {progress.iteration}",
        command=[sys.executable, *sys.argv],
        layout={"world_size": parallel.world_size, "tensor": tp, "pipeline": pp, "data": dp},
    )
    for line in warnings:
        trainer.log.note(line)

    model, data, train, tokenizer, splits = config.model, config.data, config.train, context.tokenizer, context.splits
    total, padded = count_parameters(model, tp)[0], trainer.state.model.padded_vocab_size
    on_this_rank = sum(parameter.numel() for parameter in trainer.state.model.parameters())
    batches, batch, samples = context.batch_schedule, context.global_batch_size, len(splits.train)
    needed = batches.samples_after_steps(context.train_iters - progress.iteration, progress.consumed_samples)
    epochs = needed / samples
    (_, smallest), *growth = batches.milestones
    layers = ", ".join(f"{layers.start}-{layers.stop - 1}" for layers in config.layers_of_virtual_stages())
    interval = config.checkpoint.save_interval
    sizes = f"tensor-parallel {tp} × {f'pipeline {pp} × ' * (pp > 1)}data-parallel {dp}"
    layout = f"{plural(parallel.world_size, 'rank')}: {sizes}"
    begins = f"weights of {context.source}" if context.source else "random weights"
    if progress.iteration:
        begins = f"iteration {progress.iteration} of {context.source}"
    expected = trainer.hooks.first_result(Hook.expected_memory, trainer)
    rows = [
        (
            "model",
            f"GPT-2, {plural(model.num_layers, 'layer')}, hidden size {model.hidden_size}, "
            f"{plural(model.num_attention_heads, 'head')}, vocabulary {model.vocab_size:,}, "
            f"sequence {data.seq_length:,}"
            + (f" (--model {context.arguments.preset})" if context.arguments.preset else ""),
        ),
        (
            "parameters",
            f"{total:,} in all, {on_this_rank:,} {'on this' if pp > 1 else 'per'} rank with the padded vocabulary",
        ),
        ("layout", layout),
        ("precision", f"{PRECISIONS[context.dtype]} on {trainer.device}; MFU is of {trainer.peak_flops[1]}"),
        (
            "batch",
            f"{plural(train.micro_batch_size, 'sample')} × {plural(dp, 'data-parallel rank')} × "
            f"{context.num_microbatches} accumulated = {batch} a step, {batch * data.seq_length:,} tokens"
            + (f"; it grows from {smallest} to this size over {plural(growth[-1][0], 'sample')}" if growth else ""),
        ),
        *([("schedule", f"{config.pipeline_schedule(1).name}; layers {layers}")] if pp > 1 else []),
        *(expected.rows if expected else ()),
        ("FLOPs per token", f"{model.flops_per_token(data.seq_length):,}"),
        (
            "tokenizer",
            f"{tokenizer.kind}, {tokenizer.vocab_size:,} ids; "
            f"padded vocab (size: {tokenizer.vocab_size}) with {padded - tokenizer.vocab_size} dummy tokens (new size: "
            f"{padded})",
        ),
        *(("data", line) for line in splits.description),
        (
            "length",
            f"{plural(context.train_iters, 'iteration')}, {plural(needed, 'sample')} of {samples:,}: "
            f"{epochs:.2f} epochs",
        ),
        ("from", begins),
        (
            "saved in",
            f"{config.checkpoint.save}, {f'every {interval:,} iterations and ' if interval else ''}at the end",
        ),
    ]
    trainer.log.note(f"started from {begins} on {layout}")
    flags = [
        (flag_name(key), " ".join(map(str, value)) if isinstance(value, tuple) else str(value))
        for key, value in non_default_values(context.arguments.config).items()
    ]
    trainer.log.info(start_table(rows, flags))
    for line in expected.lines if expected else ():
        trainer.log.info(line)
    if repeated := repetition_warning(epochs, data):
        trainer.log.info(f"WARNING: {repeated}")
    if train.eval_iters and splits.valid is None:
        trainer.log.info(f"no validation: --split {data.split} has no validation part")


def repetition_warning(epochs: float, data: DataConfig) -> str:
    """Return a warning if the training reads the text more than four times, or "". There is no warning for the built-in
    corpus, because the user cannot make it larger."""
    if epochs <= 4 or not (data.train_data or data.data_path):
        return ""
    return (
        f"{epochs:.1f} epochs: after about 4, the model learns less and less from repeated text; use a larger corpus "
        "or a smaller --train-iters"
    )


def next_commands(save: str, train_iters: int, *, in_parts: bool) -> list[tuple[str, str]]:
    """Return commands that a user may want to run after a run, as (description, command).

    in_parts: whether several model-parallel ranks have written the checkpoint.
    """
    folder = shlex.quote(save)
    longer = f"--load {folder} --save {folder} --train-iters {2 * train_iters}"
    commands = [
        ("continue from this checkpoint", f"{how_to_call('pretrain_gpt2')} {longer}"),
        ("generate text", f"{how_to_call('generate_text')} --load {folder} --prompt 'The '"),
    ]
    if in_parts:
        merge = f"{how_to_call('checkpoint')} merge {folder} {folder}_merged"
        commands.append(("merge its model-parallel parts into one file", merge))
    return commands


def final_report(trainer: Trainer, valid: EvaluationRecord | None, sample: str, plot: str, missing: str) -> str:
    """Return the report at the end of a run.

    valid: the evaluation after the last step; None without one.
    sample: generated texts.
    plot: the loss curve as text, or the path of its image.
    missing: the error message if the last iteration is not saved, otherwise "".
    """
    newest = loadable_checkpoint(trainer.context.save_directory)
    where = " (".join(filter(None, (str(newest.path) if newest else "none", missing))) + ")" * bool(missing)
    metrics = read_records(trainer.context.save_directory / METRICS)
    losses = {record["iteration"]: record["lm_loss"] for record in metrics if record.get("split") == "valid"}
    return closing_report(
        validation_losses=losses,
        bits_per_byte=valid.bits_per_byte if valid else None,
        baselines=baseline_bits_per_byte(trainer),
        sample=sample,
        checkpoint=where,
        plot=plot,
        next_commands=next_commands(
            str(trainer.config.checkpoint.save),
            trainer.context.train_iters,
            in_parts=trainer.parallel.model_parallel_size > 1,
        )
        if newest
        else (),
    )


def report_finished(context: RunContext, log: Log) -> int:
    """Log that the run of the checkpoint is already finished. Return the exit code 0."""
    iteration = context.resume_metadata["iteration"]
    log(
        f"{context.source} is finished: it is at iteration {iteration} of {context.train_iters}. Give a greater "
        f"--train-iters to continue, or --finetune --load {context.source} and a new --save to start a new run from "
        "its weights."
    )
    if context.rank_info.rank == 0:
        write_ended(context.save_directory, FINISHED, iteration, 0)
    context.rank_info.end(0)
    context.rank_info.leave()
    return 0
