"""Local checkpoints (as in Megatron): every few steps, each machine saves in its own memory or on its own disk. After a
failure, the run continues from its last local checkpoint and loses steps instead of hours.

    <--local-checkpoint-dir>/<run>/iter_0000120/

The files have the usual format (writer.py), but they need no file system that all machines share. Each machine stores
the files of its ranks, a copy of the files of the previous machine, and all tables. The run can therefore lose any one
machine.

After a restart, `assemble_local_checkpoint` completes the newest local checkpoint. A machine that was replaced or lacks
the last checkpoint gets the missing files from other machines before any rank reads.
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

from data_utils.command_line import Log, plural
from data_utils.files import fsync_path, make_folder
from megatron.gpt2.checkpoint.reader import MANIFEST, NativeCheckpoint, table_path
from megatron.gpt2.checkpoint.save_folder import LATEST_FILE, list_iterations
from megatron.gpt2.checkpoint.writer import (
    ShardedFiles,
    manifest_bytes,
    sync_folders,
    temporary_folder,
    write_atomically,
    write_rank_files,
)
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.dist.rendezvous import temporary_group

RUN_NAME_FILE = "local_checkpoints"  # the file in the --save folder that names the run
MESSAGE_BYTES = 64 << 20
CHECKPOINTS_KEPT = 2  # number of checkpoints that each machine keeps
T = TypeVar("T")
FileTransfer = tuple[str, int, int]  # (file, sending rank, receiving rank)

# An inventory of a checkpoint on this machine: the "digest" of its manifest, all its "files" with their sizes, and the
# list "present" of those files that this machine has.
LocalInventory = dict[str, Any]


def run_name(save: str | Path) -> str:
    """Return the name of the folder for local checkpoints of the run in `save`, or "" if the run has no such name."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if re.fullmatch(r"[0-9a-f]{1,16}", name := (Path(save) / RUN_NAME_FILE).read_text(encoding="ascii")):
            return name
    return ""


def run_on_all_ranks(work: Callable[[], T], group: ProcessGroup | None) -> list[T]:
    """Call `work` on each rank of `group` and return all results, by rank. If `work` raises OSError on a rank, every
    rank raises an OSError that names this rank.

    group: None if there is only one rank.
    """
    outcome: tuple[str, Any]
    try:
        outcome = "", work()
    except OSError as error:
        outcome = str(error), None
    results: list[tuple[str, Any]] = [outcome]
    if group is not None:
        results *= group.size()
        dist.all_gather_object(results, outcome, group=group)
    for rank, (problem, _) in enumerate(results):
        if problem:
            raise OSError(f"rank {rank}: {problem}")
    return [result for _, result in results]


def transfer_files(
    path: Path, transfers: Sequence[FileTransfer], sizes: Mapping[str, int], rank: int, group: ProcessGroup | None
) -> None:
    """Send files of the folder `path` between ranks. If the disk of one rank is full, every rank raises OSError before
    anything is sent.

    sizes: the sizes of the files in bytes.
    """

    def make_room() -> None:
        for file, _, to in transfers:
            if to == rank:
                (path / file).parent.mkdir(parents=True, exist_ok=True)
                with open(path / file, "wb") as stream:
                    os.posix_fallocate(stream.fileno(), 0, sizes[file])

    def exchange() -> None:
        under_way = []
        for file, source, to in transfers:
            if rank in (source, to):
                mapped = torch.from_file(str(path / file), shared=True, size=sizes[file], dtype=torch.uint8)
                for part in mapped.split(MESSAGE_BYTES):
                    under_way.append(dist.isend(part, to, group) if rank == source else dist.irecv(part, source, group))
        for work in under_way:
            assert work is not None
            work.wait()
        for file, _, to in transfers:
            if to == rank:
                fsync_path(path / file)

    run_on_all_ranks(make_room, group)
    run_on_all_ranks(exchange, group)


class LocalCheckpoints:
    """Writes the local checkpoints of a run. Every rank has a `LocalCheckpoints` and calls `save` at the same steps.

    folder: the run's folder on this machine.
    hosts: the machine of each rank.
    group: the gloo group of all ranks; None if there is only one rank.
    start_id: a random text, equal on all ranks, new in every start of a run.
    """

    def __init__(
        self, folder: Path, hosts: Sequence[str], rank: int, group: ProcessGroup | None, start_id: str, log: Log
    ) -> None:
        self._folder, self._rank, self._group, self._start_id, self._log = folder, rank, group, start_id, log
        machines = [[other for other, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
        self._is_first_on_machine = any(ranks[0] == rank for ranks in machines)
        # {rank: the rank of the next machine that receives a copy of its files}. If the next machine has fewer ranks,
        # some of them receive the files of several ranks.
        self._receivers = {
            other: next_ranks[position % len(next_ranks)]
            for ranks, next_ranks in zip(machines, machines[1:] + machines[:1], strict=True)
            for position, other in enumerate(ranks)
            if ranks is not next_ranks
        }

    def save(self, iteration: int, files: ShardedFiles, metadata: Mapping[str, Any]) -> bool:
        """Write this rank's `files` and a copy on the next machine. Return True if all machines have the checkpoint. If
        a rank fails, the checkpoint is dropped and a warning names the first rank that failed.

        metadata: the metadata for the manifest; that of rank 0 is used.
        """
        final = self._folder / f"iter_{iteration:07d}"
        folder = temporary_folder(final, self._start_id)
        try:
            own_metadata = metadata if self._rank == 0 else {}
            parts = run_on_all_ranks(
                lambda: (write_rank_files(folder, iteration, files, self._rank), own_metadata), self._group
            )
            tables, (metadata, *_) = zip(*parts, strict=True)
            listed = [json.loads(table.partition(b"\n")[2]) for table in tables]
            sizes = {file: info["bytes"] for infos in listed for file, info in infos.items()}
            transfers = [(file, rank, taker) for rank, taker in self._receivers.items() for file in listed[rank]]
            transfer_files(folder, transfers, sizes, self._rank, self._group)
            run_on_all_ranks(
                lambda: self._seal(folder, tables, manifest_bytes(iteration, metadata, tables)), self._group
            )
        except OSError as error:
            self._log(f"WARNING: no local checkpoint at iteration {iteration}: {error}")
            if self._is_first_on_machine:
                shutil.rmtree(folder, ignore_errors=True)
            return False
        if self._is_first_on_machine:
            folder.rename(final)
            fsync_path(self._folder)
            self._remove_others(final)
        return True

    def _seal(self, folder: Path, tables: Sequence[bytes], manifest: bytes) -> None:
        if self._is_first_on_machine:
            for rank, table in enumerate(tables):
                write_atomically(folder / table_path(rank), table)
            write_atomically(folder / MANIFEST, manifest)
            sync_folders(folder)
            if not list_iterations(self._folder):
                make_folder(self._folder)  # Sync the folder's name to the disk.

    def remove(self) -> None:
        """Remove all local checkpoints of the run."""
        if self._is_first_on_machine:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _remove_others(self, newest: Path) -> None:
        """Keep `newest` and the CHECKPOINTS_KEPT - 1 checkpoints before `newest`. Remove all other checkpoints, also
        later ones, which were written before a rollback. Temporary folders of the current start stay, because another
        rank may already write the next checkpoint."""
        before = [path for _, path in list_iterations(self._folder) if path.name < newest.name]
        for path in set(self._folder.glob("iter_*")) - {newest, *before[: CHECKPOINTS_KEPT - 1]}:
            if not path.name.endswith(f".tmp-{self._start_id}"):
                shutil.rmtree(path, ignore_errors=True)


def assemble_local_checkpoint(save: str, directory: str, newest: int, rank_info: RankInfo, log: Log) -> Path | None:
    """Complete the newest local checkpoint of the run in `save` on every machine, and return the run's folder. Return
    None if all machines together do not have a checkpoint that is newer than iteration `newest`. Every rank calls this
    function before the process group exists. The name of the run and `newest` are taken from rank 0."""
    gather = rank_info.rendezvous.gather if rank_info.rendezvous is not None else lambda name, rank, text: [text]
    run = run_name(save)
    inventory = local_inventory(Path(directory) / run) if run and rank_info.local_rank == 0 else {}
    reports = [
        json.loads(text) for text in gather("local checkpoints", rank_info.rank, json.dumps([run, newest, inventory]))
    ]
    (run, newest, _), inventories = reports[0], [inventory for _, _, inventory in reports]
    iteration = newest_complete_iteration(inventories)
    if not run or iteration <= newest:
        return None
    folder = Path(directory) / run
    path, problem = folder / f"iter_{iteration:07d}", ""
    try:
        _fetch(path, [inventory.get(str(iteration)) for inventory in inventories], rank_info, log)
        if rank_info.local_rank == 0:
            write_atomically(folder / LATEST_FILE, f"{iteration}\n".encode())
        problem = NativeCheckpoint(path).find_damage(rank_info.local_rank, rank_info.local_world_size)
    except (OSError, ValueError) as error:
        problem = str(error)
    problem = next(filter(None, gather("local damage", rank_info.rank, problem)), "")
    if problem:
        log(f"WARNING: the local checkpoint of iteration {iteration} is left out: {problem}")
    return None if problem else folder


def _fetch(path: Path, by_rank: Sequence[LocalInventory | None], rank_info: RankInfo, log: Log) -> None:
    """Copy missing files of a checkpoint between machines.

    by_rank: the inventory of each rank. Only the first rank of a machine has an inventory.
    """
    files: dict[str, int] = next(inventory["files"] for inventory in by_rank if inventory)
    hosts = rank_info.hosts or {0: ""}
    # The first rank of each machine acts for the whole machine.
    firsts = {host: rank for rank, host in reversed(hosts.items())}.values()
    transfers: list[FileTransfer] = []
    for file in files:
        sources = [rank for rank in firsts if (inventory := by_rank[rank]) and file in inventory["present"]]
        transfers += [(file, sources[0], rank) for rank in firsts if rank not in sources]
    if transfers:
        began = time.monotonic()
        with temporary_group(rank_info) as group:
            transfer_files(path, transfers, files, rank_info.rank, group)
        log(
            f"copied {plural(len(transfers), 'missing file')} of a local checkpoint from other machines in "
            f"{time.monotonic() - began:.1f} s"
        )


def local_inventory(folder: Path) -> dict[str, LocalInventory]:
    """Return the inventories of the local checkpoints on this machine, by iteration."""
    inventory = {}
    for number, path in list_iterations(folder):
        with contextlib.suppress(ValueError):
            checkpoint = NativeCheckpoint(path)
            infos = checkpoint.files | checkpoint.tables
            files = {file: info.bytes for file, info in infos.items()} | {MANIFEST: (path / MANIFEST).stat().st_size}
            present = [
                file for file, size in files.items() if (path / file).is_file() and os.path.getsize(path / file) == size
            ]
            inventory[str(number)] = {"digest": checkpoint.manifest_sha256, "files": files, "present": present}
    return inventory


def newest_local_iteration(save: str, directory: str, *, one_machine: bool) -> int:
    """Return the newest iteration of the run in `save` that has a local checkpoint on this machine, or 0 if there is
    none. No tensor is read.

    one_machine: whether the run has only this machine, so that only complete checkpoints count.
    """
    inventory = local_inventory(Path(directory) / run) if (run := run_name(save)) else {}
    return newest_complete_iteration([inventory]) if one_machine else max(map(int, inventory), default=0)


def newest_complete_iteration(by_machine: Sequence[Mapping[str, LocalInventory]]) -> int:
    """Return the newest complete iteration, or 0. Each file of a complete iteration exists on at least one machine.

    by_machine: the result of `local_inventory` of each machine.
    """
    for number in sorted({number for iterations in by_machine for number in iterations}, key=int, reverse=True):
        inventories = [iterations[number] for iterations in by_machine if number in iterations]
        present = {file for inventory in inventories for file in inventory["present"]}
        digests = {inventory["digest"] for inventory in inventories}
        if len(digests) == 1 and present == inventories[0]["files"].keys():
            return int(number)
    return 0
