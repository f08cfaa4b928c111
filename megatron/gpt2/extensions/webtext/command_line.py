"""What the programs of tools/openwebtext/ share: the flags of every stage, and how a stage ends."""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from data_utils.command_line import Parser, program
from data_utils.corpora.documents import COMPRESSED_SUFFIXES, JSON_SUFFIXES, MOST_BAD_LINES, TEXT_SUFFIX
from data_utils.files import replacing
from megatron.gpt2.extensions.webtext.documents import Shard, document_shards
from megatron.gpt2.extensions.webtext.shard_run import Stage, temporary
from megatron.gpt2.extensions.webtext.stages import EXECUTORS, launch, run_stage

FILE_SUFFIXES = (*JSON_SUFFIXES, TEXT_SUFFIX, *COMPRESSED_SUFFIXES)  # of a name that nobody gives to a folder


def add_common(parser: argparse.ArgumentParser) -> None:
    """The flags that every stage has."""
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N documents or addresses")
    parser.add_argument(
        "--workers",
        type=positive,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes, each at a shard of its own (default: %(default)s, the processors)",
    )
    parser.add_argument(
        "--text-key", default="text", metavar="KEY", help="the JSON field that holds the text (default: text)"
    )
    parser.add_argument(
        "--max-bad-fraction",
        type=float,
        default=MOST_BAD_LINES,
        metavar="F",
        help="more unreadable documents than this are an error (default: %(default)s)",
    )
    cluster = parser.add_argument_group("on a cluster, by datatrove")
    cluster.add_argument("--executor", choices=EXECUTORS, help="default: processes of this machine, without datatrove")
    cluster.add_argument("--tasks", type=positive, default=1, metavar="N", help="among which the shards are divided")
    cluster.add_argument("--slurm-time", default="24:00:00", metavar="TIME", help="default: %(default)s")
    cluster.add_argument("--slurm-partition", metavar="NAME")


def stage_parser(description: str | None) -> Parser:
    """A parser with INPUT, OUTPUT and the common flags."""
    parser = Parser(description=description)
    parser.add_argument(
        "input",
        metavar="INPUT",
        help="a file, a folder or a glob in quotes: JSON lines with a text each, or .txt files; .gz and .zst as well",
    )
    add_output(parser)
    add_common(parser)
    return parser


def add_output(parser: argparse.ArgumentParser) -> None:
    """The argument OUTPUT."""
    parser.add_argument(
        "output",
        metavar="OUTPUT",
        type=Path,
        help="the folder to write, or one file, by a name "
        "that ends in .json or .jsonl; begun again, the same command goes on where it was",
    )


def positive(text: str) -> int:
    """argparse's type of a whole number above 0; ArgumentTypeError otherwise."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return value


def log(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def run(
    args: argparse.Namespace,
    stage: Stage,
    shards: Sequence[Shard] | None = None,
    *,
    alone: bool = True,
    one_file: tuple[str, ...] = JSON_SUFFIXES,
) -> list[dict[str, Any]]:
    """Run `stage` over `shards`, or over the documents of INPUT, with the common flags. Returns every shard's manifest;
    none where the shards were handed to Slurm.

    alone: OUTPUT may hold nothing else. one_file: the suffixes of an OUTPUT that is one file. ValueError names a flag.
    """
    if not 0 <= args.max_bad_fraction <= 1:
        raise ValueError(f"--max-bad-fraction {args.max_bad_fraction:g} is not between 0 and 1")
    if args.executor and args.limit:
        raise ValueError("--executor divides the shards, --limit takes them one after the other: leave one away")
    if args.executor == "slurm" and not args.slurm_partition:
        raise ValueError("--executor slurm needs --slurm-partition")
    shards = document_shards([args.input]) if shards is None else shards
    output, folder = args.output, shards_beside(args.output)
    if folder != output:
        if not output.name.endswith(one_file):
            raise ValueError(
                f"{output}: this stage writes a folder"
                + (f", or a file whose name ends in {' or '.join(one_file)}" if one_file else "")
            )
        if any(output.resolve() == path.resolve() for shard in shards for path in shard.files):
            raise ValueError(f"{output} is a file of the input: name it otherwise")
    if args.executor:
        launch(
            args.executor,
            stage,
            shards,
            folder,
            tasks=args.tasks,
            workers=args.workers,
            slurm=(args.slurm_time, args.slurm_partition or ""),
        )
    if args.executor == "slurm":
        log(
            f"{stage.name}: handed to Slurm. When it is done, the same command without --executor reports, and does "
            "what is lacking"
        )
        return []
    manifests = run_stage(
        stage,
        shards,
        folder,
        limit=args.limit,
        workers=args.workers,
        max_bad_fraction=args.max_bad_fraction,
        alone=alone,
        log=log,
    )
    if folder != output:
        with replacing(output, temporary(output)) as whole:
            for name in (entry["name"] for manifest in manifests for entry in manifest["outputs"]):
                with open(folder / name, "rb") as part:
                    shutil.copyfileobj(part, whole, 1 << 20)
        shutil.rmtree(folder)
    return manifests


def shards_beside(output: Path) -> Path:
    """The folder in which the shards of an OUTPUT that is one file are made."""
    return (
        output
        if output.is_dir() or not output.name.endswith(FILE_SUFFIXES)
        else output.with_name(f"{output.name}.shards")
    )


def stage_program(main: Callable[[], None]) -> Callable[[], NoReturn]:
    """`main` as a program of its own, which exits: with 0, or with 2 and one line where the input, a flag or the disk
    is at fault."""

    def cli() -> NoReturn:
        try:
            program(main)()
        except KeyboardInterrupt:
            print("interrupted: the same command goes on where it was", file=sys.stderr)
            sys.exit(130)

    return cli
