"""`Saver` writes the checkpoints of a run, one at a time, in a thread. Training waits for the thread or, with
--async-save, continues.

    save: wait for the last save -> with --async-save, copy to host memory -> the thread writes and commits
    finish: wait for this rank's files -> all ranks exchange errors -> wait for the commit -> all ranks exchange results

The thread runs `write`, which calls no collective. All collectives run in the caller's thread. Rank 0 starts the time
limit for the files of other ranks after the first collective of `finish`, which fails if a rank died.
"""

import dataclasses
import functools
import math
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils.command_line import Log
from data_utils.files import machine_memory, run_future
from megatron.gpt2.checkpoint.reader import table_path
from megatron.gpt2.checkpoint.save_folder import Gather, gather_alone
from megatron.gpt2.checkpoint.writer import (
    ShardedFiles,
    ShardedTensor,
    commit,
    remove_old_checkpoints,
    temporary_folder,
    write_rank_files,
)
from megatron.gpt2.dist.ranks import format_ranks
from megatron.gpt2.hooks import StopRun

GRACE_SECONDS = 5.0  # At the end of a run, rank 0 waits this long for files of ranks that may be dead.
_POLL_SECONDS = 0.02
_TOO_SLOW = "too slow"
_ALIGNMENT = 64  # Every tensor in the host buffer starts at a multiple of _ALIGNMENT bytes.


@dataclass
class PendingSave:
    """State that the writing thread and the training thread share during a save.

    files_written: done when this rank's files are written.
    written: the result of `Saver.write`. On rank 0, a result means that the checkpoint is committed.
    deadline: the `time.monotonic()` at which rank 0 stops waiting for other ranks.
    remote_error: the error of the first rank that could not write its files, else "".
    """

    files_written: Future[None] = field(default_factory=Future)
    written: Future[Path] = field(default_factory=Future)
    deadline: float = math.inf
    remote_error: str = ""


@dataclass(kw_only=True)
class Saver:
    """Writes the checkpoints of a run into `folder`. Every rank has a saver and calls its methods at the same steps.

    start_id: a random hex string that is drawn once per start and shared by all ranks.
    keep_last: the number of iterations to keep after a save, with the new one (default: all).
    timeout_s: how long rank 0 waits until it sees the files of other ranks.
    storage_timeout_s: how long each rank waits for its own files.
    local_world_size: the number of ranks on this machine.
    gather: a collective that returns the texts of all ranks, with a time limit above `timeout_s` and
        `storage_timeout_s`.
    check_owner: raises OSError if this run must not commit.
    saved_iteration: the last iteration that all ranks report as committed.
    last_error: the last error on this rank.
    """

    folder: Path
    start_id: str
    log: Log
    asynchronous: bool = False
    keep_last: int | None = None
    timeout_s: float = 60.0
    storage_timeout_s: float = 3600.0
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    gather: Gather = gather_alone
    check_owner: Callable[[], object] = lambda: None
    saved_iteration: int | None = None
    last_error: str = ""
    _host_buffer: Tensor | None = None  # --async-save uses this buffer.
    _saves: int = 0
    _pending: PendingSave | None = None

    def allocate_host_buffer(self, files: ShardedFiles) -> None:
        """Allocate the host buffer into which --async-save copies `files`, once. A call before training avoids the wait
        in the first save. All saves have equal shapes."""
        if not self.asynchronous or self._host_buffer is not None:
            return
        self._host_buffer, missing = _buffer_for(files, self.local_world_size)
        if missing := max(map(int, self.gather(str(missing)))):
            self.log(
                f"WARNING: --async-save is off, so training waits for every save: its copy needs {missing:,} more "
                "bytes of host memory"
            )
            self.asynchronous, self._host_buffer = False, None

    def save(
        self, iteration: int, files: ShardedFiles, metadata: Mapping[str, Any], *, into: Path | None = None
    ) -> Path | None:
        """Start saving a checkpoint. Return the folder of a committed save, or None if the save failed with a warning
        or if the thread is still writing (--async-save).

        metadata: values of JSON types for the manifest; those of rank 0 are written.
        into: save into this folder instead, and replace the checkpoint there (for `best/`).
        """
        self.finish()
        self.allocate_host_buffer(files)
        if self._host_buffer is not None:
            files = _copy_to_host(files, self._host_buffer)
        self._pending = pending = PendingSave()
        write = functools.partial(self.write, iteration, files, metadata, pending=pending, into=into)
        # The thread is a daemon, so storage that does not answer does not keep the process from ending.
        threading.Thread(target=run_future, args=(pending.written, write), name="saver", daemon=True).start()
        return None if self.asynchronous else self.finish()

    def write(
        self,
        iteration: int,
        files: ShardedFiles,
        metadata: Mapping[str, Any],
        pending: PendingSave,
        into: Path | None = None,
    ) -> Path:
        """Write this rank's `files`. Rank 0 then waits for the files of all ranks and commits. `iteration`, `metadata`
        and `into` are arguments of `save`. Only the result of rank 0 shows whether the save succeeded.

        Raises OSError, in one line, if this rank cannot write, and on rank 0 if `pending` has the error of another
        rank. Raises TimeoutError, an OSError, on rank 0 if files of a rank are missing at the deadline.
        """
        directory, keep_last = (into, 1) if into else (self.folder, self.keep_last)
        final = directory / f"iter_{iteration:07d}"
        folder = temporary_folder(final, f"{self.start_id}-{self._saves}")
        self._saves += 1
        try:
            if self.rank == 0:
                # Other ranks may already write into `folder`.
                for stale in set(directory.glob("iter_*.tmp-*")) - {folder}:
                    shutil.rmtree(stale, ignore_errors=True)
            write_rank_files(folder, iteration, files, self.rank)
            pending.files_written.set_result(None)
            if self.rank == 0:
                self._wait_for_tables(folder, pending)
                try:
                    commit(folder, final, metadata, self.world_size, self.log, self.check_owner)
                except OSError:
                    self.check_owner()  # raises the reason if another run has removed the files
                    raise
                remove_old_checkpoints(directory, iteration, keep_last, self.log)
        except BaseException as error:
            if not pending.files_written.done():
                pending.files_written.set_exception(error)
            if self.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                self.last_error = str(error)
                self.log(f"WARNING: no checkpoint at iteration {iteration}: {error}")
            raise
        self.log(f"saved {final}")
        return final

    def _wait_for_tables(self, folder: Path, pending: PendingSave) -> None:
        """Wait until the tables of all ranks are in `folder`. Raises OSError as `write`."""
        tables = {Path(table_path(rank)).name: rank for rank in range(self.world_size)}
        began = time.monotonic()
        # List the folder once to find the tables of all ranks. Thousands of queries for one file each would load the
        # file system.
        while missing := tables.keys() - set(os.listdir((folder / table_path(0)).parent)):
            if pending.remote_error:
                raise OSError(pending.remote_error)
            if time.monotonic() > pending.deadline:
                raise TimeoutError(
                    f"{folder}: no files from {format_ranks([tables[name] for name in missing], {})} within "
                    f"{time.monotonic() - began:.1f} s; earlier checkpoints are untouched: do all nodes share the "
                    "folder?"
                )
            time.sleep(_POLL_SECONDS)

    def finish(self) -> Path | None:
        """Wait for the pending save. Return the folder of the save, or None if no save is pending or if the save failed
        on any rank. Raises StopRun on every rank if the storage of a rank takes longer than `storage_timeout_s`."""
        if (pending := self._pending) is None:
            return None
        errors = self._gather_errors(pending.files_written, pending)
        pending.remote_error = next(
            (f"rank {rank} could not write its files: {text}" for rank, text in enumerate(errors) if text), ""
        )
        pending.deadline = time.monotonic() + self.timeout_s
        failed = any(self._gather_errors(pending.written, pending))
        self._pending = None
        if isinstance(pending.written.exception(), OSError):
            return None  # `write` has logged the error.
        path = pending.written.result()  # `result` raises any other error, even if a different rank had an OSError.
        if failed:
            return None
        if path.parent == self.folder:  # The checkpoint is not in best/.
            self.saved_iteration = int(path.name.removeprefix("iter_"))
        return path

    def _gather_errors(self, result: Future[Any], pending: PendingSave) -> list[str]:
        """Wait for `result`, and return the OSError of each rank as text, "" for a rank without an error."""
        finished, _ = wait([result], self.storage_timeout_s)
        error = result.exception() if finished else OSError(_TOO_SLOW)
        texts = self.gather((str(error) or repr(error)) if isinstance(error, OSError) else "")
        if _TOO_SLOW in texts:
            self._pending = None
            pending.remote_error = (
                f"the storage of --save {self.folder} took longer than {self.storage_timeout_s:g} s "
                f"(--save-timeout-minutes) for the files of rank {texts.index(_TOO_SLOW)}: earlier checkpoints are "
                "untouched"
            )
            raise StopRun(pending.remote_error)
        return texts

    def close(self) -> None:
        """Wait for a save that is still pending, for example after an error. The save is completed if the files of all
        ranks arrive within GRACE_SECONDS. No collective is called, because other ranks may be dead."""
        if self._pending is not None:
            self._pending.deadline = time.monotonic() + GRACE_SECONDS
            wait([self._pending.written], self.storage_timeout_s)


def _sizes(files: ShardedFiles) -> list[int]:
    """Return the number of bytes of each tensor in the host buffer."""
    return [-(-shard.data.nbytes // _ALIGNMENT) * _ALIGNMENT for shards in files.values() for shard in shards.values()]


def _buffer_for(files: ShardedFiles, local_world_size: int) -> tuple[Tensor | None, int]:
    """Allocate host memory for a copy of `files`. Return (buffer, 0), or (None, missing bytes) if the machine has too
    little memory for `local_world_size` such buffers."""
    size, available = sum(_sizes(files)), machine_memory("MemAvailable")
    if available is not None and (missing := size * local_world_size - available) > 0:
        return None, missing
    try:
        # zero_ maps the pages; otherwise the first copy takes 10 times as long.
        buffer = torch.empty(size, dtype=torch.uint8).zero_()
        if any(shard.data.is_cuda for shards in files.values() for shard in shards.values()):
            # Pin the memory by hand, because pin_memory=True allocates the next power of two.
            cudart = torch.cuda.cudart()
            torch.cuda.check_error(cudart.cudaHostRegister(buffer.data_ptr(), size, 0))
            weakref.finalize(buffer, cudart.cudaHostUnregister, buffer.data_ptr())
    except RuntimeError:
        return None, size
    return buffer, 0


def _copy_to_host(files: ShardedFiles, buffer: Tensor) -> ShardedFiles:
    """Copy all tensors of `files` into `buffer`, wait for the copies, and return the same shards with the copied
    data."""
    parts = iter(buffer.split(_sizes(files)))

    def copied(shard: ShardedTensor) -> ShardedTensor:
        tensor = shard.data
        copy = next(parts)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return dataclasses.replace(shard, data=copy.copy_(tensor, non_blocking=True))

    copies = {file: {key: copied(shard) for key, shard in shards.items()} for file, shards in files.items()}
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copies
