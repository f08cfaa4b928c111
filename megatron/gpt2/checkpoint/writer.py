"""Writing a checkpoint, and the commit protocol.

    checkpoints/gpt2_345m/
      latest_checkpointed_iteration.txt     the tracker: the iteration to load
      iter_0000300/manifest.json, boxes/rank_00000.jsonl, mp_rank_00/model.safetensors, master_dp_00.safetensors, ...

Every rank writes its files into `iter_0000300.tmp-<attempt>/`, and last its table: the boxes and hashes of what it
wrote. Rank 0 waits for all tables (saver.py), writes the manifest, renames the folder and replaces the tracker. Nothing here
is a collective operation, and a crash at any moment leaves the earlier checkpoints and their tracker untouched.

`attempt` is a word that all ranks share and that no other save shares (one random number, sent to all when the run
starts, with a count of its saves). It keeps what a crashed attempt left behind, files and tables alike, out of this
one without any waiting: its folder has another name. Rank 0 removes such folders when it next saves.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils.files import CHECKPOINT_VERSION, flush_to_disk, replacing, sealed_lines, sync_folder
from megatron.gpt2.checkpoint.folder import TRACKER, Log, iterations
from megatron.gpt2.checkpoint.reader import (
    DTYPE_CODES,
    MANIFEST,
    THREADS,
    Checkpoint,
    FileInfo,
    check_size,
    extent,
    file_header,
    in_threads,
    parse_files,
    table_path,
    tensor_name,
)
from megatron.gpt2.checkpoint.source import TensorInfo
from megatron.gpt2.monitor.run_log import set_aside
from mpu.partition import Box

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


def unfinished(final: Path, attempt: str) -> Path:
    """The folder in which the ranks write the checkpoint `final` before it is committed."""
    return final.with_name(f"{final.name}.tmp-{attempt}")


def write_part(folder: Path, iteration: int, files: Files, rank: int) -> bytes:
    """Write this rank's `files` into `folder`, and last its table, which is returned. OSError if one cannot be written,
    or is not as a reader accepts it."""
    # What is made when it is written may be as large as memory: one at a time.
    streamed = any(piece.make for pieces in files.values() for piece in pieces.values())
    infos = in_threads(
        lambda file: write_tensors(folder, file, iteration, files[file]), files, 1 if streamed else THREADS
    )
    listed = {
        file: info._asdict() | {"boxes": {key: vars(box) for key, box in info.boxes.items()}}
        for file, info in zip(files, infos, strict=True)
        if info.boxes
    }
    tensors = {
        tensor_name(key): TensorInfo(piece.tensor.dtype, piece.global_shape)
        for pieces in files.values()
        for key, piece in pieces.items()
    }
    second = json.dumps(listed)
    try:
        table = parse_files(json.loads(second), tensors)
        for file, info in table.files.items():
            check_size(folder / file, info.bytes)
    except ValueError as error:
        raise OSError(f"not what was written: {error}") from error
    held = {
        name: [DTYPE_CODES[tensors[name].dtype], tensors[name].shape, *extent(parts)]
        for name, parts in table.parts.items()
    }
    data = f"{json.dumps({'files': len(listed), 'tensors': held})}\n{second}\n".encode()
    put_file(folder / table_path(rank), data)
    return data


def write_tensors(folder: Path, file: str, iteration: int, pieces: Mapping[str, Piece]) -> FileInfo:
    """Write and fsync `folder`/`file`, one piece at a time. Empty pieces are left out, and a file without any other is
    not written. OSError if it cannot be written."""
    boxes = {key: piece.box for key, piece in pieces.items() if piece.tensor.numel()}
    header, starts, size = file_header(file, iteration, {key: (pieces[key].tensor.dtype, boxes[key]) for key in boxes})
    sha256 = hashlib.sha256(header)
    if not boxes:
        return FileInfo(0, "", boxes)
    # "x": a late writer must never get at a file that another attempt has committed.
    with _writing(folder / file, size), open(folder / file, "xb") as stream:
        stream.write(header)
        started = 0
        for piece in (pieces[key] for key in starts):
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
        flush_to_disk(stream)
    return FileInfo(size, sha256.hexdigest(), boxes)


def put_file(path: Path, data: bytes) -> None:
    """Write the file `path`, in a new folder if need be, and fsync it. It appears under its name as a whole or not at
    all, and then nothing is left to do: rank 0 may commit as soon as it sees the last table. OSError if it cannot be
    written."""
    new = path.with_name(f"{path.name}.tmp")
    with _writing(path, len(data)):
        with open(new, "wb") as stream:
            stream.write(data)
            flush_to_disk(stream)
        new.replace(path)


@contextlib.contextmanager
def _writing(path: Path, size: int) -> Iterator[None]:
    """Make the folder of `path`, into which `size` bytes are written inside. OSError, in one line that names both."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        free = shutil.disk_usage(next(p for p in path.parents if p.exists())).free
        raise OSError(
            f"{path}: cannot write its {size:,} bytes: {error.strerror or error} ({free:,} bytes are free "
            f"there); earlier checkpoints are untouched: make room or give another --save"
        ) from error


def manifest_bytes(iteration: int, facts: Mapping[str, Any], tables: Iterable[bytes]) -> bytes:
    """The manifest, sealed. facts: what the writer says about the run, in JSON's types. tables: of each rank, by rank.
    One is looked at at a time, and only its first line is parsed: the boxes concern only those who load them."""
    tensors: dict[str, Any] = {}
    held: dict[str, list[tuple[int, ...]]] = {}
    listed: dict[str, Any] = {}
    for rank, table in enumerate(tables):
        first = json.loads(table.partition(b"\n")[0])
        for name, (dtype, shape, *found) in first["tensors"].items():
            info = {"dtype": dtype, "shape": shape}
            assert tensors.setdefault(name, info) == info, (name, tensors[name], info)
            held.setdefault(name, []).append((rank, *found))
        sha256 = hashlib.sha256(table).hexdigest()
        listed[table_path(rank)] = {"bytes": len(table), "sha256": sha256, "files": first["files"]}
    places: dict[tuple[tuple[int, ...], ...], int] = {}
    for name, info in tensors.items():
        info["held"] = places.setdefault(tuple(held[name]), len(places))
    entries = {"version": CHECKPOINT_VERSION, "iteration": iteration, "facts": facts, "tensors": tensors}
    return sealed_lines(entries | {"held": list(places), "tables": listed})


def commit(folder: Path, final: Path, facts: Mapping[str, Any], world_size: int, log: Log) -> None:
    """Make `folder`, complete but for its manifest, the checkpoint `final`."""
    iteration = int(final.name.removeprefix("iter_"))
    tables = ((folder / table_path(rank)).read_bytes() for rank in range(world_size))
    put_file(folder / MANIFEST, manifest_bytes(iteration, facts, tables))
    try:
        Checkpoint(folder)  # what cannot be opened must not be committed
    except ValueError as error:
        raise OSError(f"not what was written: {error}") from error
    for parent in (*(path for path in folder.iterdir() if path.is_dir()), folder):
        sync_folder(parent)
    tracker, number = final.parent / TRACKER, f"{iteration}\n".encode()
    # The tracker is replaced last: a crash before leaves the earlier checkpoint in charge.
    with _writing(tracker, len(number)), replacing(tracker, tracker.with_name(f"{TRACKER}.tmp")) as successor:
        successor.write(number)
        flush_to_disk(successor)  # now: a full disk must not stop us half-way
        if final.exists():
            log(f"WARNING: {final} exists already and is saved again: the existing one is now {set_aside(final)}")
        folder.rename(final)
        sync_folder(final.parent)
        # Leaving this block renames the new tracker into place.


def remove_older(directory: Path, iteration: int, keep_last: int | None, log: Log) -> None:
    """Remove iterations before `iteration`, which is committed and in the tracker; the newest `keep_last` - 1 stay, for
    None all.

    Newer ones, and those that were renamed aside, belong to another course of the run, and a person decides about them.
    A folder is first renamed to a name that no load takes and that the next save clears away.
    """
    older = [folder for number, folder in iterations(directory) if number < iteration]
    try:
        for folder in reversed(older[keep_last - 1 :] if keep_last else []):
            removed = folder.rename(unfinished(folder, "removed"))
            sync_folder(directory)
            shutil.rmtree(removed)
    except OSError as error:
        log(f"WARNING: --keep-last {keep_last}: {error.filename} could not be removed: {error.strerror}")


def set_newer_aside(directory: str | Path, iteration: int, log: Log) -> int:
    """Rename the checkpoints beyond `iteration` aside, and let the tracker name the newest of the others: its
    iteration, or -1, with nothing changed, if there is none. Rank 0 calls it, while no save is under way."""
    found = iterations(Path(directory))
    newest = next((number for number, _ in found if number <= iteration), -1)
    if newest >= 0:
        # First: a crash after it leaves a tracker that is right.
        put_file(Path(directory) / TRACKER, f"{newest}\n".encode())
        for number, folder in reversed(found):
            if number > iteration:
                log(f"{folder} is now {set_aside(folder)}")
        sync_folder(directory)
    return newest
