"""Is a run the same training in another layout? Run some steps in each layout and compare every layer's output, the
gradients, the moments and the parameters, as tensors of the whole model:

    python tools/verify.py --layout "" --layout "--model-parallel-size 2" --steps 3 -- --model quickstart

The layouts are flags of pretrain_gpt2, and so is what follows the two dashes, which all layouts share. A checkpoint
(--load) and data of your own are among them. docs/how-to/verify.md says how to read the table. Exit codes: 0 if every
run is the same within rounding, 1 if one differs, 2 for bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from data_utils.command_line import Parser, line_buffered
from data_utils.files import replace_text
from megatron.gpt2 import device as devices
from megatron.gpt2.checkpoint.folder import find_checkpoint
from megatron.gpt2.checkpoint.source import check_facts, decay_iters
from megatron.gpt2.config import by_key, flag, require
from megatron.gpt2.config.arguments import merge_checkpoint
from megatron.gpt2.config.arguments import parse as parse_run
from megatron.gpt2.config.flags import launch_flags
from megatron.gpt2.dist.launch import Launch
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.dist.run_program import run_program, start_ranks
from megatron.gpt2.extensions.verify.capture import Capture, TransformersCapture
from megatron.gpt2.extensions.verify.compare import Comparer, judge
from megatron.gpt2.extensions.verify.report import Layout, Result, explanation, first_lines, page, table
from megatron.gpt2.extensions.verify.trace import Trace, TraceWriter, write_index
from megatron.gpt2.train.run import Run, build_run
from megatron.gpt2.train.setup import Log, prepare_run

STEPS = 3
HUGGINGFACE = "huggingface"
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


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags, checked; `command` is what follows "--". ValueError if one cannot be."""
    parser = Parser(prog="verify", description=__doc__)
    parser.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar="FLAGS",
        help="flags of pretrain_gpt2, and --data-parallel-size N; the first layout is the one with which the others "
        "are compared. Without --nproc-per-node and --data-parallel-size it takes --model-parallel-size ranks",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"training steps of each layout (default: {STEPS}, or those of the trace)",
    )
    parser.add_argument(
        "--against",
        metavar="TRACE",
        help="compare all layouts with the trace in this folder, or with a run whose forward pass and gradients are "
        f"those of transformers' GPT-2 ({HUGGINGFACE})",
    )
    parser.add_argument(
        "--save-trace",
        type=Path,
        metavar="FOLDER",
        help="keep the trace of the first layout, for --against on another machine or with another version",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the comparison as a page")
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="FOLDER",
        help="where the trace lies meanwhile: about 16 bytes for each parameter and step, and the activations "
        "(default: the folder of temporary files)",
    )
    end = argv.index("--") if "--" in argv else len(argv)
    words = list(argv[:end])
    for place, word in enumerate(words):
        if word == "--layout" and words[place + 1 :]:  # its value may look like a flag of this program
            words[place : place + 2] = [f"--layout={words[place + 1]}"]
    options = parser.parse_args(words)
    options.command = list(argv[end + 1 :])
    against, save = options.against, options.save_trace
    require(options.steps is None or options.steps >= 1, f"--steps must be at least 1, not {options.steps}")
    require(
        not (against and save),
        "--save-trace keeps the trace of the first layout, which --against does not make: give one of the two",
    )
    needed = "one --layout FLAGS" if against or save else "two layouts to compare, each by --layout FLAGS"
    require(
        len(options.layout) >= (1 if against or save else 2),
        f'give at least {needed}; --layout "" is the command line as it is',
    )
    require(
        not (save and save.exists() and any(save.iterdir())), f"--save-trace {save} is not empty: give a new folder"
    )
    return options


def read_layout(common: Sequence[str], flags: str, batch: int | None = None) -> Layout:
    """The layout of the command line `common` with `flags` behind it. ValueError if it cannot be.

    --nproc-per-node gives its ranks, or --data-parallel-size, a field of layouts only; without both it takes the
    model-parallel size, tensor × pipeline. batch: the global batch that it takes, and must not contradict.
    """
    launch, rest = launch_flags([*common, *shlex.split(flags)])
    own = Parser(add_help=False)
    own.add_argument("--data-parallel-size", type=int)
    hint = ""
    try:
        require(
            launch.rank is None and launch.nnodes == 1,
            "all ranks of a layout start on this machine: leave out --rank, --world-size and --nnodes",
        )
        given, words = own.parse_known_args(rest)
        words = words if batch is None else ["--global-batch-size", str(batch), *words]
        arguments = parse_run(words)
        if (folder := arguments.checkpoint.load) is not None:
            checkpoint = find_checkpoint(folder, log=lambda line: None, verify=False)
            if checkpoint is None:
                raise ValueError(f"--load {folder} holds no checkpoint")
            check_facts(checkpoint)
            arguments = merge_checkpoint(arguments, checkpoint.facts["config"], decay_iters(checkpoint.facts))
        parallel, dp = arguments.config.parallel, given.data_parallel_size
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
        hint = ": give it another --micro-batch-size"
        samples = arguments.config.batch_schedule(world_size).final
    except ValueError as error:
        raise ValueError(f"--layout {flags!r}: {error}{hint}") from error
    require(
        batch in (None, samples),
        f"--layout {flags!r}: its --global-batch-size is {samples}, and that of the first layout "
        f"{batch}: a step must take the same samples in each",
    )
    return Layout(flags, tuple(words), world_size, samples)


@dataclass(frozen=True)
class Task:
    """The work of each rank of a run. trace: is written with `records`, otherwise read. by_transformers: whether
    transformers computes. out: for what the ranks report, and a --save folder. steps: of the run."""

    trace: Path
    out: Path
    steps: int
    records: bool = False
    by_transformers: bool = False


class Report(NamedTuple):
    """What a rank says of its task, as JSON. facts: of its run. found: by its `TraceWriter` or its `Comparer`."""

    facts: dict[str, Any]
    found: list[Any]


def reports(layout: Layout, task: Task) -> list[Report]:
    """Do the task on all ranks of a layout: the report of each rank. Failed if they do not end well."""
    task.out.mkdir(parents=True, exist_ok=True)
    launch = Launch(world_size=layout.world_size, local=(0, layout.world_size), starts=layout.world_size)
    if code := start_ranks(functools.partial(run_program, functools.partial(do, task)), layout.words, launch):
        raise Failed(code)
    texts = [(task.out / f"rank_{rank}.json").read_text(encoding="utf-8") for rank in range(layout.world_size)]
    return [Report(*json.loads(text)) for text in texts]


def do(task: Task, argv: Sequence[str], ranks: Ranks, log: Log) -> None:
    """Build the run of the command line `argv`, which leaves nothing in its user's folders, and do the task with it.
    ValueError if the run cannot be, or has too few steps to go."""

    def warn(line: str) -> None:
        if line.startswith("WARNING"):
            log(line)

    with contextlib.redirect_stdout(sys.stderr):
        devices.set_threads(ranks)
        arguments = parse_run(argv)
        outside = (*OUTSIDE, "parallel.exact_layouts") if task.by_transformers else OUTSIDE
        values = {key: value for key, value in arguments.values.items() if key not in outside}
        values |= {"checkpoint.save": str(task.out / "save"), "train.eval_iters": 0}
        prepared = prepare_run(dataclasses.replace(arguments, values=values), ranks, warn)
        left = prepared.train_iters - prepared.start.get("iteration", 0)
        require(
            task.steps <= left,
            f"--steps {task.steps}: the run has {max(left, 0)} iterations to go: give a greater "
            "--train-iters or fewer steps",
        )
        run = build_run(prepared, warn)
        try:
            report = json.dumps(observed(run, task), default=np.ndarray.tolist)
            (task.out / f"rank_{ranks.rank}.json").write_text(report, encoding="utf-8")
        finally:
            run.close()


def observed(run: Run, task: Task) -> Report:
    """Run the steps of the task, and record or compare what this rank has of them."""
    own = facts(run, task.steps)
    if task.records:
        take: TraceWriter | Comparer = TraceWriter(task.trace)
    else:
        trace = Trace(task.trace)
        check_same(trace.facts, own)
        take = Comparer(trace, own, run.parallel.rank)
    run.engine.model.train()
    (TransformersCapture if task.by_transformers else Capture)(run, take).steps(task.steps)
    return Report(own, take.found)


def facts(run: Run, steps: int) -> dict[str, Any]:
    """What a trace says of its run: what must be the same in a run that is compared with it, and where it was made."""
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


def compare_layouts(options: argparse.Namespace, scratch: Path) -> tuple[str, Trace, list[Result]]:
    """Run the layouts and compare them. Returns what they were compared with, in words and as a trace, whose tensors
    may lie in the folder `scratch`, and what came out."""
    first = read_layout(options.command, options.layout[0])
    layouts = [read_layout(options.command, flags, first.batch) for flags in options.layout]
    by_transformers = options.against == HUGGINGFACE
    if options.against and not by_transformers:
        reference, trace = f"the trace {options.against}", Trace(Path(options.against))
    else:
        reference, where = f"the layout {first.name}", options.save_trace or scratch / "trace"
        if by_transformers:
            plain = "--micro-batch-size 1 --model-parallel-size 1 --pipeline-model-parallel-size 1"
            reference, first = "transformers' GPT-2", read_layout(first.words, plain, first.batch)
        else:
            layouts = layouts[1:]
        recorded = reports(first, Task(where, scratch / "reference", options.steps or STEPS, True, by_transformers))
        write_index(where, recorded[0].facts, [report.found for report in recorded])
        trace = Trace(where)
    results = []
    for number, layout in enumerate(layouts):
        task = Task(trace.folder, scratch / f"layout_{number}", options.steps or trace.facts["steps"])
        compared = reports(layout, task)
        verdict = judge([report.found for report in compared], trace)
        results.append(Result(layout, compared[0].facts, verdict))
    return reference, trace, results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    line_buffered()
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        with tempfile.TemporaryDirectory(prefix="verify_", dir=options.scratch) as scratch:
            reference, trace, results = compare_layouts(options, Path(scratch))
    except Failed as error:
        return int(error.args[0])
    lines = first_lines(reference, trace)
    print("\n".join(lines))
    if results:
        print("", *table(results), sep="\n")
    differing = [result for result in results if result.verdict.findings]
    for result in differing:
        print("", *explanation(result), sep="\n")
    if options.save_trace:
        print(f"the trace is in {options.save_trace}: --against {options.save_trace} compares with it")
    if options.html:
        replace_text(options.html, page(lines, shlex.join(options.command), trace, results))
        print(f"the page is {options.html}")
    return 1 if differing else 0
