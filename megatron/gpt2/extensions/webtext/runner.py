"""Run a step on all its inputs: the flags of every step, processes or a cluster, and the final report.

`--executor` processes the inputs with datatrove, which has executors for this machine, for Slurm and for Ray.
datatrove's record of completed ranks is not used, because the record does not depend on the content of the inputs. A
datatrove rank that runs again skips each input that has a manifest.
"""

import argparse
import functools
import inspect
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data_utils.command_line import (
    ROOT,
    Parser,
    align_columns,
    bounded_float,
    configure_output,
    missing_package,
    plural,
    positive_int,
    progress_bar,
)
from data_utils.corpora import COMPRESSED_SUFFIXES, JSON_SUFFIXES, MAX_BAD_FRACTION, TEXT_SUFFIX, check_bad_lines
from data_utils.files import file_lock
from data_utils.shards import Manifest, map_in_processes
from megatron.gpt2.extensions.webtext.step import (
    UNREADABLE,
    StepInput,
    WebtextStep,
    atomic_file,
    find_inputs,
    process_input,
)

FILE_SUFFIXES = (*JSON_SUFFIXES, TEXT_SUFFIX, *COMPRESSED_SUFFIXES)  # An output with another suffix is a folder.

POSITIONAL: dict[str, dict[str, Any]] = {
    "groups": {"type": Path, "help": "the file groups.jsonl that group_duplicate_url.py wrote for this INPUT"},
    "input": {
        "help": "a file, a folder or a quoted glob: JSON lines with a text each, or .txt files, also as .gz and .zst"
    },
    "output": {
        "type": Path,
        "help": "the folder to write, or one file whose name ends in .json or .jsonl; the same command continues an "
        "interrupted run",
    },
}


def step_parser(program: Callable[..., object], positional: Sequence[str] = ("input", "output")) -> Parser:
    """Make a parser with the docstring of `program`, the positional arguments, and the flags of every step."""
    configure_output(line_buffering=True)
    parser = Parser(description=inspect.getdoc(program))
    parser.set_defaults(step=program.__name__)
    for name in positional:
        parser.add_argument(name, metavar=name.upper(), **POSITIONAL[name])
    add_number(parser, "--limit", None, "only the first N documents or URLs")
    add_number(parser, "--workers", os.cpu_count() or 1, "processes, each with a separate input file")
    parser.add_argument(
        "--text-key", default="text", metavar="KEY", help="the JSON field with the text (default: text)"
    )
    words = "fail if more of the documents are unreadable"
    add_number(parser, "--max-bad-fraction", MAX_BAD_FRACTION, words, bounded_float(0, 1))
    cluster = parser.add_argument_group("on a cluster, with datatrove")
    cluster.add_argument(
        "--executor", choices=("local", "slurm", "ray"), help="default: processes on this machine, without datatrove"
    )
    add_number(cluster, "--tasks", 1, "tasks that share the input files")
    cluster.add_argument("--slurm-time", default="24:00:00", metavar="TIME", help="default: %(default)s")
    cluster.add_argument("--slurm-partition", metavar="NAME")
    return parser


def add_number(
    parser: argparse._ActionsContainer, flag: str, default: float | None, words: str, kind: Any = positive_int
) -> None:
    """Add a flag that takes a number."""
    shown = "" if default is None else " (default: %(default)s)"
    parser.add_argument(flag, type=kind, default=default, metavar="N", help=words + shown)


def run_step(
    step: WebtextStep, sources: Sequence[StepInput] | None = None, *, one_file: tuple[str, ...] = JSON_SUFFIXES
) -> list[Manifest]:
    """Run `step` on `sources` (default: the files that the argument INPUT names). Return the manifests of all inputs,
    in order, or [] if the step was submitted to Slurm.

    one_file: the suffixes of files that the argument OUTPUT may name; without such a suffix OUTPUT is a folder.

    Raises ValueError for a bad flag, or if the next step cannot use the result.
    """
    args, output = step.args, step.args.output
    if args.executor and args.limit:
        raise ValueError("--executor reads files in parallel, --limit one after the other: omit one of them")
    if args.executor == "slurm" and not args.slurm_partition:
        raise ValueError("--executor slurm needs --slurm-partition")
    sources = find_inputs(args.input) if sources is None else sources
    folder = output_folder(output)
    if folder != output:
        if not output.name.endswith(one_file):
            endings = f", or a file whose name ends in {' or '.join(one_file)}" if one_file else ""
            raise ValueError(f"{output}: this step writes a folder{endings}")
        if any(output.resolve() == path.resolve() for source in sources for path in source.files):
            raise ValueError(f"{output} is a file of the input: give a different name")
    step.manifest(args.limit)  # `manifest` raises an error early if a library is missing.
    try:
        if args.executor:
            run_with_datatrove(step, sources, folder)
        if args.executor == "slurm":
            print(
                f"{step.args.step}: submitted to Slurm. When it is done, run the same command without --executor: it "
                "reports, and repeats files that failed"
            )
            return []
        manifests = run_locally(step, sources, folder)
    except KeyboardInterrupt:
        print("interrupted: the same command continues", file=sys.stderr)
        sys.exit(130)
    report_step(step, manifests)
    if folder != output:
        with atomic_file(output) as together:
            for name in (name for manifest in manifests for name in manifest["outputs"]):
                with open(folder / name, "rb") as part:
                    shutil.copyfileobj(part, together, 1 << 20)
        shutil.rmtree(folder)
    return manifests


def output_folder(output: Path) -> Path:
    """Return the folder for the results. If `output` is one file, the folder is `output`.shards, whose files are joined
    at the end."""
    is_file = output.name.endswith(FILE_SUFFIXES) and not output.is_dir()
    return output.with_name(f"{output.name}.shards") if is_file else output


def run_locally(step: WebtextStep, sources: Sequence[StepInput], output: Path) -> list[Manifest]:
    """Process the inputs on this machine and return their manifests. With a limit, the inputs are processed one after
    the other until the limit is reached. Raises ValueError if `output` holds a file of a different run."""
    limit, manifests = step.args.limit, list[Manifest]()
    output.mkdir(parents=True, exist_ok=True)
    bar = progress_bar(
        total=sum(source.bytes for source in sources), unit="B", unit_scale=True, desc=step.args.step, leave=False
    )
    with bar, file_lock(output / ".lock", lambda: print(f"{output}: waiting for another process that writes to it")):
        if limit is None:
            work, items = functools.partial(process_input, step, output=output), [(source,) for source in sources]
            finished = lambda source: bar.update(source.bytes)  # noqa: E731
            manifests = map_in_processes(work, items, workers=step.args.workers, finished=finished)
        else:
            for source in sources:
                if left := limit - total(manifests, "entered"):
                    manifests.append(process_input(step, source, output, left))
        named = {name for manifest in manifests for name in manifest["outputs"]}
        for path in sorted(output.iterdir()):
            if path.is_file() and not path.name.startswith(".") and path.name not in named:
                raise ValueError(f"{path} was not written by this run: remove it, or the next step will read it")
    return manifests


def total(manifests: Sequence[Manifest], key: str) -> int:
    """Return the sum of the count `key` over all manifests."""
    return sum(manifest[key] for manifest in manifests)


def report_step(step: WebtextStep, manifests: Sequence[Manifest]) -> None:
    """Print the counts of a step, and a table of dropped entries: reason, count, share of the input, a sample. Raises
    ValueError if the input was empty, too much was unreadable, or everything was dropped."""
    entered, left = total(manifests, "entered"), total(manifests, "left")
    if not entered:
        raise ValueError("the input is empty: give other files")
    size = sum(part["bytes"] for manifest in manifests for parts in manifest["outputs"].values() for part in parts)
    inputs = plural(len(manifests), "input")
    print(f"{step.args.step}: {entered:,} in, {left:,} out ({left / entered:.1%}); {inputs}, {size / 1e6:,.1f} MB")
    counts, samples = Counter[str](), dict[str, str]()
    for manifest in manifests:
        for reason, entry in manifest["dropped"].items():
            counts[reason] += entry["count"]
            samples.setdefault(reason, entry["samples"][0])
    rows = [(reason, f"{n:,}", f"{n / entered:.1%}", samples[reason]) for reason, n in counts.most_common()]
    for line in align_columns([("dropped", "count", "share", "for example"), *rows], "<>><") if rows else ():
        print(f"  {line}")
    advice = "fix the files, give the field of the text with --text-key, or allow a greater part"
    check_bad_lines(counts[UNREADABLE], entered, step.args.max_bad_fraction, samples.get(UNREADABLE, ""), advice)
    if not left:
        raise ValueError(f"all of {entered} entries were dropped: see the reasons above")


def run_with_datatrove(step: WebtextStep, sources: Sequence[StepInput], output: Path) -> None:
    """Process the inputs in --tasks tasks with datatrove's executor, or submit them to Slurm. Rank r of w processes the
    inputs r, r + w, r + 2w, … Raises ValueError if datatrove or Ray is not installed."""
    args = step.args

    def run_rank(data: object, rank: int, world_size: int) -> None:
        for source in sources[rank::world_size]:
            process_input(step, source, output)

    # A process on another machine must use this interpreter and this project.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    path = f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={os.environ['PYTHONPATH']}"
    options: dict[str, dict[str, Any]] = {
        "Local": {"workers": args.workers},
        "Slurm": {
            "time": args.slurm_time,
            "partition": args.slurm_partition,
            "job_name": step.args.step.partition(",")[0],
            "env_command": path,
            "slurm_logs_folder": f"{output}/.datatrove/slurm",
            "qos": "",
        },
        "Ray": {},
    }
    kind = args.executor.capitalize()
    try:
        if kind == "Ray":
            import ray  # noqa: F401
        from datatrove import executor

        getattr(executor, f"{kind}PipelineExecutor")(
            [run_rank],
            tasks=min(args.tasks, len(sources)),
            logging_dir=f"{output}/.datatrove",
            skip_completed=False,
            **options[kind],
        ).run()
    except ImportError as error:
        extra = "" if error.name == "ray" else "curate"
        raise missing_package(f"--executor {args.executor}", error.name, extra) from None
