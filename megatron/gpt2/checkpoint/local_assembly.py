"""A local checkpoint is put together when a run starts again: each machine gets what it lacks from the others.

A machine may have been replaced by an empty one, or may have missed the last checkpoint.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.gpt2.checkpoint.local import receive, run_name, send
from megatron.gpt2.checkpoint.manifest import MANIFEST
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.dist.rendezvous import temporary_group


class Held(NamedTuple):
    """What a machine holds of an iteration. digest: of the manifest. files: those of the whole checkpoint, with their
    sizes in bytes. there: which of them the machine has."""

    digest: str
    files: dict[str, int]
    there: list[str]


def assemble(save: str, directory: str, newest: int, ranks: Ranks, log: Callable[[str], None]) -> Path | None:
    """The folder of the local checkpoints of the run of this --save folder, where all machines together hold one that
    is newer than iteration `newest`; then each machine has all of its files. Else None. Every rank calls it, before
    there is a process group; what rank 0 says of the run and of `newest` counts."""
    run = run_name(save)
    own = held(Path(directory) / run) if run and ranks.local_rank == 0 else {}
    said = [(run, newest, own)]
    if ranks.meeting is not None:
        said = [
            (run, newest, {int(number): Held(*one) for number, one in own.items()})
            for run, newest, own in map(
                json.loads, ranks.meeting.gather("local checkpoints", ranks.rank, json.dumps(said[0]))
            )
        ]
    (run, newest, _), everywhere = said[0], [own for _, _, own in said]
    number = newest_whole(everywhere)
    if not run or number is None or number <= newest:
        return None
    folder = Path(directory) / run
    problem = fetch(folder / f"iter_{number:07d}", [one.get(number) for one in everywhere], ranks, log)
    problems = [problem] if ranks.meeting is None else ranks.meeting.gather("local damage", ranks.rank, problem)
    for problem in filter(None, problems):
        log(f"WARNING: the local checkpoint of iteration {number} is left out: {problem}")
        return None
    return folder


def fetch(path: Path, by_rank: Sequence[Held | None], ranks: Ranks, log: Callable[[str], None]) -> str:
    """Get what this machine lacks of a checkpoint, by what the first rank of each machine holds. Returns what is wrong
    with this rank's share of its files, else ""."""
    files = next(one.files for one in by_rank if one is not None)
    hosts = ranks.meeting.hosts if ranks.meeting is not None else {0: ""}
    machines = {host: rank for rank, host in reversed(hosts.items())}.values()  # the first rank of each
    having = {
        file: [rank for rank in machines if (one := by_rank[rank]) is not None and file in one.there] for file in files
    }
    moves = [(file, having[file][0], rank) for file in files for rank in machines if rank not in having[file]]
    if moves:
        began = time.monotonic()
        with temporary_group(ranks) as group:
            if problem := move(path, moves, files, ranks.rank, group):
                return problem
        log(
            f"a local checkpoint lacked {len(moves)} files, which came from other machines in "
            f"{time.monotonic() - began:.1f} s"
        )
    try:
        return Checkpoint(path).damage(ranks.local_rank, ranks.local_world_size)
    except ValueError as error:
        return str(error)


def held(folder: Path) -> dict[int, Held]:
    """What this machine holds, by iteration."""
    found = {}
    for path in folder.glob("iter_*"):
        with contextlib.suppress(ValueError):
            if ".tmp-" in path.name:
                continue
            checkpoint = Checkpoint(path)
            files = {file: info.bytes for file, info in checkpoint.files.items()}
            files |= {file: (path / file).stat().st_size for file in (*checkpoint.tables_read, MANIFEST)}
            there = [
                file for file, size in files.items() if (path / file).is_file() and (path / file).stat().st_size == size
            ]
            found[checkpoint.iteration] = Held(checkpoint.digest, files, there)
    return found


def newest_held(save: str, directory: str, *, alone: bool) -> int:
    """The newest iteration of the run of this --save folder of which this machine holds a local checkpoint; 0 where
    there is none. alone: no other machine can have what is missing. No tensor is read."""
    own = held(Path(directory) / run) if (run := run_name(save)) else {}
    return (newest_whole([own]) if alone else max(own, default=None)) or 0


def newest_whole(everywhere: Sequence[Mapping[int, Held]]) -> int | None:
    """The newest iteration of which all machines together hold every file; None where there is none."""
    for number in sorted({number for one in everywhere for number in one}, reverse=True):
        all_held = [one[number] for one in everywhere if number in one]
        there = {file for one in all_held for file in one.there}
        if len({one.digest for one in all_held}) == 1 and there == all_held[0].files.keys():
            return number
    return None


def move(
    path: Path, moves: Sequence[tuple[str, int, int]], sizes: Mapping[str, int], rank: int, group: ProcessGroup
) -> str:
    """Send files of `path` between ranks: (file, from, to). Returns what is wrong with this rank's disk."""
    sent: list[dist.Work] = []
    problem = ""
    for file, source, destination in moves:
        if rank == source:
            sent += send(path, {file: sizes[file]}, destination, group)
        elif rank == destination:
            problem = receive(path / file, sizes[file], source, group) or problem
    for work in sent:
        work.wait()
    return problem
