"""The layouts of a comparison, and what each rank of a layout does: a run that is recorded, or compared with a trace."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from data_utils.command_line import Parser
from megatron.gpt2 import device as devices
from megatron.gpt2.checkpoint.folder import find_checkpoint
from megatron.gpt2.checkpoint.source import check_facts, decay_iters
from megatron.gpt2.config import by_key, flag, require
from megatron.gpt2.config.arguments import Arguments, merge_checkpoint, parse
from megatron.gpt2.config.flags import launch_flags
from megatron.gpt2.dist.launch import Launch
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.dist.run_program import run_program, start_ranks
from megatron.gpt2.extensions.verify.capture import Capture
from megatron.gpt2.extensions.verify.compare import Comparer
from megatron.gpt2.extensions.verify.huggingface import HuggingFaceStep
from megatron.gpt2.extensions.verify.trace import Trace, TraceWriter
from megatron.gpt2.train.run import Run, build_run
from megatron.gpt2.train.setup import Log, prepare_run

# What a run leaves to its user, and what it does in addition to its steps.
OUTSIDE = (
    "train.tensorboard_dir",
    "train.wandb_project",
    "train.profile",
    "checkpoint.async_save",
    "checkpoint.keep_best",
)
# What decides which numbers a run computes, whatever its layout.
SAME = (
    "model.num_layers",
    "model.hidden_size",
    "model.num_attention_heads",
    "model.ffn_hidden_size",
    "model.max_position_embeddings",
    "model.vocab_size",
    "model.gelu",
    "model.layernorm_epsilon",
    "model.attention_dropout",
    "model.hidden_dropout",
    "data.seq_length",
    "train.seed",
)
SAME_FACTS = {
    "global_batch_size": "the samples of a step",
    "iteration": "the iteration of its start",
    "tokenizer": "the tokenizer",
    "data_fingerprint": "the training data or --split",
}


class Failed(Exception):
    """The ranks of a layout have ended with this exit code, and have said why."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """flags: as they were given. words: the whole command line of pretrain_gpt2 without what starts ranks."""

    flags: str
    words: tuple[str, ...]
    world_size: int

    @property
    def name(self) -> str:
        """What a person reads: its flags, or that it has none."""
        return self.flags or "(no flags)"


def read_layout(common: Sequence[str], flags: str) -> Layout:
    """The layout of the command line `common` with `flags` behind it. ValueError where it cannot be.

    --nproc-per-node gives its ranks, or --data-parallel-size, a field of layouts only; without both it takes the
    model-parallel size, tensor × pipeline.
    """
    launch, rest = launch_flags([*common, *shlex.split(flags)])
    own = Parser(add_help=False)
    own.add_argument("--data-parallel-size", type=int)
    try:
        require(
            launch.rank is None and launch.nnodes == 1,
            "all ranks of a layout start on this machine: leave out --rank, --world-size and --nnodes",
        )
        given, words = own.parse_known_args(rest)
        parallel, dp = parse(words).config.parallel, given.data_parallel_size
        p = parallel.model_parallel_size * parallel.pipeline_model_parallel_size
        require(dp is None or dp >= 1, f"--data-parallel-size must be at least 1, not {dp}")
        world_size = p * (dp or 1)
        if launch.nproc_per_node is not None:
            world_size = launch.nproc_per_node or torch.cuda.device_count() or 2
            require(
                dp is None or p * dp == world_size,
                f"--nproc-per-node {world_size} is not the model-parallel size {p} × --data-parallel-size {dp}",
            )
        require(world_size % p == 0, f"--nproc-per-node {world_size} is not divisible by the model-parallel size {p}")
    except ValueError as error:
        raise ValueError(f"--layout {flags!r}: {error}") from error
    return Layout(flags, tuple(words), world_size)


def with_one_batch(layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts, each with the global batch of the first where it says none of its own. ValueError where two say
    different ones, or where a batch cannot be divided among its ranks."""
    together = _arguments(layouts[0]).config.batch_schedule(layouts[0].world_size).final
    whole = []
    for layout in layouts:
        layout = dataclasses.replace(layout, words=("--global-batch-size", str(together), *layout.words))
        try:
            own = _arguments(layout).config.batch_schedule(layout.world_size).final
        except ValueError as error:
            raise ValueError(f"--layout {layout.flags!r}: {error}: give it another --micro-batch-size") from error
        require(
            own == together,
            f"--layout {layout.flags!r}: its --global-batch-size is {own}, and that of the first layout "
            f"{together}: a step must take the same samples in each",
        )
        whole.append(layout)
    return whole


def _arguments(layout: Layout) -> Arguments:
    """The command line of a layout, with what the checkpoint decides that it continues."""
    arguments = parse(layout.words)
    if (folder := arguments.checkpoint.load) is None:
        return arguments
    checkpoint = find_checkpoint(folder, log=lambda line: None, verify=False)
    if checkpoint is None:
        raise ValueError(f"--load {folder} holds no checkpoint")
    check_facts(checkpoint)
    return merge_checkpoint(arguments, checkpoint.facts["config"], decay_iters(checkpoint.facts))


@dataclasses.dataclass(frozen=True)
class Task:
    """What each rank of a run does. trace: is written with `records`, else read. by_transformers: which computes the
    steps. out: for the ranks' reports, and a --save folder. steps: of the run."""

    trace: Path
    out: Path
    steps: int
    records: bool = False
    by_transformers: bool = False


def reports(layout: Layout, task: Task) -> list[dict[str, Any]]:
    """Do the task on all ranks of a layout: the report of each rank. Failed where they do not end well."""
    task.out.mkdir(parents=True, exist_ok=True)
    launch = Launch(world_size=layout.world_size, local=(0, layout.world_size), starts=layout.world_size)
    if code := start_ranks(functools.partial(run_program, functools.partial(do, task)), layout.words, launch):
        raise Failed(code)
    texts = ((task.out / f"rank_{rank}.json").read_text(encoding="utf-8") for rank in range(layout.world_size))
    return [json.loads(text) for text in texts]


def do(task: Task, argv: Sequence[str], ranks: Ranks, log: Log) -> int:
    """Build the run of the command line `argv` and do the task with it. Returns the exit code."""
    with contextlib.redirect_stdout(sys.stderr):
        run = built(argv, ranks, task, log)
        try:
            report = json.dumps(observed(run, task))
            (task.out / f"rank_{ranks.rank}.json").write_text(report, encoding="utf-8")
        finally:
            run.close()
    return 0


def built(argv: Sequence[str], ranks: Ranks, task: Task, log: Log) -> Run:
    """The run of a command line, which leaves nothing in its user's folders. ValueError where it cannot be, or has too
    few steps to go."""

    def warn(line: str) -> None:
        if line.startswith("WARNING"):
            log(line)

    devices.set_threads(ranks)
    arguments = parse(argv)
    values = {key: value for key, value in arguments.values.items() if key not in OUTSIDE}
    values |= {"checkpoint.save": str(task.out / "save"), "train.eval_iters": 0}
    prepared = prepare_run(dataclasses.replace(arguments, values=values), ranks, warn)
    left = prepared.train_iters - prepared.start.get("iteration", 0)
    require(
        task.steps <= left,
        f"--steps {task.steps}: the run has {max(left, 0)} iterations to go: give a greater "
        "--train-iters or fewer steps",
    )
    return build_run(prepared, warn)


def observed(run: Run, task: Task) -> dict[str, Any]:
    """Run the steps of the task, and record or compare what this rank has of them: its report, as JSON."""
    own = facts(run, task.steps)
    if task.records:
        take: TraceWriter | Comparer = TraceWriter(task.trace)
    else:
        trace = Trace(task.trace)
        check_same(trace.facts, own)
        take = Comparer(trace, own)
    if task.by_transformers:
        HuggingFaceStep(run, take).record()
    else:
        run.engine.model.train()
        Capture(run, take).steps(task.steps)
    return {"facts": own, "found": take.found}


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
    before, now = by_key(then["config"]), by_key(here["config"])
    for what, there, own in (
        *((flag(key), before.get(key), now[key]) for key in SAME),
        *((words, then.get(name), here[name]) for name, words in SAME_FACTS.items()),
    ):
        require(there == own, f"the trace is of another run: {what} is {there} there and {own} here")
    require(here["steps"] <= then["steps"], f"--steps {here['steps']}: the trace has {then['steps']}")
