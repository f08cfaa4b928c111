"""A stage over all its shards: the flags that every stage has, processes or a cluster, and the closing report.

`--executor` runs the shards as a step of datatrove, which has executors for this machine, for Slurm and for Ray.
datatrove's own marks of completed ranks say nothing about the input: they are not used. A rank that runs again finds
the manifests of its shards and has nothing to do.
"""

import argparse
import contextlib
import functools
import inspect
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_utils.command_line import ROOT, Parser, progress_bar
from data_utils.corpora import COMPRESSED_SUFFIXES, JSON_SUFFIXES, MOST_BAD_LINES, TEXT_SUFFIX
from data_utils.files import file_lock
from data_utils.worker_processes import by_processes, count_work
from megatron.gpt2.extensions.webtext.shards import UNREADABLE, Shard, Stage, find_shards, run_shard, whole

FILE_SUFFIXES = (*JSON_SUFFIXES, TEXT_SUFFIX, *COMPRESSED_SUFFIXES)  # of a name that nobody gives to a folder

POSITIONAL: dict[str, dict[str, Any]] = {
    "groups": {"type": Path, "help": "the file groups.jsonl that group_duplicate_url.py made of this INPUT"},
    "input": {
        "help": "a file, a folder or a glob in quotes: JSON lines with a text each, or .txt files; .gz and .zst as well"
    },
    "output": {
        "type": Path,
        "help": "the folder to write, or one file, by a name that ends in .json or .jsonl; begun again, the same "
        "command goes on where it was",
    },
}

Manifest = dict[str, Any]


def number(kind: type, least: float, most: float, words: str) -> Callable[[str], Any]:
    """argparse's type of a number from `least` to `most`; `words` say what the number must be."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"{text} is not {words}")

    return parse


positive = number(int, 1, float("inf"), "a whole number above 0")
fraction = number(float, 0, 1, "between 0 and 1")


def stage_parser(program: Callable[..., object], positional: Sequence[str] = ("input", "output")) -> Parser:
    """A parser with the docstring of `program`, these arguments and the flags that every stage has."""
    parser = Parser(description=inspect.getdoc(program))
    for name in positional:
        parser.add_argument(name, metavar=name.upper(), **POSITIONAL[name])
    add_number(parser, "--limit", None, "only the first N documents or addresses")
    add_number(parser, "--workers", os.cpu_count() or 1, "processes, each at a shard of its own")
    parser.add_argument(
        "--text-key", default="text", metavar="KEY", help="the JSON field with the text (default: text)"
    )
    add_number(
        parser, "--max-bad-fraction", MOST_BAD_LINES, "more unreadable documents than this are an error", fraction
    )
    cluster = parser.add_argument_group("on a cluster, by datatrove")
    cluster.add_argument(
        "--executor", choices=("local", "slurm", "ray"), help="default: processes of this machine, without datatrove"
    )
    add_number(cluster, "--tasks", 1, "among which the shards are divided")
    cluster.add_argument("--slurm-time", default="24:00:00", metavar="TIME", help="default: %(default)s")
    cluster.add_argument("--slurm-partition", metavar="NAME")
    return parser


def add_number(
    parser: argparse._ActionsContainer, flag: str, default: float | None, words: str, kind: Any = positive
) -> None:
    """A flag that takes a number."""
    shown = "" if default is None else " (default: %(default)s)"
    parser.add_argument(flag, type=kind, default=default, metavar="N", help=words + shown)


def log(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def run_stage(
    stage: Stage,
    shards: Sequence[Shard] | None = None,
    *,
    alone: bool = True,
    one_file: tuple[str, ...] = JSON_SUFFIXES,
) -> list[Manifest]:
    """Run `stage` over `shards`, or over the documents of INPUT. Returns the manifests of all shards, in order; none if
    the shards were handed to Slurm.

    alone: OUTPUT may hold nothing else. one_file: the suffixes of an OUTPUT that is one file. ValueError names a flag,
    or says why the result is not good enough to go on with.
    """
    args, output = stage.args, stage.args.output
    if args.executor and args.limit:
        raise ValueError("--executor divides the shards, --limit takes them one after the other: leave one away")
    if args.executor == "slurm" and not args.slurm_partition:
        raise ValueError("--executor slurm needs --slurm-partition")
    shards = find_shards(args.input) if shards is None else shards
    folder = shards_beside(output)
    if folder != output:
        if not output.name.endswith(one_file):
            endings = f", or a file whose name ends in {' or '.join(one_file)}" if one_file else ""
            raise ValueError(f"{output}: this stage writes a folder{endings}")
        if any(output.resolve() == path.resolve() for shard in shards for path in shard.files):
            raise ValueError(f"{output} is a file of the input: name it otherwise")
    stage.manifest(args.limit)  # names a library that is missing before anything else
    try:
        if args.executor:
            run_by_datatrove(stage, shards, folder)
        if args.executor == "slurm":
            log(
                f"{stage.name}: handed to Slurm. When it is done, the same command without --executor reports, and "
                "does what is lacking"
            )
            return []
        manifests = run_here(stage, shards, folder, alone)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on where it was", file=sys.stderr)
        sys.exit(130)
    for line in report(stage.name, manifests):
        log(line)
    check(manifests, args.max_bad_fraction)
    if folder != output:
        with whole(output) as together:
            for name in (entry["name"] for manifest in manifests for entry in manifest["outputs"]):
                with open(folder / name, "rb") as part:
                    shutil.copyfileobj(part, together, 1 << 20)
        shutil.rmtree(folder)
    return manifests


def shards_beside(output: Path) -> Path:
    """The folder of the shards: `output`, or a folder beside an `output` that is one file."""
    is_file = output.name.endswith(FILE_SUFFIXES) and not output.is_dir()
    return output.with_name(f"{output.name}.shards") if is_file else output


def run_here(stage: Stage, shards: Sequence[Shard], output: Path, alone: bool) -> list[Manifest]:
    """The manifests of the shards, made by processes of this machine; with a limit one shard after the other until it
    is reached. ValueError if `output` is for these shards `alone` and holds another file."""
    limit, workers = stage.args.limit, stage.args.workers
    output.mkdir(parents=True, exist_ok=True)
    bar = progress_bar(
        total=sum(shard.bytes for shard in shards), unit="B", unit_scale=True, desc=stage.name, leave=False
    )
    with bar, file_lock(output / ".lock", lambda: log(f"{output}: another process is writing there: waiting for it")):
        if limit is None and workers > 1 and len(shards) > 1:
            work = functools.partial(run_shard, stage, output=output, read=count_work)
            manifests = by_processes(work, [(shard,) for shard in shards], workers=workers, progress=bar.update)
        else:
            manifests = []
            for shard in shards:
                left = None if limit is None else limit - total(manifests, "entered")
                if left != 0:
                    manifests.append(run_shard(stage, shard, output, left, bar.update))
        named = {entry["name"] for manifest in manifests for entry in manifest["outputs"]}
        for path in sorted(output.iterdir()):
            if alone and path.is_file() and not path.name.startswith(".") and path.name not in named:
                raise ValueError(f"{path} is not of this run: remove it, lest the next stage read it")
    return manifests


def check(manifests: Sequence[Manifest], max_bad_fraction: float) -> None:
    """ValueError if a stage's result is not good enough to go on with."""
    entered = total(manifests, "entered")
    if not entered:
        raise ValueError("the input holds nothing: name files that do")
    unreadable = [manifest["dropped"][UNREADABLE] for manifest in manifests if UNREADABLE in manifest["dropped"]]
    bad = sum(entry["count"] for entry in unreadable)
    if bad > max_bad_fraction * entered:
        raise ValueError(
            f"{unreadable[0]['samples'][0]}; {bad} of {entered} entries are unreadable, more than "
            f"--max-bad-fraction {max_bad_fraction:g}: fix the files, name the field of the text with --text-key, "
            "or allow more"
        )
    if not total(manifests, "left"):
        raise ValueError(f"all of {entered} entries were dropped and nothing is left: see the reasons above")


def total(manifests: Sequence[Manifest], key: str) -> int:
    """The sum of one count over all manifests."""
    return sum(manifest[key] for manifest in manifests)


def report(name: str, manifests: Sequence[Manifest]) -> Iterator[str]:
    """The counts of a stage, and a table of what it dropped: reason, count, share of the input, a sample."""
    entered, left = total(manifests, "entered"), total(manifests, "left")
    kept = f" ({left / entered:.1%})" if entered else ""
    size = sum(entry["bytes"] for manifest in manifests for entry in manifest["outputs"])
    shards = f"{len(manifests)} shard{'s' * (len(manifests) != 1)}"
    yield f"{name}: {entered:,} in, {left:,} out{kept}; {shards}, {size / 1e6:,.1f} MB"
    reasons: dict[str, tuple[int, str]] = {}
    for manifest in manifests:
        for reason, entry in manifest["dropped"].items():
            count, sample = reasons.get(reason, (0, entry["samples"][0]))
            reasons[reason] = count + entry["count"], sample
    if reasons:
        width = max(map(len, reasons))
        yield f"  {'dropped':<{width}}  {'count':>10}  {'share':>6}  for example"
        for reason, (count, sample) in sorted(reasons.items(), key=lambda item: (-item[1][0], item[0])):
            yield f"  {reason:<{width}}  {count:>10,}  {count / entered:>6.1%}  {sample}"


class ShardStep:
    """A pipeline of this one step: rank r of w does the shards r, r + w, r + 2w, …"""

    def __init__(self, stage: Stage, shards: Sequence[Shard], output: Path) -> None:
        self.stage, self.shards, self.output = stage, shards, output

    def __repr__(self) -> str:
        return f"{self.stage.name} of {len(self.shards)} shards"

    def __call__(self, data: object, rank: int = 0, world_size: int = 1) -> None:
        for shard in self.shards[rank::world_size]:
            run_shard(self.stage, shard, self.output)


def run_by_datatrove(stage: Stage, shards: Sequence[Shard], output: Path) -> None:
    """Run the shards as --tasks tasks by datatrove's executor --executor, or hand them to Slurm. ValueError if datatrove
    or Ray is not installed."""
    args = stage.args
    # A process that starts elsewhere finds this very interpreter and this very project.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    path = f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={os.environ['PYTHONPATH']}"
    options: dict[str, dict[str, Any]] = {
        "Local": {"workers": args.workers},
        "Slurm": {
            "time": args.slurm_time,
            "partition": args.slurm_partition,
            "job_name": stage.name.split(",")[0],
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
            [ShardStep(stage, list(shards), output)],
            tasks=min(args.tasks, len(shards)),
            logging_dir=f"{output}/.datatrove",
            skip_completed=False,
            **options[kind],
        ).run()
    except ImportError as error:
        more = " ray" if error.name == "ray" else ""
        raise ValueError(
            f"--executor {args.executor} needs {error.name}: python -m pip install -c constraints.txt -e "
            f"'.[curate]'{more}"
        ) from None
