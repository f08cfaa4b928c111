"""Writing a checkpoint, and the commit protocol.

    checkpoints/gpt2_345m/
      latest_checkpointed_iteration.txt     the tracker: the iteration to load
      iter_0000300/manifest.json, boxes/rank_00000.jsonl, mp_rank_00/model.safetensors, master_dp_00.safetensors, ...

Every rank writes its files into `iter_0000300.tmp-<attempt>/`, and last its table: the boxes and hashes of what it
wrote. Rank 0 waits for all tables, writes the manifest, renames the folder and replaces the tracker. Nothing here
is a collective operation, and a crash at any moment leaves the earlier checkpoints and their tracker untouched.

`attempt` is a word that all ranks share and that no other save shares (one random number, sent to all when the run
starts, with a count of its saves). It keeps what a crashed attempt left behind, files and tables alike, out of this
one without any waiting: its folder has another name. Rank 0 removes such folders when it next saves.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from data_utils.files import flush_to_disk, sync_folder
from megatron.gpt2.checkpoint.boxes import extent
from megatron.gpt2.checkpoint.folder import TRACKER, aside, iterations
from megatron.gpt2.checkpoint.manifest import (
    DTYPE_CODES,
    MANIFEST,
    check_size,
    file_header,
    manifest_bytes,
    parse_files,
    summary,
    table_path,
    tensor_name,
)
from megatron.gpt2.checkpoint.reader import THREADS, Checkpoint, in_threads
from megatron.gpt2.checkpoint.source import TensorInfo
from mpu.partition import Box

_PAUSE = 0.02  # seconds between two looks
_NAMED = 8  # ranks that a message names
_CHUNK = 1 << 20  # hashed while it still lies in the processor's cache
_WRITE_BACK = 16 << 20


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor, to be written.

    tensor: the values of the box, without padding, on any device. On the meta device it has only a shape and a dtype;
    `make` then returns the values when they are written. global_shape: without padding. offset: of the box in the
    global tensor.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    make: Callable[[], Tensor] | None = None

    @property
    def box(self) -> Box:
        """Where the values belong."""
        return Box(tuple(self.offset), tuple(self.tensor.shape))


Files = Mapping[str, Mapping[str, Piece]]  # {path in the iteration's folder: {tensor name: piece}}


@dataclass
class Parts:
    """What the thread that writes a checkpoint, and the run, which has collectives, tell each other meanwhile.

    own: done when this rank's part is on the disk, or has failed. deadline: of `time.monotonic()`, when to wait no
    longer for parts that may never come. problem: why any rank could not write its part, else "".
    """

    own: Future[None] = field(default_factory=Future)
    deadline: float = math.inf
    problem: str = ""


def write_checkpoint(
    directory: str | Path,
    iteration: int,
    *,
    facts: Mapping[str, Any],
    files: Files,
    rank: int,
    world_size: int,
    attempt: str,
    timeout_s: float,
    log: Callable[[str], None] = print,
    keep_last: int | None = None,
    parts: Parts | None = None,
) -> Path:
    """Write this rank's `files`; rank 0 commits.

    All ranks call it at the same step. Rank 0 returns once the checkpoint is committed, each other rank once its part
    is on the disk. facts: what the manifest says about the run, in JSON's types; only rank 0 reads them. keep_last: how
    many iterations rank 0 leaves, this one among them (default: all).

    OSError, one line, if this rank cannot write, and on rank 0 if any rank cannot. TimeoutError, which is an OSError,
    if a rank's part is missing after `timeout_s` seconds, or at the deadline of `parts`.
    """
    directory, parts = Path(directory), parts or Parts()
    final = directory / f"iter_{iteration:07d}"
    folder = directory / f"{final.name}.tmp-{attempt}"
    if rank == 0:
        for stale in set(directory.glob("iter_*.tmp-*")) - {folder}:  # others may be writing into that one already
            shutil.rmtree(stale, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        write_part(folder, iteration, files, rank)
        parts.own.set_result(None)
        if rank == 0:
            tables = _collect_tables(folder, world_size, timeout_s, parts)
            _commit(folder, final, manifest_bytes(iteration, facts, tables), log)
    except BaseException as error:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            # Room for the word of the failure, so that rank 0 need not wait for the time-out.
            with contextlib.suppress(OSError):
                for file in files:
                    (folder / file).unlink(missing_ok=True)
                _put_table(folder, rank, json.dumps({"error": str(error)}).encode())
        raise
    if rank == 0 and keep_last is not None:
        _remove_older(directory, iteration, keep_last, log)
    return final


def write_part(folder: Path, iteration: int, files: Files, rank: int) -> bytes:
    """Write this rank's `files` into `folder`, and last its table, which is returned. OSError if one cannot be written,
    or is not as a reader accepts it."""
    # What is made when it is written may be as large as memory: one at a time.
    streamed = any(piece.make for pieces in files.values() for piece in pieces.values())
    entries = in_threads(
        lambda file: write_tensors(folder, file, iteration, files[file]), files, 1 if streamed else THREADS
    )
    second = json.dumps({file: entry for file, entry in zip(files, entries, strict=True) if entry})
    tensors = {
        tensor_name(key): TensorInfo(piece.tensor.dtype, piece.global_shape)
        for pieces in files.values()
        for key, piece in pieces.items()
    }
    try:
        table = parse_files(json.loads(second), tensors)
        for file, info in table.files.items():
            check_size(folder / file, info.bytes)
    except ValueError as error:
        raise OSError(f"not what was written: {error}") from error
    first = {
        name: [DTYPE_CODES[tensors[name].dtype], tensors[name].shape, *extent([part.box for part in parts])]
        for name, parts in table.parts.items()
    }
    data = f"{json.dumps({'files': len(table.files), 'tensors': first})}\n{second}\n".encode()
    _put_table(folder, rank, data)
    return data


def write_tensors(folder: Path, file: str, iteration: int, pieces: Mapping[str, Piece]) -> dict[str, Any]:
    """Write and fsync `folder`/`file`. Returns its entry in the table: {"bytes", "sha256", "boxes": {key: {"offset",
    "shape"}}}. Empty pieces are left out, and a file without any other has no entry. OSError if it cannot be written.
    """
    pieces = {key: piece for key, piece in pieces.items() if piece.tensor.numel()}
    if not pieces:
        return {}
    header, starts, size = file_header(
        file, iteration, {key: (piece.tensor.dtype, piece.box) for key, piece in pieces.items()}
    )
    path = folder / file
    try:
        path.parent.mkdir(exist_ok=True)
        # "x": a late writer must never get at a file that another attempt has committed.
        with open(path, "xb") as stream:
            sha256 = write_values(stream, header, [pieces[key] for key in starts])
            flush_to_disk(stream)
    except OSError as error:
        raise _write_error(path, size, error) from error
    return {"bytes": size, "sha256": sha256, "boxes": {key: vars(piece.box) for key, piece in pieces.items()}}


def write_values(stream: BinaryIO, header: bytes, pieces: Iterable[Piece]) -> str:
    """Write `header` and the values of `pieces`, of which at most one is copied at a time; returns the sha256."""
    stream.write(header)
    sha256, started = hashlib.sha256(header), 0
    for piece in pieces:
        values = piece.make() if piece.make else piece.tensor
        data = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), _CHUNK):
            chunk = data[start : start + _CHUNK]
            stream.write(chunk)
            sha256.update(chunk)
            # The system is asked to write what it has by now: the fsync at the end then waits for little.
            if (end := stream.tell()) - started >= _WRITE_BACK and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), started, end - started, os.POSIX_FADV_DONTNEED)
                started = end
    return sha256.hexdigest()


def write_synced(path: Path, data: bytes) -> None:
    """Write `data` to the file `path` and fsync it. OSError if it cannot be written; there is no file then."""
    try:
        path.parent.mkdir(exist_ok=True)
        with open(path, "wb") as stream:
            stream.write(data)
            flush_to_disk(stream)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _write_error(path, len(data), error) from error


def _write_error(path: Path, size: int, error: OSError) -> OSError:
    """An OSError in one line: `error` happened while `size` bytes were written to `path`."""
    free = shutil.disk_usage(next(p for p in path.parents if p.exists())).free
    return OSError(
        f"{path}: cannot write its {size:,} bytes: {error.strerror or error} ({free:,} bytes are free "
        f"there); earlier checkpoints are untouched: make room or give another --save"
    )


def _put_table(folder: Path, rank: int, data: bytes) -> None:
    """The table of a rank, or the error in its place, appears under its name as a whole or not at all."""
    path = folder / table_path(rank)
    unfinished = path.with_suffix(".tmp")
    write_synced(unfinished, data)
    unfinished.rename(path)


def _collect_tables(
    folder: Path, world_size: int, timeout_s: float, parts: Parts
) -> list[tuple[dict[str, Any], int, str]]:
    """The summaries of the tables of all ranks, once they are there. Rank 0 keeps only the first line and the hash of
    each: the boxes concern only those who load them. OSError and TimeoutError as `write_checkpoint` says."""
    paths = {Path(table_path(rank)).name: rank for rank in range(world_size)}
    tables = (folder / table_path(0)).parent
    found: dict[int, tuple[dict[str, Any], int, str]] = {}
    began = time.monotonic()
    while True:
        # One look for all: of thousands, each would otherwise be a question to the file system.
        for name in paths.keys() & set(os.listdir(tables)):
            rank = paths.pop(name)
            found[rank] = summary((tables / name).read_bytes())
            if "error" in found[rank][0]:
                raise OSError(f"rank {rank} could not write its part of {folder}: {found[rank][0]['error']}")
        if not paths:
            return [found[rank] for rank in range(world_size)]
        if parts.problem:
            raise OSError(parts.problem)
        deadline = min(began + timeout_s, parts.deadline)
        if time.monotonic() > deadline:
            missing = sorted(paths.values())
            more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
            raise TimeoutError(
                f"{folder}: nothing came from rank {', '.join(map(str, missing[:_NAMED]))}{more} within "
                f"{deadline - began:.3g} s; earlier checkpoints are untouched: do all nodes share the "
                "folder?"
            )
        time.sleep(_PAUSE)


def _commit(folder: Path, final: Path, manifest: bytes, log: Callable[[str], None]) -> None:
    """Make `folder`, complete but for its manifest, the checkpoint `final`."""
    write_synced(folder / MANIFEST, manifest)
    try:
        written = Checkpoint(folder)  # what cannot be opened must not be committed
    except ValueError as error:
        raise OSError(f"not what was written: {error}") from error
    for parent in [*(path for path in folder.iterdir() if path.is_dir()), folder]:
        sync_folder(parent)
    tracker = final.parent / TRACKER
    successor = tracker.with_name(TRACKER + ".tmp")
    write_synced(successor, f"{written.iteration}\n".encode())  # now: a full disk must not stop us half-way
    if final.exists():
        old = final.rename(aside(final))
        log(f"WARNING: {final} exists already and is saved again: the existing one is now {old}")
    folder.rename(final)
    sync_folder(final.parent)
    # The tracker comes last: a crash before this line leaves the earlier checkpoint in charge.
    successor.replace(tracker)
    sync_folder(final.parent)


def _remove_older(directory: Path, iteration: int, keep_last: int, log: Callable[[str], None]) -> None:
    """Remove iterations before `iteration`, which is committed and in the tracker; the newest `keep_last` - 1 stay.

    Newer ones, and those that were renamed aside, belong to another course of the run, and a person decides about them.
    A folder is first renamed to a name that no load takes and that the next save clears away.
    """
    older = [folder for number, folder in iterations(directory) if number < iteration]
    try:
        for folder in reversed(older[keep_last - 1 :]):
            removed = folder.rename(f"{folder}.tmp-removed")
            sync_folder(directory)
            shutil.rmtree(removed)
    except OSError as error:
        log(f"WARNING: --keep-last {keep_last}: {error.filename} could not be removed: {error.strerror}")


def set_newer_aside(directory: str | Path, iteration: int, log: Callable[[str], None]) -> int:
    """Rename the checkpoints beyond `iteration` aside, and let the tracker name the newest of the others: its
    iteration, or -1, with nothing changed, if there is none. Rank 0 calls it, while no save is under way."""
    found, tracker = iterations(Path(directory)), Path(directory) / TRACKER
    newest = next((number for number, _ in found if number <= iteration), -1)
    if newest >= 0:
        # First: a crash after it leaves a tracker that is right.
        successor = tracker.with_name(TRACKER + ".tmp")
        write_synced(successor, f"{newest}\n".encode())
        successor.replace(tracker)
        for number, folder in reversed(found):
            if number > iteration:
                log(f"{folder} is now {folder.rename(aside(folder))}")
        sync_folder(directory)
    return newest
