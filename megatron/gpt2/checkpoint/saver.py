"""Saving of a run: one checkpoint at a time, written by a thread, for which the run waits now or (--async-save) later.

    save: wait for the last one -> copy to the host, with --async-save -> a thread writes and commits
    finish: wait for this rank's part, agree on the parts, wait for the commit, agree, and know what is on the disk

The thread runs `write_checkpoint`, which needs no collective; all collectives are on the caller's thread. The first of
`finish` comes before rank 0 waits for the parts of others: it fails where a rank is gone, like those of a step.
"""

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils.files import machine_memory
from megatron.gpt2.checkpoint.folder import Piece
from megatron.gpt2.checkpoint.gathering import Parts, share_line

Files = Mapping[str, Mapping[str, Piece]]
_ALIGNMENT = 64  # bytes, of every tensor in the copy


class Saver:
    """Writes the checkpoints of one run. Every rank has one and calls its methods at the same steps.

    write: `write_checkpoint` with what is the same for each. rank: this one. attempt: a word that all ranks share and
    no other run.
    local_world_size: ranks that share this machine's memory. max_over_ranks: a collective, the largest of all ranks'
    numbers.
    """

    def __init__(
        self,
        write: Callable[..., Path],
        *,
        rank: int,
        attempt: str,
        asynchronous: bool,
        local_world_size: int,
        max_over_ranks: Callable[[int], int],
        log: Callable[[str], None],
    ) -> None:
        self._write_checkpoint, self._attempt, self._asynchronous, self._rank = write, attempt, asynchronous, rank
        self._local_world_size, self._max_over_ranks, self._log = local_world_size, max_over_ranks, log
        self._thread = ThreadPoolExecutor(1, "saver")
        self._copy = HostCopy()
        self._saves = 0
        self._under_way: tuple[int | None, Parts, Future[Path]] | None = None
        self.saved_iteration: int | None = None  # the last one that was committed, as far as all ranks know
        self.problem = ""  # why the last one that failed did, as far as this rank knows

    def prepare(self, files: Files) -> None:
        """Make the memory that --async-save copies `files` into, unless it is there: before training begins, so that
        no step waits for it."""
        if not self._asynchronous or self._copy.is_ready:
            return
        if lacking := self._max_over_ranks(self._copy.prepare(files, self._local_world_size)):
            self._log(
                f"WARNING: --async-save is left out, training waits for every save: its copy lacks {lacking:,} "
                "bytes of host memory"
            )
            self._asynchronous = False

    def save(self, iteration: int, files: Files, facts: Mapping[str, Any], **elsewhere: Any) -> Path | None:
        """Begin with a checkpoint; `files` as for `write_checkpoint`. Its folder where it is committed on return;
        None where that failed, or where a thread is at it. `elsewhere`: arguments of `write` for this one, which is
        kept beside the run's own and is none of them."""
        self.finish()
        self.prepare(files)
        if self._asynchronous:
            files = self._copy(files)
        parts = Parts()
        written = self._thread.submit(self._write, iteration, files, facts, self._saves, parts, elsewhere)
        self._under_way = None if elsewhere else iteration, parts, written
        self._saves += 1
        return None if self._asynchronous else self.finish()

    def _write(
        self,
        iteration: int,
        files: Files,
        facts: Mapping[str, Any],
        number: int,
        parts: Parts,
        elsewhere: Mapping[str, Any],
    ) -> Path:
        """Write in the thread. The result on rank 0 counts, since rank 0 learns of every other rank's failure."""
        try:
            path = self._write_checkpoint(
                iteration=iteration,
                files=files,
                facts=facts,
                log=self._log,
                attempt=f"{self._attempt}-{number}",
                parts=parts,
                **elsewhere,
            )
        except BaseException as error:
            if not parts.own.done():
                parts.own.set_exception(error)
            if isinstance(error, OSError):
                self._log(f"WARNING: no checkpoint at iteration {iteration}: {error}")
            raise
        self._log(f"saved {path}")
        return path

    def finish(self) -> Path | None:
        """Wait for the checkpoint under way: its folder, or None where there is none or it failed on any rank."""
        if self._under_way is None:
            return None
        iteration, parts, written = self._under_way
        error = parts.own.exception()
        own = f"rank {self._rank} could not write its part: {error}" if isinstance(error, OSError) else ""
        parts.problem = share_line(own, self._rank, self._max_over_ranks)
        error = written.exception()
        self._under_way = None
        if isinstance(error, OSError):
            self.problem = str(error)
        path = written.result() if not isinstance(error, OSError) else None
        if self._max_over_ranks(int(path is None)):
            return None
        if iteration is not None:
            self.saved_iteration = iteration
        return path

    def any_rank(self, answer: bool) -> bool:
        """Whether the `answer` of any rank is yes. A collective."""
        return bool(self._max_over_ranks(int(answer)))

    def close(self) -> None:
        """End the thread. A checkpoint that is still under way, as on the way out of an error, is finished unless it
        lacks the part of another rank: that one may be gone, so nothing waits for it and no collective is called."""
        if self._under_way is not None:
            self._under_way[1].hurry.set()
        self._thread.shutdown()


class HostCopy:
    """Copies what a rank saves into host memory that is made once: the next state has the same shapes."""

    def __init__(self) -> None:
        self._room: Tensor | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the memory is made."""
        return self._room is not None

    def prepare(self, files: Files, local_world_size: int) -> int:
        """Make the memory. Returns how many bytes are lacking for `local_world_size` ranks like this one: 0 where all
        is well."""
        pieces = [piece for file in files.values() for piece in file.values()]
        size = sum(map(_room_of, pieces))
        available = machine_memory("MemAvailable")
        if available is not None and (lacking := size * local_world_size - available) > 0:
            return lacking
        try:
            room = torch.empty(size, dtype=torch.uint8).zero_()  # touched: the first copy would take ten times as long
            if any(piece.tensor.is_cuda for piece in pieces):
                # Pinned, but not by pin_memory=True, which takes the next power of two.
                cudart = torch.cuda.cudart()
                torch.cuda.check_error(cudart.cudaHostRegister(room.data_ptr(), size, 0))
                weakref.finalize(room, cudart.cudaHostUnregister, room.data_ptr())
        except RuntimeError:
            return size
        self._room = room
        return 0

    def __call__(self, files: Files) -> Files:
        """The same pieces, of copied tensors; the copy is complete."""
        assert self._room is not None
        at, copies = 0, {}
        for file, pieces in files.items():
            copies[file] = dict(pieces)
            for key, piece in pieces.items():
                tensor = piece.tensor
                copy = self._room[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                copies[file][key] = dataclasses.replace(piece, tensor=copy.copy_(tensor, non_blocking=True))
                at += _room_of(piece)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return copies


def _room_of(piece: Piece) -> int:
    return -(-piece.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
