"""The training program: `python -m megatron.pretrain_gpt2 [flags]`, alone or under a launcher (launch/launchers.py).

Exit codes: 0 where the run ended as asked (also after SIGTERM), 1 where it failed, 2 for bad input, which is
answered in one line by one rank.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from data_utils import DamagedData, GPT2Dataset, unigram_bits_per_byte, xz_bits_per_byte
from data_utils.command_line import end_with, how_to_call, line_buffered
from megatron.gpt2 import device as devices
from megatron.gpt2.checkpoint.folder import Checkpoint, find_checkpoint
from megatron.gpt2.command_line.arguments import parse
from megatron.gpt2.config import CheckpointConfig
from megatron.gpt2.config.flag_names import differing_flags
from megatron.gpt2.launch.errors import refuse, refuse_memory
from megatron.gpt2.launch.launchers import read_launch
from megatron.gpt2.launch.ranks import Ranks
from megatron.gpt2.launch.rendezvous import leave, meet, name_lost
from megatron.gpt2.launch.spawn import start_ranks
from megatron.gpt2.model.gpt2 import count_parameters
from megatron.gpt2.planner.report import is_out_of_memory, out_of_memory, start_rows, warning
from megatron.gpt2.records.reporting import UNIGRAM, EvaluationRecord, closing_report, start_table
from megatron.gpt2.training.plan import Plan, plan_run
from megatron.gpt2.training.run import Run, build_run
from megatron.gpt2.training.training import evaluate_and_log, sample_text, train

# xz compresses about 2 MB/s: a corpus beyond this is not worth the wait at the end of a run.
XZ_LIMIT = 32 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    line_buffered()
    ranks = Ranks()
    plan: Plan | None = None
    warnings: list[str] = []  # from before the run has a log
    try:
        launch, words = read_launch(sys.argv[1:] if argv is None else argv)
        if launch.starts:
            parse(words)  # a flag that cannot be is refused, and --help answered, before there are ranks
            return start_ranks(main, words, launch)
        ranks = launch.ranks()
        if ranks.world_size > 1:
            # Until the run can save, SIGTERM is the launcher's answer to another rank's exit: leave as that one did.
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(2))
        arguments = parse(words)
        ranks = meet(launch)
        devices.set_threads(ranks)

        def say(line: str) -> None:
            if ranks.rank == 0 and line:
                print(line, flush=True)
            if line.startswith("WARNING"):
                warnings.append(line)

        say(launch.notice)
        plan = plan_run(arguments, ranks, say)
        if plan.is_finished:
            say(f"{plan.source} is finished: it is at iteration {plan.start['iteration']} of "
                f"{plan.train_iters}. Give a greater --train-iters to train on, or "
                f"{another_run(arguments.checkpoint, plan.source)}")
            ranks.leave()
            return 0
        run = build_run(plan, say)
    except (ValueError, OSError) as error:
        return refuse(error, ranks)
    except (RuntimeError, MemoryError) as error:
        if plan is not None and is_out_of_memory(error):
            return refuse_out_of_memory(plan)
        if name_lost(ranks):
            return 1
        if isinstance(error, dist.DistError):
            return refuse(error, ranks)
        raise
    for line in warnings:
        run.log.note(line)
    try:
        return pretrain(run)
    except FloatingPointError as error:
        run.log.info(f"stopped: {error}")  # on every rank after the same step
        run.saver.finish()
        return 1
    except DamagedData as error:
        run.log.note(f"stopped: {error}")
        return refuse(error, ranks)
    except (RuntimeError, MemoryError) as error:
        run.log.note("stopped: " + " ".join(str(error).split())[:300])
        if is_out_of_memory(error):
            return refuse_out_of_memory(plan)
        if name_lost(ranks):
            return 1
        raise
    finally:
        run.close()
        leave(ranks)


def another_run(given: CheckpointConfig, finished: str | None) -> str:
    """How to begin another run beside the one that is finished, by what was `given`."""
    if given.load != finished:
        return "a new --save for another run."
    elsewhere = " and a new --save" if given.save == finished else ""
    return f"--finetune{elsewhere} for another run that begins with its weights."


def refuse_out_of_memory(plan: Plan) -> int:
    """Say what was expected and what was there, leave, and return the exit code."""
    code = refuse_memory(out_of_memory(plan), plan.ranks)
    leave(plan.ranks)
    return code


def pretrain(run: Run) -> int:
    """From the start table to the closing report."""
    print_start(run)
    reason, valid, sample = train(run), None, ""
    run.saver.finish()
    if run.saver.saved_iteration != run.iteration:
        run.save()  # before the evaluations: they can take long, and a second Ctrl-C must not cost the run
        run.saver.finish()
    is_saved = run.saver.saved_iteration == run.iteration
    missing = "" if is_saved else f"iteration {run.iteration} is not saved"
    if reason:
        goes_on = f"{missing}: the same command begins before it" if missing else "the same command continues"
        run.log.info(f"stopped by {reason} at iteration {run.iteration}: {goes_on}")
    else:
        valid = evaluate_and_log(run, "valid", final=True)
        evaluate_and_log(run, "test", final=True)
        sample = sample_text(run)
        run.saver.finish()  # --keep-best may have begun with one
        run.log.note(f"finished, but {missing}" if missing else "finished")
    run.loader.close()
    run.stop.close()
    # The other ranks are not needed for the report, which can take a while.
    leave(run.plan.ranks)
    plot = run.log.close(title=run.save_directory.name)
    if run.parallel.rank == 0:
        if not reason:
            print(closing(run, valid, sample, plot, missing))
        if missing:
            print(f"error: {missing}: {run.saver.problem}", file=sys.stderr, flush=True)
    return 0 if is_saved else 1


def print_start(run: Run) -> None:
    plan, config, p = run.plan, run.config, run.parallel
    total, own = count_parameters(config.model, p.model_parallel_size)
    model, data = config.model, config.data
    samples = len(run.splits.train)
    needed = run.consumed_samples + (run.train_iters - run.iteration) * run.global_batch_size
    epochs = needed / samples
    rows = [
        ("model", f"GPT-2, {model.num_layers} layers, hidden size {model.hidden_size}, "
                  f"{model.num_attention_heads} heads, vocabulary {model.vocab_size:,}, sequence {data.seq_length:,}"
                  + (f" (--model {plan.arguments.preset})" if plan.arguments.preset else "")),
        ("parameters", f"{total:,} in all, {own:,} on a rank with the padded vocabulary"),
        ("layout", f"{p.world_size} ranks: model-parallel {p.model_parallel_size} × data-parallel "
                   f"{p.data_parallel_size}"),
        ("precision", f"{devices.PRECISIONS[plan.dtype]} on {run.device}; MFU is of {run.peak[1]}"),
        ("batch", f"{config.train.micro_batch_size} samples × {p.data_parallel_size} data-parallel ranks × "
                  f"{run.micro_batches} accumulated = {run.global_batch_size} a step, {run.tokens_per_step:,} tokens"),
        *start_rows(plan),
        ("FLOPs per token", f"{model.flops_per_token(data.seq_length):,}"),
        ("tokenizer", f"{run.tokenizer.kind}, {run.tokenizer.vocab_size:,} ids"
                      + (f", by {run.tokenizer.engine}" if run.tokenizer.engine else "")),
        *(("data", line) for line in run.splits.description),
        ("length", f"{run.train_iters:,} iterations, {needed:,} samples of {samples:,}: {epochs:.2f} epochs"),
        ("from", f"iteration {run.iteration} of {plan.source}" if run.iteration else
                 f"weights of {plan.source}" if plan.source else "random weights"),
        ("saved in", f"{config.checkpoint.save}, every {config.checkpoint.save_interval:,} iterations and at the end"
                     if config.checkpoint.save_interval else f"{config.checkpoint.save}, at the end"),
    ]
    run.log.note(f"started from {dict(rows)['from']} on {dict(rows)['layout']}")
    run.log.info(start_table(rows, [(flag, " ".join(map(str, value)) if isinstance(value, tuple) else str(value))
                                    for flag, value in differing_flags(plan.arguments.config)]))
    if too_little := warning(plan):
        run.log.info(too_little)
    if epochs > 4 and (data.train_data or data.data_path):  # the built-in corpus is as large as it is
        run.log.info(f"WARNING: {epochs:.1f} epochs: beyond about 4, repeated text teaches less and less; a larger "
                     "corpus or a smaller --train-iters would serve better")
    if config.train.eval_iters and run.splits.valid is None:
        run.log.info(f"no validation: --split {data.split} gives it no share")


def baselines(run: Run) -> dict[str, float | None]:
    """Bits per byte that a run has to beat, of the same part of the validation split that it was evaluated on; None
    for a long text and for a blend, whose parts are repeated."""
    train_split, valid = run.splits.train, run.splits.valid
    if not (isinstance(train_split, GPT2Dataset) and isinstance(valid, GPT2Dataset)) \
            or train_split.num_tokens > XZ_LIMIT:
        return {UNIGRAM: None, "xz -9": None}
    evaluated = min(len(valid), run.config.train.eval_iters * run.global_batch_size) * run.config.data.seq_length
    held_out = valid.tokens[:evaluated]
    train_text = train_split.text(XZ_LIMIT)
    return {
        UNIGRAM: unigram_bits_per_byte(
            train_split.tokens, held_out, run.tokenizer.byte_lengths, run.tokenizer.vocab_size),
        "xz -9, given the training text": xz_bits_per_byte(train_text, run.tokenizer.decode_bytes(held_out))
        if train_text is not None else None,
    }


def next_commands(save: str, train_iters: int, *, in_parts: bool) -> list[tuple[str, str]]:
    """What one would type next, as (what it does, command). in_parts: the checkpoint is of several model-parallel
    ranks."""
    folder = shlex.quote(save)
    commands = [
        ("train on from this checkpoint",
         f"{how_to_call('pretrain_gpt2')} --load {folder} --save {folder} --train-iters {2 * train_iters}"),
        ("the same on two ranks that share the data, in a folder of its own",
         f"{how_to_call('pretrain_gpt2_distributed')} --load {folder} --save {folder}_dp2 "
         f"--train-iters {3 * train_iters}"),
        ("generate text", f"{how_to_call('generate_text')} --load {folder} --prompt 'The '")]
    if in_parts:
        commands.append(("merge its model-parallel parts into one file",
                         f"{how_to_call('checkpoint')} merge {folder} {folder}_merged"))
    return commands


def on_disk(folder: Path) -> Checkpoint | None:
    """The checkpoint that a program would load from the --save folder; none where there is none that is whole."""
    try:
        return find_checkpoint(folder, log=lambda warning: None, verify=False)
    except ValueError:
        return None


def closing(run: Run, valid: EvaluationRecord | None, sample: str, plot: str, missing: str) -> str:
    """The closing report; `missing`: that the last iteration is not saved, if so. What it offers works with what is."""
    newest = on_disk(run.save_directory)
    where = " (".join(filter(None, (str(newest.path) if newest else "none", missing))) + ")" * bool(missing)
    return closing_report(
        bits_per_byte=valid.bits_per_byte if valid else None, baselines=baselines(run), sample=sample,
        checkpoint=where, plot=plot,
        next_commands=next_commands(str(run.config.checkpoint.save), run.train_iters,
                                    in_parts=run.parallel.model_parallel_size > 1) if newest else ())


cli = partial(end_with, main)

if __name__ == "__main__":
    cli()
