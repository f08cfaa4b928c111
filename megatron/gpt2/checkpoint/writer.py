"""Write and commit a checkpoint in the native format.

    checkpoints/gpt2_345m/
      latest_checkpointed_iteration.txt     the latest-iteration file: the iteration to load
      iter_0000300/manifest.json, tables/rank_00000.jsonl, mp_rank_00/model.safetensors, master_dp_00.safetensors, ...

Every rank writes its files into `iter_0000300.tmp-<save_id>/`, and then its table, which lists the slices and hashes of
these files. Rank 0 waits for all tables (saver.py), writes the manifest, renames the folder and replaces the
latest-iteration file. The functions of writer.py call no collective. A crash before the latest-iteration file is
replaced leaves this file and the earlier checkpoints unchanged.

`save_id` consists of `start_id` (saver.py) and the number of the save, so it is equal on all ranks and different in
every save. A crashed save therefore leaves a separate folder, which rank 0 removes in the next save.
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

from data_utils.command_line import Log
from data_utils.files import (
    IO_THREADS,
    add_path,
    atomic_write,
    checksummed_lines,
    flush_to_disk,
    fsync_path,
    in_threads,
    rename_old,
)
from megatron.gpt2.checkpoint.interface import Shape, TensorInfo
from megatron.gpt2.checkpoint.reader import (
    CHECKPOINT_VERSION,
    MANIFEST,
    SAFETENSORS_CODES,
    FileInfo,
    NativeCheckpoint,
    check_file_size,
    extent,
    file_header,
    parse_table,
    table_path,
    tensor_name,
)
from megatron.gpt2.checkpoint.save_folder import LATEST_FILE, list_iterations
from mpu.partition import TensorSlice

_HASH_BYTES = 1 << 20  # A block of _HASH_BYTES fits into the processor's cache, so that hashing is fast.
_WRITE_BACK = 16 << 20


@dataclass(frozen=True)
class ShardedTensor:
    """A slice of a global tensor that this rank writes.

    data: the values, without padding, on any device. If `data` is on the meta device, it only gives shape and dtype,
        and `load` returns the values when they are written.
    global_shape: without padding.
    global_offset: the first index of the slice in the global tensor.
    """

    data: Tensor
    global_shape: Shape
    global_offset: Shape
    load: Callable[[], Tensor] | None = None

    @property
    def tensor_slice(self) -> TensorSlice:
        """The slice of the global tensor that the values belong to."""
        return TensorSlice(tuple(self.global_offset), tuple(self.data.shape))


ShardedFiles = Mapping[str, Mapping[str, ShardedTensor]]  # {path in the iteration's folder: {key: shard}}


def temporary_folder(final: Path, save_id: str) -> Path:
    """Return the folder into which the ranks write the checkpoint `final` before the commit."""
    return final.with_name(f"{final.name}.tmp-{save_id}")


def write_rank_files(folder: Path, iteration: int, files: ShardedFiles, rank: int) -> bytes:
    """Write this rank's `files` into `folder`, then its table, and return the table. Raises OSError if a file cannot be
    written, or if a reader would refuse the table."""
    # Tensors that `load` returns may need all memory, so files with `load` are written one at a time.
    streamed = any(shard.load for shards in files.values() for shard in shards.values())
    infos = in_threads(
        lambda file: write_safetensors(folder, file, iteration, files[file]), files, 1 if streamed else IO_THREADS
    )
    file_entries = {
        file: {
            "bytes": info.bytes,
            "sha256": info.sha256,
            "slices": {key: vars(tensor_slice) for key, tensor_slice in info.slices.items()},
        }
        for file, info in zip(files, infos, strict=True)
        if info.slices
    }
    tensors = {
        tensor_name(key): TensorInfo(shard.data.dtype, shard.global_shape)
        for shards in files.values()
        for key, shard in shards.items()
    }
    files_line = json.dumps(file_entries)
    try:
        table = parse_table(json.loads(files_line), tensors)
        for file, info in table.files.items():
            check_file_size(folder / file, info.bytes)
    except ValueError as error:
        raise OSError(f"the files were not written correctly: {error}") from error
    extents = {
        name: [SAFETENSORS_CODES[tensors[name].dtype], tensors[name].shape, *extent(shards)]
        for name, shards in table.shards.items()
    }
    tensors_line = json.dumps({"files": len(file_entries), "tensors": extents})
    table_bytes = f"{tensors_line}\n{files_line}\n".encode()
    write_atomically(folder / table_path(rank), table_bytes)
    return table_bytes


def write_safetensors(folder: Path, file: str, iteration: int, shards: Mapping[str, ShardedTensor]) -> FileInfo:
    """Write and fsync `folder`/`file`, one shard at a time. Empty shards are left out. A file with only empty shards is
    not written. Raises OSError if the file cannot be written."""
    slices = {key: shard.tensor_slice for key, shard in shards.items() if shard.data.numel()}
    header, starts, size = file_header(file, iteration, {key: (shards[key].data.dtype, slices[key]) for key in slices})
    sha256 = hashlib.sha256(header)
    if not slices:
        return FileInfo(0, "", slices)
    # Mode "x" keeps a slow writer from overwriting a file that a different save has committed.
    with _write_errors(folder / file, size), open(folder / file, "xb") as stream:
        stream.write(header)
        started = 0
        for shard in (shards[key] for key in starts):
            values = shard.load() if shard.load else shard.data
            data = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), _HASH_BYTES):
                block = data[start : start + _HASH_BYTES]
                stream.write(block)
                sha256.update(block)
                # Start to write to the disk now, so that the fsync at the end takes little time.
                if (end := stream.tell()) - started >= _WRITE_BACK and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(stream.fileno(), started, end - started, os.POSIX_FADV_DONTNEED)
                    started = end
        flush_to_disk(stream)
    return FileInfo(size, sha256.hexdigest(), slices)


def write_atomically(path: Path, data: bytes) -> None:
    """Write and fsync a temporary file, then rename it to `path`, so that a reader never sees a partial file. Makes the
    folder if needed. Raises OSError if the file cannot be written."""
    new = path.with_name(f"{path.name}.tmp")
    with _write_errors(path, len(data)):
        new.unlink(missing_ok=True)
        with open(new, "xb") as stream:
            stream.write(data)
            flush_to_disk(stream)
        # Do not use `atomic_write`: it would fsync the folder, which rank 0 may rename as soon as the table exists.
        new.replace(path)


@contextlib.contextmanager
def _write_errors(path: Path, size: int) -> Iterator[None]:
    """Make the folder of `path`. An OSError in the block is raised with a message in one line, which names `path` and
    its `size` in bytes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        add_path(error, path)
        raise OSError(
            f"{path}: cannot write its {size:,} bytes: {error.strerror or error}; earlier checkpoints are untouched: "
            "make room or give another --save"
        ) from error


def manifest_bytes(iteration: int, metadata: Mapping[str, Any], tables: Iterable[bytes]) -> bytes:
    """Return the manifest with its hash.

    metadata: values about the run, of JSON types.
    tables: the tables by rank. Only one table is in memory at a time, and only its first line is parsed.
    """
    tensors: dict[str, Any] = {}
    table_ranges: dict[str, list[tuple[int, ...]]] = {}
    table_entries: dict[str, Any] = {}
    for rank, table in enumerate(tables):
        tensors_line = json.loads(table.partition(b"\n")[0])
        for name, (dtype, shape, *rows_and_entries) in tensors_line["tensors"].items():
            info = {"dtype": dtype, "shape": shape}
            assert tensors.setdefault(name, info) == info, (name, tensors[name], info)
            table_ranges.setdefault(name, []).append((rank, *rows_and_entries))
        sha256 = hashlib.sha256(table).hexdigest()
        table_entries[table_path(rank)] = {"bytes": len(table), "sha256": sha256, "files": tensors_line["files"]}
    range_index: dict[tuple[tuple[int, ...], ...], int] = {}
    for name, info in tensors.items():
        info["table_ranges"] = range_index.setdefault(tuple(table_ranges[name]), len(range_index))
    entries = {"version": CHECKPOINT_VERSION, "iteration": iteration, "metadata": metadata, "tensors": tensors}
    return checksummed_lines(entries | {"table_ranges": list(range_index), "tables": table_entries})


def commit(
    folder: Path,
    final: Path,
    metadata: Mapping[str, Any],
    world_size: int,
    log: Log,
    check_owner: Callable[[], object] = lambda: None,
) -> None:
    """Write the manifest of `folder`, whose other files are complete, and rename the folder to `final`.

    check_owner: raises OSError if another run owns the folder of `final`. A run that takes over this folder after the
        check removes `folder` and the new latest-iteration file, so the renames here fail.
    """
    iteration = int(final.name.removeprefix("iter_"))
    tables = ((folder / table_path(rank)).read_bytes() for rank in range(world_size))
    write_atomically(folder / MANIFEST, manifest_bytes(iteration, metadata, tables))
    try:
        NativeCheckpoint(folder)  # A checkpoint that cannot be opened is not committed.
    except ValueError as error:
        raise OSError(f"the files were not written correctly: {error}") from error
    sync_folders(folder)
    latest_file, line = final.parent / LATEST_FILE, f"{iteration}\n".encode()
    # Replace the latest-iteration file last, so that after a crash the file names the earlier checkpoint.
    new_latest_path = latest_file.with_name(f"{LATEST_FILE}.tmp-{folder.name}")  # Only this run uses this name.
    with _write_errors(latest_file, len(line)), atomic_write(latest_file, new_latest_path) as new_latest:
        new_latest.write(line)
        # Flush before the renames, so that a full disk cannot stop the commit after the first rename.
        flush_to_disk(new_latest)
        check_owner()
        if final.exists() and folder.exists():
            log(f"WARNING: {final} exists already and is saved again: the existing one is now {rename_old(final)}")
        folder.rename(final)
        fsync_path(final.parent)
        # `atomic_write` renames the latest-iteration file at the end of the block.


def sync_folders(folder: Path) -> None:
    """Fsync `folder` and its subfolders, so that the names of all files are on the disk."""
    for path in (*(path for path in folder.iterdir() if path.is_dir()), folder):
        fsync_path(path)


def remove_old_checkpoints(directory: Path, iteration: int, keep_last: int | None, log: Log) -> None:
    """Remove iterations before `iteration`, which is committed, except the newest `keep_last` - 1. None keeps all.

    Newer iterations and folders renamed to `.old-N` stay: the user decides about them. Before its removal, a folder
    gets a temporary name, so that no load opens it. The next save removes folders with temporary names.
    """
    older = [folder for number, folder in list_iterations(directory) if number < iteration]
    try:
        for folder in reversed(older[keep_last - 1 :] if keep_last else []):
            removed = folder.rename(temporary_folder(folder, "removed"))
            fsync_path(directory)
            shutil.rmtree(removed)
    except OSError as error:
        log(f"WARNING: --keep-last {keep_last}: {error.filename} could not be removed: {error.strerror}")


def rename_newer_checkpoints(directory: str | Path, iteration: int, log: Log) -> int:
    """Rename checkpoints after `iteration` to `.old-N`, let `LATEST_FILE` name the newest remaining checkpoint, and
    return its iteration. If no checkpoint would remain, change nothing and return -1. Only rank 0 calls this function,
    between saves."""
    iterations = list_iterations(Path(directory))
    newest = next((number for number, _ in iterations if number <= iteration), -1)
    if newest >= 0:
        # The latest-iteration file is written first, so that the file is right even after a crash in the next lines.
        write_atomically(Path(directory) / LATEST_FILE, f"{newest}\n".encode())
        fsync_path(directory)
        for number, folder in reversed(iterations):
            if number > iteration:
                log(f"{folder} is now {rename_old(folder)}")
        fsync_path(directory)
    return newest
