"""The files of tensors in an iteration's folder: safetensors, hashed while they are written.

A saved tensor is one or more boxes: offset and shape within the global tensor. megatron/gpt2/checkpoint/manifest.py has
the manifest, which vouches for the files.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from data_utils.files import flush_to_disk, safetensors_header
from mpu.partition import Box

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
CHUNK = 1 << 20  # hashed while it still lies in the processor's cache
WRITE_BACK = 16 << 20
THREADS = 4
# No path of this form is absolute or has a "..".
FILE_NAME = re.compile(r"mp_rank_\d{2,5}(_\d{3})?/[a-z]\w*\.safetensors", re.ASCII)


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor, to be written.

    tensor: the values of the box, without padding, on any device. On the meta device it has a shape and a dtype alone;
    `make` then returns the values when they are written. global_shape: without padding. offset: of the box in the
    global tensor.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    make: Callable[[], Tensor] | None = None


T = TypeVar("T")
R = TypeVar("R")


def in_threads(work: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> list[R]:
    """`work` of each item, by several threads at once: hashing and copying both release Python's interpreter lock. The
    first error, in the order of the items, is raised after all threads have ended."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def tensor_name(key: str) -> str:
    """The tensor that a key of a file stands for: `x` of `x` and of `x#2`."""
    return key.partition("#")[0]


def file_header(
    file: str, iteration: int, boxes: Mapping[str, Box], dtypes: Mapping[str, torch.dtype]
) -> tuple[bytes, dict[str, int], int]:
    """The safetensors header of `file`; the byte at which each key's values start, in the order of the file; the file's
    size.

    boxes: by key. dtypes: by tensor. Wide dtypes come first, so that every tensor is aligned.
    """
    size = {key: dtypes[tensor_name(key)].itemsize for key in boxes}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "file": file, "iteration": str(iteration)}}
    starts: dict[str, int] = {}
    end = 0
    for key in sorted(boxes, key=lambda key: (-size[key], key)):
        starts[key], end = end, end + boxes[key].numel * size[key]
        entries[key] = {
            "dtype": DTYPE_CODES[dtypes[tensor_name(key)]],
            "shape": boxes[key].shape,
            "data_offsets": [starts[key], end],
        }
    header = safetensors_header(entries)
    return header, {key: len(header) + start for key, start in starts.items()}, len(header) + end


def write_error(path: Path, size: int, error: OSError) -> OSError:
    """An OSError in one line: `error` happened while `size` bytes were written to `path`."""
    free = shutil.disk_usage(next(p for p in path.parents if p.exists())).free
    return OSError(
        f"{path}: cannot write its {size:,} bytes: {error.strerror or error} ({free:,} bytes are free "
        f"there); earlier checkpoints are untouched: make room or give another --save"
    )


def write_synced(path: Path, data: bytes) -> None:
    """Write `data` to the file `path` and fsync it. OSError where it cannot be written; there is no file then."""
    try:
        path.parent.mkdir(exist_ok=True)
        with open(path, "wb") as stream:
            stream.write(data)
            flush_to_disk(stream)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise write_error(path, len(data), error) from error


def write_tensors(folder: Path, file: str, iteration: int, pieces: Mapping[str, Piece]) -> dict[str, Any]:
    """Write and fsync `folder`/`file`, hashing on the way; at most one tensor is copied at a time.

    Returns {"tensors": {tensor: {"dtype", "shape"}}, "files": {path: {"bytes", "sha256", "boxes": {key: {"offset",
    "shape"}}}}} of this file alone. Empty pieces are left out, and so is a file without any other. OSError where it
    cannot be written.
    """
    pieces = {key: piece for key, piece in pieces.items() if piece.tensor.numel()}
    if not pieces:
        return {"tensors": {}, "files": {}}
    header, starts, size = header_of(file, iteration, pieces)
    path, sha = folder / file, hashlib.sha256(header)
    try:
        path.parent.mkdir(exist_ok=True)
        # "x": a late writer must never get at a file that another attempt has committed.
        with open(path, "xb") as stream:
            stream.write(header)
            started = 0
            for key in starts:
                make, tensor = pieces[key].make, pieces[key].tensor
                flat = (make() if make else tensor).detach().cpu().contiguous().reshape(-1)
                data = flat.view(torch.uint8).numpy().data
                for start in range(0, len(data), CHUNK):
                    chunk = data[start : start + CHUNK]
                    stream.write(chunk)
                    sha.update(chunk)
                    started = _write_back(stream, started)
            flush_to_disk(stream)
    except OSError as error:
        raise write_error(path, size, error) from error
    return file_entry(file, pieces, size, sha.hexdigest())


def header_of(file: str, iteration: int, pieces: Mapping[str, Piece]) -> tuple[bytes, dict[str, int], int]:
    """`file_header` of the file that is to hold `pieces`, none of them empty."""
    boxes = {key: Box(tuple(piece.offset), tuple(piece.tensor.shape)) for key, piece in pieces.items()}
    return file_header(file, iteration, boxes, {tensor_name(key): piece.tensor.dtype for key, piece in pieces.items()})


def file_entry(file: str, pieces: Mapping[str, Piece], size: int, sha256: str) -> dict[str, Any]:
    """The entry of `file`, which holds `pieces`, in a table: as `write_tensors` returns it."""
    return {
        "tensors": {
            tensor_name(key): {"dtype": DTYPE_CODES[piece.tensor.dtype], "shape": piece.global_shape}
            for key, piece in pieces.items()
        },
        "files": {
            file: {
                "bytes": size,
                "sha256": sha256,
                "boxes": {
                    key: {"offset": piece.offset, "shape": tuple(piece.tensor.shape)} for key, piece in pieces.items()
                },
            }
        },
    }


def _write_back(stream: BinaryIO, started: int) -> int:
    """Ask the system to write what lies between byte `started` and the end of the file, once it is WRITE_BACK bytes:
    the fsync at the end then waits for little. Returns the byte up to which the system was asked."""
    end = stream.tell()
    if end - started < WRITE_BACK or not hasattr(os, "posix_fadvise"):
        return started
    os.posix_fadvise(stream.fileno(), started, end - started, os.POSIX_FADV_DONTNEED)
    return end
