"""Is a run the same training in another layout? Run some steps in each layout and compare every layer's output, the
gradients, the moments and the parameters, as tensors of the whole model:

    python tools/verify.py --layout "" --layout "--model-parallel-size 2" --steps 3 -- --model quickstart

The layouts are flags of pretrain_gpt2, and so is what follows the two dashes, which all layouts share. A checkpoint
(--load) and data of your own are among them. docs/how-to/verify.md says how to read the table. Exit codes: 0 where
every run is the same within rounding, 1 where one differs, 2 for bad input.
"""

import argparse
import functools
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from data_utils.command_line import Parser, line_buffered, program
from data_utils.files.atomic import replace_text
from megatron.gpt2.config import require
from megatron.gpt2.dist.run_program import Program, run_program
from megatron.gpt2.dist.spawn import start_ranks
from megatron.gpt2.extensions.verify.huggingface import record_huggingface
from megatron.gpt2.extensions.verify.layouts import Layout, read_layout, with_one_batch
from megatron.gpt2.extensions.verify.page import page
from megatron.gpt2.extensions.verify.rounding import Rounding
from megatron.gpt2.extensions.verify.runs import FACTS, Task, run_task
from megatron.gpt2.extensions.verify.table import Result, explanation, first_line, skipped, table
from megatron.gpt2.extensions.verify.trace import Trace, merge
from megatron.gpt2.extensions.verify.verdict import read_verdict

STEPS = 3
HUGGINGFACE = "huggingface"
Before = Callable[[str], None]


class Failed(Exception):
    """The ranks of a layout have ended with this exit code, and have said why."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags, checked; `command` is what follows "--". ValueError where one cannot be."""
    parser = Parser(prog="verify", description=__doc__)
    parser.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar="FLAGS",
        help="flags of pretrain_gpt2, and "
        "--data-parallel-size N; the first layout is the one with which the others are compared. "
        "Without --nproc-per-node and --data-parallel-size it takes --model-parallel-size ranks",
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
        help="compare all layouts with the trace in this folder, or with "
        f"transformers' GPT-2 of the same weights ({HUGGINGFACE}; one step, without its update)",
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
        help="where the trace lies meanwhile: about 16 bytes "
        "for each parameter and step, and the activations (default: the folder of temporary files)",
    )
    own = list(argv[: argv.index("--")]) if "--" in argv else list(argv)
    for place, word in enumerate(own[:-1]):
        if word == "--layout":  # its value may look like a flag of this program
            own[place : place + 2] = [f"--layout={own[place + 1]}", ""]
    options = parser.parse_args([word for word in own if word])
    options.command = list(argv[len(own) + 1 :])  # behind "--"
    require(options.steps is None or options.steps >= 1, f"--steps must be at least 1, not {options.steps}")
    require(
        not (options.against and options.save_trace),
        "--save-trace keeps the trace of the first layout, which --against does not make: give one of the two",
    )
    alone = options.against or options.save_trace
    require(
        len(options.layout) >= (1 if alone else 2),
        "give at least "
        + ("one --layout FLAGS" if alone else "two layouts to compare, each by --layout FLAGS")
        + '; --layout "" is the '
        "command line as it is",
    )
    if options.against == HUGGINGFACE:
        require(options.steps in (None, 1), "--against huggingface compares one step: leave --steps out")
    if options.save_trace:
        require(
            not options.save_trace.exists() or not any(options.save_trace.iterdir()),
            f"--save-trace {options.save_trace} is not empty: give a new folder",
        )
    return options


def start(layout: Layout, task: Task, does: Callable[..., int], before: Before | None) -> None:
    """Do the task on all ranks of a layout. Failed where they do not end well."""
    Path(task.out).mkdir(parents=True, exist_ok=True)
    rank = functools.partial(on_rank, functools.partial(does, task), before, layout.flags)
    if code := start_ranks(rank, layout.words, layout.launch):
        raise Failed(code)


def on_rank(does: Program, before: Before | None, flags: str, argv: Sequence[str]) -> int:
    """A rank of the layout `flags`."""
    if before is not None:
        before(flags)
    return run_program(does, argv)


def reference(
    options: argparse.Namespace, layouts: Sequence[Layout], folder: Path, before: Before | None
) -> tuple[str, Trace]:
    """What the layouts are compared with, in words and as a trace."""
    if options.against and options.against != HUGGINGFACE:
        return f"the trace {options.against}", Trace(Path(options.against))
    layout, does, name = layouts[0], run_task, f"the layout {layouts[0].name}"
    if options.against:
        whole = "--micro-batch-size 1 --model-parallel-size 1"
        layout, does, name = read_layout(layout.words, whole), record_huggingface, "transformers' GPT-2"
    where = options.save_trace or folder / "trace"
    task = Task(str(where), str(folder / "reference"), 1 if options.against else options.steps or STEPS, records=True)
    start(layout, task, does, before)
    merge(where, layout.world_size, json.loads(Path(task.out, FACTS).read_text(encoding="utf-8")))
    return name, Trace(where)


class Comparison(NamedTuple):
    """What the layouts were compared with, in words and as a trace, whose tensors may be gone; and what came out."""

    reference: str
    trace: Trace
    results: list[Result]


def compare_layouts(options: argparse.Namespace, before: Before | None = None) -> Comparison:
    """Run the layouts, and compare them.

    before: is called with a layout's flags on each of its ranks, before its run is built; at the top level of a module.
    """
    layouts = with_one_batch([read_layout(options.command, flags) for flags in options.layout])
    with tempfile.TemporaryDirectory(prefix="verify_", dir=options.scratch) as folder:
        name, trace = reference(options, layouts, Path(folder), before)
        results = []
        for number, layout in enumerate(layouts if options.against else layouts[1:]):
            steps = options.steps or trace.facts["steps"]
            task = Task(str(trace.folder), str(Path(folder, f"layout_{number}")), steps, records=False)
            start(layout, task, run_task, before)
            facts = json.loads(Path(task.out, FACTS).read_text(encoding="utf-8"))
            verdict = read_verdict(
                Path(task.out), layout.world_size, trace, Rounding(trace, facts), facts["pipeline_parallel_size"]
            )
            results.append(Result(layout, facts, verdict))
    return Comparison(name, trace, results)


def verify(options: argparse.Namespace, before: Before | None = None) -> int:
    """Compare the layouts, print what came out, and write the page. Returns the exit code. before: see
    `compare_layouts`."""
    name, trace, results = compare_layouts(options, before)
    line = first_line(name, trace)
    print("\n".join(filter(None, (line, skipped(trace)))))
    if results:
        print(f"\n{table(results)}")
    for result in results:
        if result.verdict.findings:
            print("\n" + "\n".join(explanation(result)))
    if options.save_trace:
        print(f"the trace is in {options.save_trace}: --against {options.save_trace} compares with it")
    if options.html:
        replace_text(options.html, page(line, shlex.join(options.command), trace, results))
        print(f"the page is {options.html}")
    return 0 if all(result.verdict.is_same for result in results) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    line_buffered()
    try:
        return verify(parse(sys.argv[1:] if argv is None else argv))
    except Failed as error:
        return int(error.args[0])


cli = program(main)

if __name__ == "__main__":
    cli()
