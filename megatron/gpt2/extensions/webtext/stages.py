"""A stage over all its shards: in several processes, with a progress bar, and a closing report of what it dropped.

`launch` runs the shards as a step of datatrove instead, which has executors for this machine, for Slurm and for Ray.
datatrove keeps marks of its own of the ranks that it completed, which know nothing of the input: they are not used.
A rank that runs again finds the manifests of its shards and has nothing to do.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_utils.command_line import ROOT, progress_bar
from data_utils.corpora.documents import MANIFESTS, MOST_BAD_LINES, Log
from data_utils.files import file_lock
from data_utils.worker_processes import by_processes, count_work
from megatron.gpt2.extensions.webtext.documents import Shard
from megatron.gpt2.extensions.webtext.shard_run import Stage, run_shard

UNREADABLE = "unreadable"
EXECUTORS = ("local", "slurm", "ray")


def run_stage(
    stage: Stage,
    shards: Sequence[Shard],
    output: Path,
    *,
    limit: int | None = None,
    workers: int = 1,
    max_bad_fraction: float = MOST_BAD_LINES,
    alone: bool = True,
    log: Log,
) -> list[dict[str, Any]]:
    """Every shard's manifest, in order; `log` gets the lines of the closing report.

    ValueError where nothing came in or nothing went out, where too much was unreadable, and where `output`, if it is
    to be read as a whole and so for these shards `alone`, holds something else. With a limit the shards are done one
    after the other until it is reached.
    """
    stage.recorded(limit)  # names a library that is missing before anything else
    output.mkdir(parents=True, exist_ok=True)
    with file_lock(output / ".lock", lambda: log(f"{output}: another process is writing there: waiting for it")):
        strangers = {path.stem for path in (output / MANIFESTS).glob("*.json")} - {shard.name for shard in shards}
        if strangers and alone and limit is None:
            raise ValueError(
                f"{output} holds {min(strangers)}, which is not in the input now: delete the folder, or name another"
            )
        size = sum(shard.bytes for shard in shards)
        with progress_bar(total=size, unit="B", unit_scale=True, desc=stage.name, leave=False) as bar:
            if limit is None and workers > 1 and len(shards) > 1:
                manifests = by_processes(
                    _work, [(stage, shard, output) for shard in shards], workers=workers, counted=1, progress=bar.update
                )
            else:
                manifests = []
                for shard in shards:
                    left = None if limit is None else limit - total(manifests, "entered")
                    if left is None or left > 0:
                        manifests.append(run_shard(stage, shard, output, left, bar.update))
        named = {entry["name"] for manifest in manifests for entry in manifest["outputs"]}
        for path in sorted(output.iterdir()):
            if alone and path.is_file() and not path.name.startswith(".") and path.name not in named:
                raise ValueError(f"{path} is not of this run: remove it, lest the next stage read it")
    for line in report(stage.name, manifests):
        log(line)
    check(manifests, max_bad_fraction)
    return manifests


def check(manifests: Sequence[dict[str, Any]], max_bad_fraction: float) -> None:
    """ValueError where a stage's result is no good to go on with."""
    entered, left = total(manifests, "entered"), total(manifests, "left")
    if not entered:
        raise ValueError("the input holds nothing: name files that do")
    unreadable = [manifest["dropped"][UNREADABLE] for manifest in manifests if UNREADABLE in manifest["dropped"]]
    bad = sum(entry["count"] for entry in unreadable)
    if bad > max_bad_fraction * entered:
        raise ValueError(
            f"{unreadable[0]['samples'][0]}; {bad} of {entered} entries are unreadable, more than "
            f"--max-bad-fraction {max_bad_fraction:g}: mend the files, or allow more"
        )
    if not left:
        raise ValueError(f"all of {entered} entries were dropped and nothing is left: see the reasons above")


def total(manifests: Sequence[dict[str, Any]], key: str) -> int:
    """The sum of one count over all manifests."""
    return sum(manifest[key] for manifest in manifests)


def report(name: str, manifests: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What a stage did, and a table of what it dropped: reason, count, share of the input, a sample."""
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
        width = max(len(reason) for reason in reasons)
        yield f"  {'dropped':<{width}}  {'count':>10}  {'share':>6}  for example"
        for reason, (count, sample) in sorted(reasons.items(), key=lambda item: (-item[1][0], item[0])):
            yield f"  {reason:<{width}}  {count:>10,}  {count / entered:>6.1%}  {sample}"


def _work(stage: Stage, shard: Shard, output: Path) -> dict[str, Any]:
    """A shard in a worker process."""
    unseen = 0

    def read(size: int) -> None:  # a lock for every line would cost more than the line
        nonlocal unseen
        unseen += size
        if unseen > 1 << 20:
            count_work(unseen)
            unseen = 0

    try:
        return run_shard(stage, shard, output, read=read)
    finally:
        count_work(unseen)


@dataclass(frozen=True, repr=False)
class ShardStep:
    """A pipeline of this one step: rank r of w does the shards r, r + w, r + 2w, …"""

    stage: Stage
    shards: Sequence[Shard]
    output: Path

    def __repr__(self) -> str:
        return f"{self.stage.name} of {len(self.shards)} shards"

    def __call__(self, data: Iterable[Any] | None, rank: int = 0, world_size: int = 1) -> None:
        for shard in self.shards[rank::world_size]:
            run_shard(self.stage, shard, self.output)


def launch(
    executor: str,
    stage: Stage,
    shards: Sequence[Shard],
    output: Path,
    *,
    tasks: int,
    workers: int,
    slurm: Sequence[str],
) -> None:
    """Run the shards as `tasks` tasks, on this machine `workers` at once, or hand them to Slurm: `slurm` holds the time
    and the partition.

    ValueError where datatrove or Ray is not installed. A step's own error is whatever datatrove makes of it.
    """
    step, logs = ShardStep(stage, list(shards), output), str(output / ".datatrove")
    common: dict[str, Any] = {"tasks": min(tasks, len(shards)), "logging_dir": logs, "skip_completed": False}
    # What starts elsewhere finds this very interpreter and this very project.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        if executor == "local":
            from datatrove.executor import LocalPipelineExecutor

            LocalPipelineExecutor([step], workers=workers, **common).run()
        elif executor == "ray":
            import ray  # noqa: F401
            from datatrove.executor import RayPipelineExecutor

            RayPipelineExecutor([step], **common).run()
        else:
            from datatrove.executor import SlurmPipelineExecutor

            time, partition = slurm
            path = f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={os.environ['PYTHONPATH']}"
            SlurmPipelineExecutor(
                [step],
                time=time,
                partition=partition,
                job_name=stage.name.split(",")[0],
                env_command=path,
                slurm_logs_folder=f"{logs}/slurm",
                qos="",
                **common,
            ).run()
    except ImportError as error:
        raise ValueError(
            f"--executor {executor} needs {error.name}: python -m pip install -c constraints.txt -e "
            "'.[curate]'" + (" ray" if error.name == "ray" else "")
        ) from None
