"""A run of some steps that is recorded, or compared with a trace. Every rank calls these functions."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.gpt2 import device as devices
from megatron.gpt2.config import by_key, flag, require
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.extensions.verify.capture import Capture
from megatron.gpt2.extensions.verify.compare import Comparer
from megatron.gpt2.extensions.verify.parts import Part
from megatron.gpt2.extensions.verify.rounding import Rounding
from megatron.gpt2.extensions.verify.trace import Trace, TraceWriter
from megatron.gpt2.train.build import build_run
from megatron.gpt2.train.prepare import Log, prepare_run
from megatron.gpt2.train.run import Run

FACTS = "facts.json"
# What a run leaves to its user, and what it does beside its steps.
OUTSIDE = (
    "train.tensorboard_dir",
    "train.wandb_project",
    "train.profile",
    "checkpoint.async_save",
    "checkpoint.keep_best",
)
# What decides which numbers a run computes, whatever its layout.
SAME = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "vocab_size",
    "gelu",
    "layernorm_epsilon",
    "attention_dropout",
    "hidden_dropout",
)


@dataclasses.dataclass(frozen=True)
class Task:
    """What each rank of a run does. trace: is written with `records`, else read. out: for what the ranks find, and a
    --save folder. steps: of the run."""

    trace: str
    out: str
    steps: int
    records: bool


def run_task(task: Task, argv: Sequence[str], ranks: Ranks, log: Log) -> int:
    """Build the run of the command line `argv` and do the task with it. Returns the exit code."""
    with contextlib.redirect_stdout(sys.stderr):
        run = built(argv, ranks, task, log)
        try:
            own = facts(run, task.steps)
            if task.records:
                record(run, task.steps, Path(task.trace))
            else:
                trace = Trace(Path(task.trace))
                check_same(trace.facts, own)
                compare(run, task.steps, trace, Path(task.out))
            if ranks.rank == 0:
                Path(task.out, FACTS).write_text(json.dumps(own), encoding="utf-8")
        finally:
            run.close()
    return 0


def built(argv: Sequence[str], ranks: Ranks, task: Task, log: Log) -> Run:
    """The run of a command line, which leaves nothing in its user's folders. ValueError where it cannot be, or has too
    few steps to go."""
    devices.set_threads(ranks)
    arguments = parse(argv)
    values = {key: value for key, value in arguments.values.items() if key not in OUTSIDE}
    values |= {"checkpoint.save": str(Path(task.out, "save")), "train.eval_iters": 0}
    warn: Callable[[str], None] = lambda line: log(line) if line.startswith("WARNING") else None  # noqa: E731
    prepared = prepare_run(dataclasses.replace(arguments, values=values), ranks, warn)
    left = prepared.train_iters - prepared.start.get("iteration", 0)
    require(
        task.steps <= left,
        f"--steps {task.steps}: the run has {max(left, 0)} iterations to go: give a greater "
        "--train-iters or fewer steps",
    )
    return build_run(prepared, warn)


def facts(run: Run, steps: int) -> dict[str, Any]:
    """What a trace says of its run, as JSON: what must be the same in a run that is compared with it, and where it was
    made."""
    prepared, parallel = run.prepared, run.parallel
    return {
        "config": prepared.config.as_dict(),
        "model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_model_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "global_batch_size": prepared.global_batch_size,
        "micro_batches": prepared.micro_batches,
        "iteration": run.progress.iteration,
        "steps": steps,
        "data_fingerprint": prepared.splits.fingerprint,
        "tokenizer": prepared.tokenizer.fingerprint,
        "precision": devices.PRECISIONS[prepared.dtype],
        "device": prepared.device.type,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def check_same(then: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """ValueError, naming what differs, unless a run with the facts `here` computes what a trace with those of `then`
    holds."""
    for key in (*(f"model.{name}" for name in SAME), "data.seq_length", "train.seed"):
        before, now = by_key(then["config"]).get(key), by_key(here["config"])[key]
        require(before == now, f"the trace is of another run: {flag(key)} is {before} there and {now} here")
    for name, words in (
        ("global_batch_size", "the samples of a step"),
        ("iteration", "the iteration of its start"),
        ("tokenizer", "the tokenizer"),
        ("data_fingerprint", "the training data or --split"),
    ):
        before, now = then.get(name), here[name]
        told = f" ({before} there, {now} here)" if isinstance(now, int) else ""
        require(
            before == now,
            f"the trace is of another run: {words} differ{told}: give the flags and files that it was made with",
        )
    require(here["steps"] <= then["steps"], f"--steps {here['steps']}: the trace has {then['steps']}")


def record(run: Run, steps: int, folder: Path) -> None:
    """Run `steps` steps, and leave what this rank has of them in `folder`, for `trace.merge`."""
    writer = TraceWriter(folder, run.parallel.rank)
    _observe(run, steps, writer)
    writer.finish()


def compare(run: Run, steps: int, trace: Trace, folder: Path) -> None:
    """Run `steps` steps, and leave in `folder` how far this rank's part of them is from `trace`."""
    comparer = Comparer(trace, Rounding(trace, facts(run, steps)), folder, run.parallel.rank)
    _observe(run, steps, comparer)
    comparer.finish()


def _observe(run: Run, steps: int, take: Callable[[Part], None]) -> None:
    run.engine.model.train()
    capture = Capture(run, take)
    try:
        for _ in range(steps):
            capture.step()
    finally:
        capture.close()
