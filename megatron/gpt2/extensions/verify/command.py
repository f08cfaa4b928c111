"""Check that a run computes the same training in different layouts. Run some steps in each layout and compare the
outputs of all layers, the gradients, the moments and the parameters, as tensors of the whole model:

    python tools/verify.py --layout "" --layout "--tensor-model-parallel-size 2" --steps 3 -- --model quickstart

A layout is a string of flags of pretrain_gpt2. The flags after -- apply to all layouts, for example --load for your
checkpoint or --train-data for your data. docs/how-to/verify.md explains the table. Exit codes: 0 if all runs are equal
within rounding, 1 if a run differs, 2 for bad input.
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

from data_utils.command_line import Log, Parser, configure_output, positive_int, require
from data_utils.files import atomic_write_text
from megatron.gpt2 import device as devices
from megatron.gpt2.checkpoint.interface import check_metadata, saved_decay_iters
from megatron.gpt2.checkpoint.save_folder import find_checkpoint
from megatron.gpt2.config import flag_name, flatten_sections
from megatron.gpt2.config.arguments import merge_checkpoint
from megatron.gpt2.config.arguments import parse as parse_run
from megatron.gpt2.config.flags import parse_launch_flags
from megatron.gpt2.dist.launch import Launch
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.dist.run_program import run_program, start_ranks
from megatron.gpt2.extensions.verify.capture import Capture, TransformersCapture
from megatron.gpt2.extensions.verify.compare import Comparison, TraceComparer
from megatron.gpt2.extensions.verify.report import (
    LayoutResult,
    LayoutSpec,
    comparison_table,
    explain_mismatch,
    reference_lines,
    render_html,
)
from megatron.gpt2.extensions.verify.trace import TensorTrace, TraceWriter, write_index
from megatron.gpt2.train.setup import build_context
from megatron.gpt2.train.trainer import Trainer, build_trainer

STEPS = 3
HUGGINGFACE = "huggingface"
# Runs ignore flags that only write files or evaluate.
IGNORED_FLAGS = (
    "train.tensorboard_dir",
    "train.wandb_project",
    "train.profile",
    "checkpoint.async_save",
    "checkpoint.keep_best",
)
SAME_METADATA = {
    "global_batch_size": "the samples of a step",
    "iteration": "the iteration of its start",
    "tokenizer": "the tokenizer",
    "data_fingerprint": "the training data or --split",
}


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags. The attribute `command` of the result is the list of words after "--". Raises
    ValueError for bad flags."""
    parser = Parser(prog="verify", description=__doc__)
    parser.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar="FLAGS",
        help="flags of pretrain_gpt2, and --data-parallel-size N; the other layouts are compared with the first one. "
        "Without --nproc-per-node and --data-parallel-size a layout takes --tensor-model-parallel-size ranks",
    )
    parser.add_argument(
        "--steps",
        type=positive_int,
        metavar="N",
        help=f"training steps of each layout (default: {STEPS}, or those of the trace)",
    )
    trace = parser.add_mutually_exclusive_group()
    trace.add_argument(
        "--against",
        metavar="TRACE",
        help="compare all layouts with the trace in this folder, or with a run whose forward pass and gradients are "
        f"those of transformers' GPT-2 ({HUGGINGFACE})",
    )
    trace.add_argument(
        "--save-trace",
        type=Path,
        metavar="FOLDER",
        help="keep the trace of the first layout, for --against on a different machine or with a different version",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the comparison as a page")
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="FOLDER",
        help="folder of the temporary trace: about 16 bytes for each parameter and step, and the activations "
        "(default: the folder of temporary files)",
    )
    end = argv.index("--") if "--" in argv else len(argv)
    words = list(argv[:end])
    for index, word in enumerate(words):
        if word == "--layout" and words[index + 1 :]:  # A layout's flags may look like flags of the program.
            words[index : index + 2] = [f"--layout={words[index + 1]}"]
    options = parser.parse_args(words)
    options.command = list(argv[end + 1 :])
    save = options.save_trace
    require(
        len(options.layout) >= (1 if options.against or save else 2),
        "give at least two layouts to compare, each by --layout FLAGS, or one with --against or --save-trace; "
        '--layout "" is the command line as it is',
    )
    require(
        not (save and save.exists() and any(save.iterdir())), f"--save-trace {save} is not empty: give a new folder"
    )
    return options


def read_layout(common: Sequence[str], flags: str, batch: int | None = None) -> LayoutSpec:
    """Parse a layout: the command line `common`, followed by `flags`. Raises ValueError for bad flags.

    The number of ranks is --nproc-per-node, or tensor × pipeline × --data-parallel-size (default 1).

    batch: the global batch size of the first layout. ValueError is raised if `flags` give a different size.
    """
    launch, rest = parse_launch_flags([*common, *shlex.split(flags)])
    parser = Parser(add_help=False)
    parser.add_argument("--data-parallel-size", type=positive_int)
    try:
        require(
            launch.rank is None and launch.nnodes == 1,
            "all ranks of a layout start on this machine: leave out --rank, --world-size and --nnodes",
        )
        layout_flags, words = parser.parse_known_args(rest)
        words = words if batch is None else ["--global-batch-size", str(batch), *words]
        arguments = parse_run(words)
        if (folder := arguments.checkpoint.load) is not None:
            checkpoint = find_checkpoint(folder, log=lambda line: None, verify=False)
            if checkpoint is None:
                raise ValueError(f"--load {folder} holds no checkpoint")
            check_metadata(checkpoint)
            arguments = merge_checkpoint(
                arguments, checkpoint.metadata["config"], saved_decay_iters(checkpoint.metadata)
            )
        parallel, dp = arguments.config.parallel, layout_flags.data_parallel_size
        mp = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        world_size = mp * (dp or 1)
        if launch.nproc_per_node is not None:
            world_size = launch.nproc_per_node or torch.cuda.device_count() or 2
            require(
                dp is None or mp * dp == world_size,
                f"--nproc-per-node {world_size} is not the model-parallel size {mp} × --data-parallel-size {dp}",
            )
        require(world_size % mp == 0, f"--nproc-per-node {world_size} is not divisible by the model-parallel size {mp}")
        samples = arguments.config.build_batch_schedule(world_size).final
    except ValueError as error:
        raise ValueError(f"--layout {flags!r}: {error}") from error
    require(
        batch in (None, samples),
        f"--layout {flags!r}: its --global-batch-size is {samples}, and that of the first layout "
        f"{batch}: a step must take the same samples in each",
    )
    return LayoutSpec(flags or "(no flags)", tuple(words), world_size, samples)


@dataclass(frozen=True)
class RankTask:
    """The work of each rank of a run.

    trace: the folder of the trace, which is written if `records` is True, and otherwise read.
    out: a folder for the ranks' reports and --save.
    steps: training steps.
    by_transformers: let transformers compute the forward pass and the gradients.
    """

    trace: Path
    out: Path
    steps: int
    records: bool = False
    by_transformers: bool = False


class RankReport(NamedTuple):
    """A rank's result, sent as JSON.

    metadata: see `run_metadata`.
    findings: the findings of its `TraceWriter` or `TraceComparer`.
    """

    metadata: dict[str, Any]
    findings: list[Any]


def run_layout(layout: LayoutSpec, task: RankTask) -> list[RankReport]:
    """Run the task on all ranks of a layout, and return their reports. If a rank fails, verify ends with the rank's
    exit code."""
    task.out.mkdir(parents=True, exist_ok=True)
    launch = Launch(world_size=layout.world_size, local=(0, layout.world_size), ranks_to_start=layout.world_size)
    if code := start_ranks(functools.partial(run_program, functools.partial(run_task, task)), layout.words, launch):
        sys.exit(code)
    texts = [(task.out / f"rank_{rank}.json").read_text(encoding="utf-8") for rank in range(layout.world_size)]
    return [RankReport(*json.loads(text)) for text in texts]


def run_task(task: RankTask, argv: Sequence[str], rank_info: RankInfo, log: Log) -> None:
    """Build the run of the command line `argv` and execute the task. The run writes nothing to the user's folders.

    Raises ValueError for bad flags, or if the run has too few steps left."""

    def warn(line: str) -> None:
        if line.startswith("WARNING"):
            log(line)

    with contextlib.redirect_stdout(sys.stderr):
        devices.set_threads(rank_info)
        arguments = parse_run(argv)
        outside = (*IGNORED_FLAGS, "parallel.exact_layouts") if task.by_transformers else IGNORED_FLAGS
        values = {key: value for key, value in arguments.values.items() if key not in outside}
        values |= {"checkpoint.save": str(task.out / "save"), "train.eval_iters": 0}
        context = build_context(dataclasses.replace(arguments, values=values), rank_info, warn)
        left = context.train_iters - context.resume_metadata.get("iteration", 0)
        require(
            task.steps <= left,
            f"--steps {task.steps}: the run has {max(left, 0)} iterations to go: give a greater "
            "--train-iters or fewer steps",
        )
        trainer = build_trainer(context, warn)
        try:
            report = json.dumps(capture_steps(trainer, task), default=np.ndarray.tolist)
            (task.out / f"rank_{rank_info.rank}.json").write_text(report, encoding="utf-8")
        finally:
            trainer.close()


def capture_steps(trainer: Trainer, task: RankTask) -> RankReport:
    """Run the steps of the task, and record or compare this rank's tensors."""
    own = run_metadata(trainer, task.steps)
    if task.records:
        take: TraceWriter | TraceComparer = TraceWriter(task.trace)
    else:
        trace = TensorTrace(task.trace)
        check_same_run(trace.metadata, own)
        take = TraceComparer(trace, own, trainer.parallel.rank)
    trainer.state.model.train()
    (TransformersCapture if task.by_transformers else Capture)(trainer, take).steps(task.steps)
    return RankReport(own, take.findings)


def run_metadata(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Return the run's metadata for its trace: settings that must be equal in a comparison, and the environment."""
    context, parallel = trainer.context, trainer.parallel
    return {
        "config": context.config.as_dict(),
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "global_batch_size": context.global_batch_size,
        "micro_batches": context.num_microbatches,
        "iteration": trainer.progress.iteration,
        "steps": steps,
        "data_fingerprint": context.splits.fingerprint,
        "tokenizer": context.tokenizer.fingerprint,
        "precision": devices.PRECISIONS[context.dtype],
        "device": context.device.type,
    }


def check_same_run(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the difference, unless a run with the metadata `current` can be compared with a
    trace with the metadata `recorded`."""
    recorded_flags, flags = flatten_sections(recorded["config"]), flatten_sections(current["config"])
    model_flags = [key for key in flags if key.startswith("model.") and key != "model.make_vocab_size_divisible_by"]
    for name, recorded_value, value in (
        *(
            (flag_name(key), recorded_flags.get(key, flags[key]), flags[key])
            for key in (*model_flags, "data.seq_length", "train.seed")
        ),
        *((words, recorded.get(key), current[key]) for key, words in SAME_METADATA.items()),
    ):
        require(
            recorded_value == value,
            f"the trace is of a different run: {name} is {recorded_value} in the trace and {value} here",
        )
    require(current["steps"] <= recorded["steps"], f"--steps {current['steps']}: the trace has {recorded['steps']}")


def compare_layouts(options: argparse.Namespace, scratch: Path) -> tuple[str, TensorTrace, list[LayoutResult]]:
    """Run the layouts, and compare each layout with the reference. Return a description of the reference, its trace,
    and the results. The trace may be in the folder `scratch`."""
    first = read_layout(options.command, options.layout[0])
    layouts = [read_layout(options.command, flags, first.batch) for flags in options.layout]
    by_transformers = options.against == HUGGINGFACE
    if options.against and not by_transformers:
        reference, trace = f"the trace {options.against}", TensorTrace(Path(options.against))
    else:
        reference, folder = f"the layout {first.name}", options.save_trace or scratch / "trace"
        if by_transformers:
            plain = "--micro-batch-size 1 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"
            reference, first = "transformers' GPT-2", read_layout(first.words, plain, first.batch)
        else:
            layouts = layouts[1:]
        recorded = run_layout(
            first, RankTask(folder, scratch / "reference", options.steps or STEPS, True, by_transformers)
        )
        write_index(folder, recorded[0].metadata, [report.findings for report in recorded])
        trace = TensorTrace(folder)
    results = []
    for number, layout in enumerate(layouts):
        task = RankTask(trace.folder, scratch / f"layout_{number}", options.steps or trace.metadata["steps"])
        compared = run_layout(layout, task)
        comparison = Comparison([report.findings for report in compared], trace)
        results.append(LayoutResult(layout, compared[0].metadata, comparison))
    return reference, trace, results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
    configure_output(line_buffering=True)
    options = parse_options(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory(prefix="verify_", dir=options.scratch) as scratch:
        reference, trace, results = compare_layouts(options, Path(scratch))
    lines = reference_lines(reference, trace)
    print("\n".join(lines))
    if results:
        print("", *comparison_table(results), sep="\n")
    differing = [result for result in results if result.comparison.mismatches]
    for result in differing:
        print("", *explain_mismatch(result), sep="\n")
    if options.save_trace:
        print(f"the trace is in {options.save_trace}: --against {options.save_trace} compares with it")
    if options.html:
        atomic_write_text(options.html, render_html(lines, shlex.join(options.command), results))
        print(f"the page is {options.html}")
    return 1 if differing else 0
