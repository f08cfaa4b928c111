"""Checkpoints near the ranks: every few steps into the memory or onto the disk of each machine (Megatron's local
checkpoints). A run that dies goes on from there and loses some steps instead of some hours.

    <--local-checkpoint-dir>/<run>/iter_0000120/

It is a checkpoint like every other (folder.py), but no file system that all machines share is needed. A machine holds
the files of its own ranks and those of the machine before it, and all tables. So any one machine can be lost. What a
machine lacks when the run starts again comes from the others, before anything is read: local_assembly.py.
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from data_utils.files import sync_folder
from megatron.gpt2.checkpoint.files import Piece, write_synced, write_tensors
from megatron.gpt2.checkpoint.gathering import write_table
from megatron.gpt2.checkpoint.manifest import MANIFEST, Contents, table_path
from megatron.gpt2.dist.gathering import gather_bytes, gather_texts

NAME = "local_checkpoints"  # the file in the --save folder that names the run
KEPT = 2  # checkpoints on each machine: the last one and the one before, while the next is written
AT_ONCE = 64 << 20  # bytes of a message
HOST = torch.device("cpu")
Files = Mapping[str, Mapping[str, Piece]]


def run_name(save: str | Path) -> str:
    """By what the run of this --save folder is known where it has local checkpoints; "" where it has none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if re.fullmatch(r"[0-9a-f]{1,16}", name := (Path(save) / NAME).read_text(encoding="ascii")):
            return name
    return ""


class LocalCheckpoints:
    """Writes the local checkpoints of a run. Every rank has one and calls `save` at the same steps.

    folder: of the run, on this machine. hosts: the machine of each rank. group: of all ranks, gloo; None for one rank.
    attempt: a word that all ranks share and no other start of a run.
    """

    def __init__(
        self,
        folder: Path,
        hosts: Sequence[str],
        rank: int,
        group: ProcessGroup | None,
        attempt: str,
        log: Callable[[str], None],
    ) -> None:
        self._folder, self._rank, self._group, self._attempt, self._log = folder, rank, group, attempt, log
        machines = [[other for other, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
        here = next(number for number, ranks in enumerate(machines) if rank in ranks)
        before, own, after = machines[here - 1], machines[here], machines[(here + 1) % len(machines)]
        place = own.index(rank)
        self._is_first = place == 0
        # The rank of the next machine that takes this rank's files, and those whose files this one takes. A machine
        # with fewer ranks takes several ranks' files by one.
        self._to = after[place % len(after)] if len(machines) > 1 else None
        self._from = before[place :: len(own)] if len(machines) > 1 else []

    def save(self, iteration: int, files: Files, facts: Mapping[str, Any]) -> bool:
        """Write and copy this rank's `files`; whether the checkpoint is there on all machines. facts: what the manifest
        says, read on rank 0 alone. A failure costs this checkpoint, and one warning names the first rank that failed.
        """
        folder = self._folder / f"iter_{iteration:07d}.tmp-{self._attempt}"
        table, problem = b"", ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tensors: dict[str, Any] = {}
            listed: dict[str, Any] = {}
            for file, pieces in files.items():
                written = write_tensors(folder, file, iteration, pieces)
                tensors.update(written["tensors"])
                listed.update(written["files"])
            write_table(folder, self._rank, tensors, listed)
            table = (folder / table_path(self._rank)).read_bytes()
        except OSError as error:
            problem = str(error)
        if self._failed(problem, iteration):
            return False
        tables = gather_bytes(table, HOST, self._group)
        manifest = gather_bytes(
            self._manifest(iteration, tables, facts) if self._rank == 0 else b"", HOST, self._group
        )[0]
        try:
            self._copy(folder, tables)
            if self._is_first:
                for rank, data in enumerate(tables):
                    write_synced(folder / table_path(rank), data)
                write_synced(folder / MANIFEST, manifest)
        except OSError as error:
            problem = str(error)
        if self._failed(problem, iteration):
            return False
        if self._is_first:
            folder.rename(self._folder / f"iter_{iteration:07d}")
            sync_folder(self._folder)
            self._remove_others(iteration)
        return True

    def _manifest(self, iteration: int, tables: Sequence[bytes], facts: Mapping[str, Any]) -> bytes:
        contents = Contents()
        for rank, data in enumerate(tables):
            contents.add(rank, json.loads(data.partition(b"\n")[0]), len(data), hashlib.sha256(data).hexdigest())
        return contents.manifest_bytes(iteration, facts)

    def _copy(self, folder: Path, tables: Sequence[bytes]) -> None:
        """Send this rank's files to the next machine, and write those that the machine before sends."""
        sent = send(folder, files_of(tables[self._rank]), self._to, self._group) if self._to is not None else []
        problems = [
            receive(folder / file, size, other, self._group)
            for other in self._from
            for file, size in files_of(tables[other]).items()
        ]
        for work in sent:
            work.wait()
        if any(problems):
            raise OSError(next(filter(None, problems)))

    def _failed(self, problem: str, iteration: int) -> bool:
        """Whether any rank has a problem. Every rank calls it."""
        problems = gather_texts(problem, HOST, self._group)
        first = next((rank for rank, text in enumerate(problems) if text), None)
        if first is None:
            return False
        self._log(f"WARNING: no local checkpoint at iteration {iteration}: rank {first}: {problems[first]}")
        if self._is_first:
            shutil.rmtree(self._folder / f"iter_{iteration:07d}.tmp-{self._attempt}", ignore_errors=True)
        return True

    def remove(self) -> None:
        """Remove all of them: the run has saved where they are no longer needed."""
        if self._is_first:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _remove_others(self, iteration: int) -> None:
        """Leave this checkpoint and KEPT - 1 before it. Later ones are of a course that the run has left. Another rank
        may have begun to write the next one."""
        found = sorted(
            path
            for path in self._folder.glob("iter_*")
            if path.name != f"iter_{iteration:07d}" and not path.name.endswith(f".tmp-{self._attempt}")
        )
        before = [path for path in found if ".tmp-" not in path.name and path.name < f"iter_{iteration:07d}"]
        for path in set(found) - set(before[-(KEPT - 1) :]):
            shutil.rmtree(path, ignore_errors=True)


def files_of(table: bytes) -> dict[str, int]:
    """The files of a rank's table, with their sizes in bytes."""
    return {file: info["bytes"] for file, info in json.loads(table.partition(b"\n")[2]).items()}


def send(folder: Path, files: Mapping[str, int], destination: int, group: ProcessGroup | None) -> list[dist.Work]:
    """Begin to send files, with their sizes in bytes, to a rank that receives them in this order."""
    works = [
        dist.isend(part, destination, group)
        for file, size in files.items()
        for part in torch.from_file(str(folder / file), shared=True, size=size, dtype=torch.uint8).split(AT_ONCE)
    ]
    return [work for work in works if work is not None]


def receive(path: Path, size: int, source: int, group: ProcessGroup | None) -> str:
    """Write a file that another rank sends. Returns what is wrong with the disk, else "". Every part is taken all the
    same, since the other rank counts on it."""
    problem, file = "", None
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path, "wb", buffering=0))
        except OSError as error:
            problem = f"{path}: {error.strerror}"
        for start in range(0, size, AT_ONCE):
            part = torch.empty(min(AT_ONCE, size - start), dtype=torch.uint8)
            dist.recv(part, source, group)
            try:
                if file and not problem:
                    file.write(part.numpy().data)
            except OSError as error:
                problem = f"{path}: {error.strerror}"
    return problem
