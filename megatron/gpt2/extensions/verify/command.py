"""Is a run the same training in another layout? Run some steps in each layout and compare every layer's output, the
gradients, the moments and the parameters, as tensors of the whole model:

    python tools/verify.py --layout "" --layout "--model-parallel-size 2" --steps 3 -- --model quickstart

The layouts are flags of pretrain_gpt2, and so is what follows the two dashes, which all layouts share. A checkpoint
(--load) and data of your own are among them. docs/how-to/verify.md says how to read the table. Exit codes: 0 where
every run is the same within rounding, 1 where one differs, 2 for bad input.
"""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from data_utils.command_line import Parser, line_buffered
from data_utils.files import replace_text
from megatron.gpt2.config import require
from megatron.gpt2.extensions.verify.compare import judge
from megatron.gpt2.extensions.verify.report import Result, explanation, first_lines, page, table
from megatron.gpt2.extensions.verify.runs import Failed, Task, read_layout, reports, with_one_batch
from megatron.gpt2.extensions.verify.trace import Trace, merge

STEPS = 3
HUGGINGFACE = "huggingface"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags, checked; `command` is what follows "--". ValueError where one cannot be."""
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
        help="compare all layouts with the trace in this folder, or with transformers' GPT-2 of the same weights "
        f"({HUGGINGFACE}; one step, without its update)",
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
    given, against, save = len(options.layout), options.against, options.save_trace
    require(options.steps is None or options.steps >= 1, f"--steps must be at least 1, not {options.steps}")
    require(
        not (against and save),
        "--save-trace keeps the trace of the first layout, which --against does not make: give one of the two",
    )
    needed = "one --layout FLAGS" if against or save else "two layouts to compare, each by --layout FLAGS"
    require(
        given >= (1 if against or save else 2),
        f'give at least {needed}; --layout "" is the command line as it is',
    )
    require(
        against != HUGGINGFACE or options.steps in (None, 1),
        "--against huggingface compares one step: leave --steps out",
    )
    require(
        not (save and save.exists() and any(save.iterdir())), f"--save-trace {save} is not empty: give a new folder"
    )
    return options


class Comparison(NamedTuple):
    """What the layouts were compared with, in words and as a trace, whose tensors may be gone; and what came out."""

    reference: str
    trace: Trace
    results: list[Result]


def compare_layouts(options: argparse.Namespace) -> Comparison:
    """Run the layouts, and compare them."""
    first, *others = layouts = with_one_batch([read_layout(options.command, flags) for flags in options.layout])
    with tempfile.TemporaryDirectory(prefix="verify_", dir=options.scratch) as scratch:
        folder, by_transformers = Path(scratch), options.against == HUGGINGFACE
        if options.against and not by_transformers:
            others, reference, trace = layouts, f"the trace {options.against}", Trace(Path(options.against))
        else:
            reference, steps = f"the layout {first.name}", options.steps or STEPS
            if by_transformers:
                others, reference, steps = layouts, "transformers' GPT-2", 1
                first = read_layout(first.words, "--micro-batch-size 1 --model-parallel-size 1")
            where = options.save_trace or folder / "trace"
            merge(where, reports(first, Task(where, folder / "reference", steps, True, by_transformers)))
            trace = Trace(where)
        results = []
        for number, layout in enumerate(others):
            task = Task(trace.folder, folder / f"layout_{number}", options.steps or trace.facts["steps"])
            found = reports(layout, task)
            results.append(Result(layout, found[0]["facts"], judge(found, trace)))
    return Comparison(reference, trace, results)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    line_buffered()
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        reference, trace, results = compare_layouts(options)
    except Failed as error:
        return int(error.args[0])
    lines = first_lines(reference, trace)
    print("\n".join(lines))
    if results:
        print(f"\n{table(results)}")
    differing = [result for result in results if result.verdict.findings]
    for result in differing:
        print("\n" + "\n".join(explanation(result)))
    if options.save_trace:
        print(f"the trace is in {options.save_trace}: --against {options.save_trace} compares with it")
    if options.html:
        replace_text(options.html, page(lines, shlex.join(options.command), trace, results))
        print(f"the page is {options.html}")
    return 1 if differing else 0
