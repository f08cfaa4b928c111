"""Prove that a layout cannot deadlock. Record every collective, send and receive of all ranks, in this process:

    python tools/prove_order.py --nproc-per-node 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 ...

prove_order takes the flags of pretrain_gpt2. Each rank runs the program with a narrow model and short samples: it loads
a checkpoint, trains two steps, evaluates, saves and generates text. Layers, micro-batches and schedule come from the
command line. The run leaves out --compile, local checkpoints and a growing batch. Nothing is sent, and your data and
checkpoints are not read or written. The proof covers:

- No order in time lets ranks wait for each other, under the rules of NCCL and of gloo.
- All ranks of a group call the same operations with the same shapes, dtypes and options, in the same order.
- Nothing reads or overwrites memory that is on its way, and each asynchronous call is waited for.

A fault is explained with ranks and lines of the program. To check your own program, record each rank in order:

    from megatron.gpt2.extensions.order import prove, record

    records = []
    for rank in range(4):
        with record(rank, 4, records):
            my_program()  # with small tensors on the CPU
    print("\\n".join(prove(records)))

Exit codes: 0 proven, 1 if there is a fault, 2 for bad flags.
"""

import contextlib
import dataclasses
import io
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import mpu
from data_utils.command_line import print_help, require
from megatron.gpt2 import device as devices
from megatron.gpt2 import hooks
from megatron.gpt2.checkpoint.saver import PendingSave, Saver
from megatron.gpt2.commands.pretrain_gpt2 import finish_run
from megatron.gpt2.config.arguments import DECAY_KEYS, LENGTH_KEYS, WARMUP_KEYS, Arguments, parse
from megatron.gpt2.config.flags import parse_launch_flags
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.extensions.order.proof import prove
from megatron.gpt2.extensions.order.recording import RankRecord, record
from megatron.gpt2.monitor.run_log import RunLog
from megatron.gpt2.train import evaluate
from megatron.gpt2.train.loop import train
from megatron.gpt2.train.setup import build_context
from megatron.gpt2.train.trainer import build_trainer

# The recorded run ignores these flags: they set lengths, name the user's files, or write output in addition to the log.
LEFT_OUT = (
    *(*LENGTH_KEYS, *WARMUP_KEYS, *DECAY_KEYS),
    *"model.ffn_hidden_size model.vocab_size checkpoint.finetune checkpoint.local_checkpoint_dir".split(),
    *"checkpoint.local_checkpoint_interval train.rampup_batch_size train.step_batch_size_schedule".split(),
    *"train.exit_interval train.exit_duration_in_mins train.compile train.profile train.tensorboard_dir".split(),
    "train.wandb_project",
)
DATA_FLAGS = ("data.eod_mask_loss", "data.reset_position_ids", "data.reset_attention_mask")
HEAD_SIZE, MIN_TOKENS, NEW_TOKENS = 8, 16, 3


def small_run(arguments: Arguments, folder: Path) -> dict[str, Any]:
    """Return the values of a small run in `folder`: the layout of `arguments`, a narrow model, and short samples."""
    config = arguments.config
    heads = math.lcm(2, config.parallel.tensor_model_parallel_size, config.parallel.exact_layouts or 1)
    scale = heads * HEAD_SIZE / config.model.hidden_size
    length = -(-MIN_TOKENS // heads) * heads
    kept = {
        key: value
        for key, value in arguments.values.items()
        if key not in LEFT_OUT and (not key.startswith("data.") or key in DATA_FLAGS)
    }
    return kept | {
        "model.hidden_size": heads * HEAD_SIZE,
        "model.num_attention_heads": heads,
        "model.max_position_embeddings": length,
        "data.seq_length": length,
        "data.train_data": (str(folder / "text.txt"),),
        "data.split": "80,10,10",
        "data.data_cache_path": str(folder / "cache"),
        "data.tokenizer_type": "bytes",
        # The narrow model has the same number of buckets as the model of the user.
        "parallel.ddp_bucket_size": max(1, int(config.parallel.ddp_bucket_size * scale**2)),
        "train.device": "cpu",
        "train.train_iters": 3,
        "train.eval_iters": min(1, config.train.eval_iters),
        "train.eval_interval": 2,
        "train.log_interval": 2,
        "checkpoint.save_interval": 2,
        "checkpoint.save": str(folder / "save"),
        "checkpoint.load": str(folder / "loaded"),
    }


def run(values: dict[str, Any], rank: int, world_size: int) -> None:
    """Run the training program as one rank, from loading to the last line."""
    arguments = Arguments(values, frozenset(values), None)
    context = build_context(arguments, RankInfo(rank, world_size, rank, world_size), lambda line: None)
    trainer = build_trainer(context, lambda line: None)
    try:
        finish_run(trainer, train(trainer))
    finally:
        trainer.close()
        mpu.destroy_model_parallel()


def write_nothing(
    saver: Saver, iteration: int, files: Any, metadata: Any, pending: PendingSave, into: Any = None
) -> Path:
    """Do nothing instead of `Saver.write`, which calls no collective and would wait for other ranks' files."""
    pending.files_written.set_result(None)
    return Path(into or saver.folder) / f"iter_{iteration:07d}"


def record_layout(arguments: Arguments, world_size: int) -> list[RankRecord]:
    """Record all ranks of a run that has the layout of `arguments`."""
    records: list[RankRecord] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="order_")))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        for owner, name, replacement in (
            (devices, "_measure_gemm_flops", lambda *_: 1.0),  # Measuring the speed of matrix products takes 0.3 s.
            (RunLog, "_write", lambda *_: ""),  # The recorded run writes neither report nor plot.
            (hooks, "MEMORY_PLAN", "absent:absent"),  # The memory plan would trace a step in other process groups.
            (evaluate, "SAMPLING", dataclasses.replace(evaluate.SAMPLING, max_new_tokens=NEW_TOKENS)),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        (folder / "text.txt").write_text("One line of a text for a model.\n" * 2000)
        values = small_run(arguments, folder)
        alone = {key: value for key, value in values.items() if not key.startswith(("parallel.", "checkpoint."))}
        alone |= {"train.micro_batch_size": 1, "train.train_iters": 1, "checkpoint.save": str(folder / "loaded")}
        alone.pop("train.global_batch_size", None)
        run(alone, 0, 1)
        stack.enter_context(mock.patch.object(Saver, "write", write_nothing))
        for rank in range(world_size):
            with contextlib.suppress(Exception), record(rank, world_size, records):
                run(values, rank, world_size)
    return records


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    print_help("prove_order", words, __doc__)
    launch, rest = parse_launch_flags(words)
    arguments = parse(rest)
    world_size = launch.world_size or (launch.nproc_per_node or 1) * launch.nnodes
    require(world_size > 1, "give the number of ranks: --nproc-per-node, with --nnodes for several machines")
    arguments.build_batch_schedule(world_size)  # `build_batch_schedule` raises ValueError if the layout does not fit.
    torch.set_num_threads(1)
    records = record_layout(arguments, world_size)
    story, error = prove(records), next(filter(None, (one.error for one in records)), None)
    if error is not None and not story:
        raise error
    calls = sum(is_call for one in records for is_call, _ in one.events)
    print("\n".join(story) or f"proven: {world_size} ranks, {calls:,} calls, under the rules of NCCL and gloo")
    return 1 if story else 0
