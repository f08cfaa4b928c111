"""Saving of a run: one checkpoint at a time, written by a thread, for which the run waits now or (--async-save) later.

    save: wait for the last one -> copy to the host, with --async-save -> a thread writes and commits
    finish: wait for this rank's part, agree on the parts, wait for the commit, agree, and know what is on the disk

The thread runs `write`, which needs no collective; all collectives are on the caller's thread. The first of `finish`
comes before rank 0 gives the parts of others a time limit: it fails if a rank is gone, like those of a step.
"""

import dataclasses
import math
import os
import shutil
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils.files import machine_memory
from megatron.gpt2.checkpoint.folder import Gather, Log, alone
from megatron.gpt2.checkpoint.reader import table_path
from megatron.gpt2.checkpoint.writer import Files, Piece, commit, remove_older, unfinished, write_part

GRACE = 5.0  # seconds in which the parts of ranks that may be dead can still come, at the end of a run
_PAUSE = 0.02  # seconds between two looks
_NAMED = 8  # ranks that a message names
_ALIGNMENT = 64  # bytes, of every tensor in the copy


@dataclass
class Parts:
    """What the thread that writes a checkpoint, and the run, which has collectives, tell each other meanwhile.

    own: done when this rank's part is on the disk, or has failed. deadline: of `time.monotonic()`, when to wait no
    longer for the parts of other ranks. problem: why any rank could not write its part, else "".
    """

    own: Future[None] = field(default_factory=Future)
    deadline: float = math.inf
    problem: str = ""


@dataclass(kw_only=True)
class Saver:
    """Writes the checkpoints of one run into `folder`. Every rank has one and calls its methods at the same steps.

    attempt: a word that all ranks share and no other run. keep_last: how many iterations a save leaves, its own among
    them (default: all). timeout_s: how long rank 0 waits for files that another rank has written. local_world_size:
    ranks that share this machine's memory. gather: a collective, the texts of all ranks. saved_iteration: the last one
    that was committed, as far as all ranks can tell. problem: why the last one that failed did, as far as this rank can
    tell.
    """

    folder: Path
    attempt: str
    log: Log
    asynchronous: bool = False
    keep_last: int | None = None
    timeout_s: float = 60.0
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    gather: Gather = alone
    saved_iteration: int | None = None
    problem: str = ""
    _room: Tensor | None = None  # memory of the host, for a copy of what is saved
    _saves: int = 0
    _under_way: tuple[int | None, Parts, Future[Path]] | None = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "saver"))

    def prepare(self, files: Files) -> None:
        """Make the memory that --async-save copies `files` into, unless it is there: before training begins, so that
        no step waits for it. The next state has the same shapes."""
        if not self.asynchronous or self._room is not None:
            return
        self._room, lacking = _room_for(files, self.local_world_size)
        if lacking := max(map(int, self.gather(str(lacking)))):
            self.log(
                f"WARNING: --async-save is left out, training waits for every save: its copy lacks {lacking:,} "
                "bytes of host memory"
            )
            self.asynchronous, self._room = False, None

    def save(
        self, iteration: int, files: Files, facts: Mapping[str, Any], *, beside: Path | None = None
    ) -> Path | None:
        """Start saving a checkpoint. Returns its folder if it is committed on return; None if it failed, after a warning,
        or if a thread is still writing (--async-save). facts: what the manifest says about the run, in JSON's types;
        those of rank 0 count. beside: save into this folder instead, and replace the checkpoint there (for `best`)."""
        self.finish()
        self.prepare(files)
        if self._room is not None:
            files = _copied(files, self._room)
        parts = Parts()
        written = self._thread.submit(self.write, iteration, files, facts, parts, beside)
        self._under_way = None if beside else iteration, parts, written
        return None if self.asynchronous else self.finish()

    def write(
        self, iteration: int, files: Files, facts: Mapping[str, Any], parts: Parts, beside: Path | None = None
    ) -> Path:
        """Write this rank's `files`; rank 0 commits, once the parts of all ranks are on the disk. The other arguments
        are as for `save`. Rank 0's result counts, since it learns of every failure.

        OSError, one line, if this rank cannot write, and on rank 0 if `parts` says that another one cannot.
        TimeoutError, which is an OSError, if a rank's part is missing at the deadline of `parts`.
        """
        directory, keep_last = (beside, 1) if beside else (self.folder, self.keep_last)
        final = directory / f"iter_{iteration:07d}"
        folder = unfinished(final, f"{self.attempt}-{self._saves}")
        self._saves += 1
        try:
            if self.rank == 0:
                for stale in set(directory.glob("iter_*.tmp-*")) - {folder}:  # others may be writing into that one
                    shutil.rmtree(stale, ignore_errors=True)
            write_part(folder, iteration, files, self.rank)
            parts.own.set_result(None)
            if self.rank == 0:
                self._wait_for_tables(folder, parts)
                commit(folder, final, facts, self.world_size, self.log)
                remove_older(directory, iteration, keep_last, self.log)
        except BaseException as error:
            if not parts.own.done():
                parts.own.set_exception(error)
            if self.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                self.problem = str(error)
                self.log(f"WARNING: no checkpoint at iteration {iteration}: {error}")
            raise
        self.log(f"saved {final}")
        return final

    def _wait_for_tables(self, folder: Path, parts: Parts) -> None:
        ranks = {Path(table_path(rank)).name: rank for rank in range(self.world_size)}
        began = time.monotonic()
        # One look for all: of thousands, each would otherwise be a question to the file system.
        while missing := sorted(ranks.keys() - set(os.listdir((folder / table_path(0)).parent))):
            if parts.problem:
                raise OSError(parts.problem)
            if time.monotonic() > parts.deadline:
                named = ", ".join(str(ranks[name]) for name in missing[:_NAMED])
                more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
                raise TimeoutError(
                    f"{folder}: nothing came from rank {named}{more} within {time.monotonic() - began:.1f} s; "
                    "earlier checkpoints are untouched: do all nodes share the folder?"
                )
            time.sleep(_PAUSE)

    def finish(self) -> Path | None:
        """Wait for the checkpoint under way: its folder, or None if there is none or it failed on any rank."""
        if self._under_way is None:
            return None
        iteration, parts, written = self._under_way
        error = parts.own.exception()
        own = f"rank {self.rank} could not write its part: {error}" if isinstance(error, OSError) else ""
        parts.problem = next(filter(None, self.gather(own)), "")
        parts.deadline = time.monotonic() + self.timeout_s
        error = written.exception()
        self._under_way = None
        path = None if isinstance(error, OSError) else written.result()
        if not all(self.gather(str(path or ""))):
            return None
        if iteration is not None:
            self.saved_iteration = iteration
        return path

    def close(self) -> None:
        """End the thread. A checkpoint that is still under way, as on the way out of an error, is finished unless it
        lacks the part of another rank: that one may be gone, so nothing waits for it and no collective is called."""
        if self._under_way is not None:
            self._under_way[1].deadline = time.monotonic() + GRACE
        self._thread.shutdown()


def _sizes(files: Files) -> list[int]:
    """Bytes of each tensor in the copy."""
    return [
        -(-piece.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for pieces in files.values() for piece in pieces.values()
    ]


def _room_for(files: Files, local_world_size: int) -> tuple[Tensor | None, int]:
    """Host memory for a copy of `files`, and how many bytes are lacking for `local_world_size` ranks like this one: 0
    if all is well."""
    size, available = sum(_sizes(files)), machine_memory("MemAvailable")
    if available is not None and (lacking := size * local_world_size - available) > 0:
        return None, lacking
    try:
        room = torch.empty(size, dtype=torch.uint8).zero_()  # touched: the first copy would take ten times as long
        if any(piece.tensor.is_cuda for pieces in files.values() for piece in pieces.values()):
            # Pinned, but not by pin_memory=True, which takes the next power of two.
            cudart = torch.cuda.cudart()
            torch.cuda.check_error(cudart.cudaHostRegister(room.data_ptr(), size, 0))
            weakref.finalize(room, cudart.cudaHostUnregister, room.data_ptr())
    except RuntimeError:
        return None, size
    return room, 0


def _copied(files: Files, room: Tensor) -> Files:
    """The same pieces, of tensors copied into `room`; the copy is complete."""
    parts = iter(room.split(_sizes(files)))

    def copied(piece: Piece) -> Piece:
        tensor = piece.tensor
        own = next(parts)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return dataclasses.replace(piece, tensor=own.copy_(tensor, non_blocking=True))

    copies = {file: {key: copied(piece) for key, piece in pieces.items()} for file, pieces in files.items()}
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copies
