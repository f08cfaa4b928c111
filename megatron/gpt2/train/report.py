"""What a person sees of a training run at its start and at its end."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from data_utils import GPT2Dataset, unigram_bits_per_byte, xz_bits_per_byte
from data_utils.command_line import how_to_call
from megatron.gpt2.checkpoint.folder import find_checkpoint
from megatron.gpt2.checkpoint.local import newest_held
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.config import CheckpointConfig, differing, flag
from megatron.gpt2.device import PRECISIONS
from megatron.gpt2.model.gpt2 import count_parameters
from megatron.gpt2.monitor.incidents import ENDED
from megatron.gpt2.monitor.reporting import UNIGRAM, EvaluationRecord, closing_report, start_table
from megatron.gpt2.train.run import Run

# xz compresses about 2 MB/s: a corpus beyond this is not worth the wait at the end of a run.
XZ_LIMIT = 32 << 20  # bytes


def log_start(run: Run, warnings: Sequence[str]) -> None:
    """Note the start in the incidents, and log the start table and what the run lacks. warnings: from before the run
    had a log, which keeps them."""
    prepared, config, p, progress = run.prepared, run.config, run.parallel, run.progress
    if p.rank == 0:
        (prepared.save_directory / ENDED).unlink(missing_ok=True)
    t, stages, d = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.data_parallel_size
    run.incidents.note(
        "start",
        f"on {p.world_size} ranks from iteration {progress.iteration}",
        command=[sys.executable, *sys.argv],
        layout={"world_size": p.world_size, "tensor": t, "pipeline": stages, "data": d},
    )
    for line in warnings:
        run.log.note(line)

    model, data, train, tokenizer, splits = config.model, config.data, config.train, prepared.tokenizer, prepared.splits
    total = count_parameters(model, t)[0]
    own = sum(parameter.numel() for parameter in run.engine.model.parameters())
    batches, batch, samples = prepared.batch_schedule, prepared.global_batch_size, len(splits.train)
    needed = batches.after_steps(prepared.train_iters - progress.iteration, progress.consumed_samples)
    epochs = needed / samples
    (_, smallest), *growth = batches.stages
    layers = ", ".join(f"{stage.start}-{stage.stop - 1}" for stage in config.layers_of_stages())
    interval = config.checkpoint.save_interval
    layout = f"{p.world_size} ranks: model-parallel {t} × {f'pipeline {stages} × ' * (stages > 1)}data-parallel {d}"
    begins = f"weights of {prepared.source}" if prepared.source else "random weights"
    if progress.iteration:
        begins = f"iteration {progress.iteration} of {prepared.source}"
    rows = [
        (
            "model",
            f"GPT-2, {model.num_layers} layers, hidden size {model.hidden_size}, {model.num_attention_heads} heads, "
            f"vocabulary {model.vocab_size:,}, sequence {data.seq_length:,}"
            + (f" (--model {prepared.arguments.preset})" if prepared.arguments.preset else ""),
        ),
        (
            "parameters",
            f"{total:,} in all, {own:,} {'on this' if stages > 1 else 'per'} rank with the padded vocabulary",
        ),
        ("layout", layout),
        ("precision", f"{PRECISIONS[prepared.dtype]} on {run.device}; MFU is of {run.peak[1]}"),
        (
            "batch",
            f"{train.micro_batch_size} samples × {d} data-parallel ranks × {prepared.micro_batches} accumulated = "
            f"{batch} a step, {batch * data.seq_length:,} tokens"
            + (f"; it grows to that from {smallest} over {growth[-1][0]:,} samples" if growth else ""),
        ),
        *([("schedule", f"{config.schedule(1).name}; layers {layers}")] if stages > 1 else []),
        *(row for hook in run.hooks for row in hook.start_rows(run)),
        ("FLOPs per token", f"{model.flops_per_token(data.seq_length):,}"),
        (
            "tokenizer",
            f"{tokenizer.kind}, {tokenizer.vocab_size:,} ids" + (f", by {tokenizer.engine}" * bool(tokenizer.engine)),
        ),
        *(("data", line) for line in splits.description),
        ("length", f"{prepared.train_iters:,} iterations, {needed:,} samples of {samples:,}: {epochs:.2f} epochs"),
        ("from", begins),
        (
            "saved in",
            f"{config.checkpoint.save}, {f'every {interval:,} iterations and ' if interval else ''}at the end",
        ),
    ]
    run.log.note(f"started from {begins} on {layout}")
    flags = [
        (flag(key), " ".join(map(str, value)) if isinstance(value, tuple) else str(value))
        for key, value in differing(prepared.arguments.config).items()
    ]
    run.log.info(start_table(rows, flags))
    for hook in run.hooks:
        for line in hook.start_lines(run):
            run.log.info(line)
    if epochs > 4 and (data.train_data or data.data_path):  # the built-in corpus is as large as it is
        run.log.info(
            f"WARNING: {epochs:.1f} epochs: beyond about 4, repeated text teaches less and less; a larger "
            "corpus or a smaller --train-iters would serve better"
        )
    if train.eval_iters and splits.valid is None:
        run.log.info(f"no validation: --split {data.split} gives it no share")


def baselines(run: Run) -> dict[str, float | None]:
    """Bits per byte that a run has to beat, by description, on the part of the validation split that the run was
    evaluated on. None for a long text and for a blend, whose parts are repeated."""
    train_split, valid, tokenizer = run.data.splits.train, run.data.splits.valid, run.data.tokenizer
    if (
        not (isinstance(train_split, GPT2Dataset) and isinstance(valid, GPT2Dataset))
        or train_split.num_tokens > XZ_LIMIT
    ):
        return {UNIGRAM: None, "xz -9": None}
    samples = min(len(valid), run.config.train.eval_iters * run.prepared.global_batch_size)
    held_out = valid.tokens[: samples * run.config.data.seq_length]
    train_text = train_split.text(XZ_LIMIT)
    return {
        UNIGRAM: unigram_bits_per_byte(train_split.tokens, held_out, tokenizer.byte_lengths, tokenizer.vocab_size),
        "xz -9, given the training text": xz_bits_per_byte(train_text, tokenizer.decode_bytes(held_out))
        if train_text is not None
        else None,
    }


def next_commands(save: str, train_iters: int, *, in_parts: bool) -> list[tuple[str, str]]:
    """What one would type next, as (what it does, command). in_parts: the checkpoint is of several model-parallel
    ranks."""
    folder = shlex.quote(save)
    commands = [
        (
            "train on from this checkpoint",
            f"{how_to_call('pretrain_gpt2')} --load {folder} --save {folder} --train-iters {2 * train_iters}",
        ),
        (
            "the same on two ranks that share the data, in a folder of its own",
            f"{how_to_call('pretrain_gpt2_distributed')} --load {folder} --save {folder}_dp2 "
            f"--train-iters {3 * train_iters}",
        ),
        ("generate text", f"{how_to_call('generate_text')} --load {folder} --prompt 'The '"),
    ]
    if in_parts:
        commands.append(
            (
                "merge its model-parallel parts into one file",
                f"{how_to_call('checkpoint')} merge {folder} {folder}_merged",
            )
        )
    return commands


def on_disk(folder: Path) -> Checkpoint | None:
    """The checkpoint that a program would load from the --save folder; none where there is none that is whole."""
    try:
        return find_checkpoint(folder, log=lambda warning: None, verify=False)
    except ValueError:
        return None


def newest_iteration(config: CheckpointConfig, *, alone: bool) -> int:
    """The iteration of the checkpoint that a run would continue, also a local one; 0 where there is none. alone: the
    run has this machine alone."""
    save, local = str(config.save), config.local_checkpoint_dir
    newest = on_disk(Path(save))
    return max(newest.iteration if newest else 0, newest_held(save, local, alone=alone) if local else 0)


def closing(run: Run, valid: EvaluationRecord | None, sample: str, plot: str, missing: str) -> str:
    """The closing report. valid: the final evaluation. sample: a text of the model. plot: the curve, or its path.
    missing: that the last iteration is not saved, if so; the commands that are shown work with what is saved."""
    newest = on_disk(run.prepared.save_directory)
    where = " (".join(filter(None, (str(newest.path) if newest else "none", missing))) + ")" * bool(missing)
    return closing_report(
        bits_per_byte=valid.bits_per_byte if valid else None,
        baselines=baselines(run),
        sample=sample,
        checkpoint=where,
        plot=plot,
        next_commands=next_commands(
            str(run.config.checkpoint.save), run.prepared.train_iters, in_parts=run.parallel.model_parallel_size > 1
        )
        if newest
        else (),
    )


def is_finished_line(given: CheckpointConfig, source: str | None, iteration: int, train_iters: int) -> str:
    """That the run in `source` is finished, and how to begin another one, by what was `given`."""
    if given.load != source:
        other = "a new --save for another run."
    else:
        elsewhere = " and a new --save" if given.save == source else ""
        other = f"--finetune{elsewhere} for another run that begins with its weights."
    return (
        f"{source} is finished: it is at iteration {iteration} of {train_iters}. Give a greater --train-iters to "
        f"train on, or {other}"
    )
