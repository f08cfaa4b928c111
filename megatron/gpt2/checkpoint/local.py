"""Checkpoints near the ranks: every few steps into the memory or onto the disk of each machine (Megatron's local
checkpoints). A run that dies goes on from there and loses some steps instead of some hours.

    <--local-checkpoint-dir>/<run>/iter_0000120/

It is a checkpoint like every other (writer.py), but no file system that all machines share is needed. A machine holds
the files of its own ranks and those of the machine before it, and all tables. So any one machine can be lost.

When a run starts again, `assemble` puts the newest one together: a machine may have been replaced by an empty one, or
may have missed the last checkpoint. Each gets what it lacks from the others, before anything is read.
"""

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from data_utils.files import sync_folder
from megatron.gpt2.checkpoint.folder import Log, iterations
from megatron.gpt2.checkpoint.reader import MANIFEST, Checkpoint, table_path
from megatron.gpt2.checkpoint.writer import Files, manifest_bytes, put_file, unfinished, write_part
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.dist.rendezvous import temporary_group

NAME = "local_checkpoints"  # the file in the --save folder that names the run
KEPT = 2  # checkpoints on each machine: the last one and the one before, while the next is written
AT_ONCE = 64 << 20  # bytes of a message
Move = tuple[str, int, int]  # a file, the rank that sends it, and the one that receives it
T = TypeVar("T")
Held = dict[str, Any]  # of a checkpoint: its "digest", its "files" with their sizes, and which of them are "there"


def run_name(save: str | Path) -> str:
    """The name of this --save folder's run among local checkpoints; "" if it has none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if re.fullmatch(r"[0-9a-f]{1,16}", name := (Path(save) / NAME).read_text(encoding="ascii")):
            return name
    return ""


def on_all(work: Callable[[], T], group: ProcessGroup | None) -> list[T]:
    """The results of `work` of all ranks of `group`, which all call it; None for one rank. OSError on every rank if it
    was raised on one, which the text names."""
    own: tuple[str, Any]
    try:
        own = "", work()
    except OSError as error:
        own = str(error), None
    said: list[tuple[str, Any]] = [own]
    if group is not None:
        said *= group.size()
        dist.all_gather_object(said, own, group=group)
    for rank, (problem, _) in enumerate(said):
        if problem:
            raise OSError(f"rank {rank}: {problem}")
    return [result for _, result in said]


def move(path: Path, moves: Sequence[Move], sizes: Mapping[str, int], rank: int, group: ProcessGroup | None) -> None:
    """Send files of the folder `path`, with their sizes in bytes, between ranks. OSError on every rank if the disk of
    one has no room: nothing is sent then."""

    def make_room() -> None:
        for file, _, to in moves:
            if to == rank:
                (path / file).parent.mkdir(parents=True, exist_ok=True)
                with open(path / file, "wb") as stream:
                    os.posix_fallocate(stream.fileno(), 0, sizes[file])

    def exchange() -> None:
        under_way = []
        for file, source, to in moves:
            if rank in (source, to):
                mapped = torch.from_file(str(path / file), shared=True, size=sizes[file], dtype=torch.uint8)
                for part in mapped.split(AT_ONCE):
                    under_way.append(dist.isend(part, to, group) if rank == source else dist.irecv(part, source, group))
        for work in under_way:
            assert work is not None
            work.wait()

    on_all(make_room, group)
    on_all(exchange, group)


class LocalCheckpoints:
    """Writes the local checkpoints of a run. Every rank has one and calls `save` at the same steps.

    folder: of the run, on this machine. hosts: the machine of each rank. group: of all ranks, gloo; None for one rank.
    attempt: a word that all ranks share and no other start of a run.
    """

    def __init__(
        self, folder: Path, hosts: Sequence[str], rank: int, group: ProcessGroup | None, attempt: str, log: Log
    ) -> None:
        self._folder, self._rank, self._group, self._attempt, self._log = folder, rank, group, attempt, log
        machines = [[other for other, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
        self._is_first = any(ranks[0] == rank for ranks in machines)  # of its machine
        # The rank of the next machine that takes a rank's files. On a machine with fewer ranks one takes several's.
        self._taker = {
            other: after[place % len(after)]
            for own, after in zip(machines, machines[1:] + machines[:1], strict=True)
            for place, other in enumerate(own)
            if own is not after
        }

    def save(self, iteration: int, files: Files, facts: Mapping[str, Any]) -> bool:
        """Write and copy this rank's `files`; whether the checkpoint is there on all machines. facts: what the manifest
        says; those of rank 0 count. A failure costs this checkpoint, and one warning names the first rank that failed.
        """
        final = self._folder / f"iter_{iteration:07d}"
        folder = unfinished(final, self._attempt)
        try:
            own_facts = facts if self._rank == 0 else {}
            parts = on_all(lambda: (write_part(folder, iteration, files, self._rank), own_facts), self._group)
            tables, (facts, *_) = zip(*parts, strict=True)
            listed = [json.loads(table.partition(b"\n")[2]) for table in tables]
            sizes = {file: info["bytes"] for infos in listed for file, info in infos.items()}
            moves = [(file, rank, taker) for rank, taker in self._taker.items() for file in listed[rank]]
            move(folder, moves, sizes, self._rank, self._group)
            on_all(lambda: self._seal(folder, tables, manifest_bytes(iteration, facts, tables)), self._group)
        except OSError as error:
            self._log(f"WARNING: no local checkpoint at iteration {iteration}: {error}")
            if self._is_first:
                shutil.rmtree(folder, ignore_errors=True)
            return False
        if self._is_first:
            folder.rename(final)
            sync_folder(self._folder)
            self._remove_others(final)
        return True

    def _seal(self, folder: Path, tables: Sequence[bytes], manifest: bytes) -> None:
        if self._is_first:
            for rank, table in enumerate(tables):
                put_file(folder / table_path(rank), table)
            put_file(folder / MANIFEST, manifest)

    def remove(self) -> None:
        """Remove all of them: the run has saved where they are no longer needed."""
        if self._is_first:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _remove_others(self, newest: Path) -> None:
        """Leave this checkpoint and KEPT - 1 before it. Later ones are of a course that the run has left. Another rank
        may have begun to write the next one."""
        before = [path for _, path in iterations(self._folder) if path.name < newest.name]
        for path in set(self._folder.glob("iter_*")) - {newest, *before[: KEPT - 1]}:
            if not path.name.endswith(f".tmp-{self._attempt}"):
                shutil.rmtree(path, ignore_errors=True)


def assemble(save: str, directory: str, newest: int, ranks: Ranks, log: Log) -> Path | None:
    """The folder of the local checkpoints of the run of this --save folder, if all machines together hold one that
    is newer than iteration `newest`; then each machine has all of its files. Else None. Every rank calls it, before
    there is a process group; what rank 0 says of the run and of `newest` counts."""
    gather = ranks.meeting.gather if ranks.meeting is not None else lambda name, rank, text: [text]
    run = run_name(save)
    own = held(Path(directory) / run) if run and ranks.local_rank == 0 else {}
    said = [json.loads(text) for text in gather("local checkpoints", ranks.rank, json.dumps([run, newest, own]))]
    (run, newest, _), everywhere = said[0], [one for _, _, one in said]
    number = newest_whole(everywhere)
    if not run or number <= newest:
        return None
    folder = Path(directory) / run
    path, problem = folder / f"iter_{number:07d}", ""
    try:
        _fetch(path, [one.get(str(number)) for one in everywhere], ranks, log)
        problem = Checkpoint(path).damage(ranks.local_rank, ranks.local_world_size)
    except (OSError, ValueError) as error:
        problem = str(error)
    problem = next(filter(None, gather("local damage", ranks.rank, problem)), "")
    if problem:
        log(f"WARNING: the local checkpoint of iteration {number} is left out: {problem}")
    return None if problem else folder


def _fetch(path: Path, by_rank: Sequence[Held | None], ranks: Ranks, log: Log) -> None:
    """Get what this machine lacks of a checkpoint, by what the first rank of each machine holds."""
    files: dict[str, int] = next(one["files"] for one in by_rank if one)
    hosts = ranks.meeting.hosts if ranks.meeting is not None else {0: ""}
    firsts = {host: rank for rank, host in reversed(hosts.items())}.values()  # the first rank of each machine
    moves: list[Move] = []
    for file in files:
        having = [rank for rank in firsts if (one := by_rank[rank]) and file in one["there"]]
        moves += [(file, having[0], rank) for rank in firsts if rank not in having]
    if moves:
        began = time.monotonic()
        with temporary_group(ranks) as group:
            move(path, moves, files, ranks.rank, group)
        log(
            f"a local checkpoint lacked {len(moves)} files, which came from other machines in "
            f"{time.monotonic() - began:.1f} s"
        )


def held(folder: Path) -> dict[str, Held]:
    """What this machine holds, by iteration."""
    found = {}
    for number, path in iterations(folder):
        with contextlib.suppress(ValueError):
            checkpoint = Checkpoint(path)
            infos = checkpoint.files | checkpoint.tables
            files = {file: info.bytes for file, info in infos.items()} | {MANIFEST: (path / MANIFEST).stat().st_size}
            there = [
                file for file, size in files.items() if (path / file).is_file() and os.path.getsize(path / file) == size
            ]
            found[str(number)] = {"digest": checkpoint.digest, "files": files, "there": there}
    return found


def newest_held(save: str, directory: str, *, alone: bool) -> int:
    """The newest iteration of the run of this --save folder of which this machine holds a local checkpoint; 0 if
    there is none. alone: no other machine can have what is missing. No tensor is read."""
    own = held(Path(directory) / run) if (run := run_name(save)) else {}
    return newest_whole([own]) if alone else max(map(int, own), default=0)


def newest_whole(everywhere: Sequence[Mapping[str, Held]]) -> int:
    """The newest iteration of which all machines together hold every file; 0 if there is none."""
    for number in sorted({number for one in everywhere for number in one}, key=int, reverse=True):
        all_held = [one[number] for one in everywhere if number in one]
        there = {file for one in all_held for file in one["there"]}
        if len({one["digest"] for one in all_held}) == 1 and there == all_held[0]["files"].keys():
            return int(number)
    return 0
