"""What lies in one iteration's folder: safetensors files that hold boxes, and the manifest that vouches for them.

A saved tensor is one or more boxes: global shape, offset, local shape. manifest.json is one JSON object:

    version     of this format
    iteration   as in the folder's name
    facts       whatever the writer says about the run
    tensors     {tensor: {"dtype", "shape"}}, shapes being global and without padding
    files       {path: {"bytes", "sha256", "boxes": {key: {"offset", "shape"}}}}
    sha256      of every byte of the manifest before it

A key is the tensor's name; a file that holds several boxes of one tensor appends "#1", "#2", ... The bytes of a
file's own header follow from the manifest, so that a reader compares headers and parses none: one with a duplicate
key, of a wrong size, or from another iteration or rank cannot pass.
"""

from __future__ import annotations

import hashlib
import json
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

from mpu.partition import Box

VERSION = 1
MANIFEST = "manifest.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
CHUNK = 1 << 20  # hashed while it still lies in the processor's cache
WRITE_BACK = 16 << 20
THREADS = 4
# No path of this form is absolute or has a "..".
FILE_NAME = re.compile(r"mp_rank_\d{2,5}/[a-z]\w*\.safetensors", re.ASCII)


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor, to be written. `tensor` (any device) is the box itself, without padding; one on the
    meta device has its shape and dtype alone, and `make` gives it when its turn to be written comes."""

    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    make: Callable[[], Tensor] | None = None


T = TypeVar("T")
R = TypeVar("R")


def in_threads(work: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> list[R]:
    """`work` of each item, by several threads at once: hashing and copying both leave the interpreter to others. The
    first error in the order of the items is raised, after all threads have ended."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def tensor_name(key: str) -> str:
    return key.partition("#")[0]


def file_header(file: str, iteration: int, boxes: Mapping[str, Box],
                dtypes: Mapping[str, torch.dtype]) -> tuple[bytes, dict[str, int], int]:
    """The safetensors header of `file`, where the bytes of each key start (in their order), and the file's size.

    Wide dtypes come first, so that every tensor is aligned. `dtypes` is by tensor, `boxes` by key.
    """
    size = {key: dtypes[tensor_name(key)].itemsize for key in boxes}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "file": file, "iteration": str(iteration)}}
    starts: dict[str, int] = {}
    end = 0
    for key in sorted(boxes, key=lambda key: (-size[key], key)):
        starts[key], end = end, end + boxes[key].numel * size[key]
        entries[key] = {"dtype": DTYPE_CODES[dtypes[tensor_name(key)]], "shape": boxes[key].shape,
                        "data_offsets": [starts[key], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {key: len(header) + start for key, start in starts.items()}, len(header) + end


def write_error(path: Path, size: int, error: OSError) -> OSError:
    """`error`, met while `size` bytes were written to `path`, in one line."""
    free = shutil.disk_usage(next(p for p in path.parents if p.exists())).free
    return OSError(f"{path}: cannot write its {size:,} bytes: {error.strerror or error} ({free:,} bytes are free "
                   f"there); earlier checkpoints are untouched: make room or give another --save")


def write_tensors(folder: Path, file: str, iteration: int, pieces: Mapping[str, Piece]) -> dict[str, Any]:
    """Write and fsync `folder`/`file`, hashing on the way; at most one tensor is copied at a time.

    Returns {"tensors", "files"} as in the manifest, of this file alone. Empty pieces are left out, and so is a
    file without any other. OSError where it cannot be written.
    """
    pieces = {key: piece for key, piece in pieces.items() if piece.tensor.numel()}
    if not pieces:
        return {"tensors": {}, "files": {}}
    boxes = {key: Box(tuple(piece.offset), tuple(piece.tensor.shape)) for key, piece in pieces.items()}
    dtypes = {tensor_name(key): piece.tensor.dtype for key, piece in pieces.items()}
    header, starts, size = file_header(file, iteration, boxes, dtypes)
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
                    chunk = data[start:start + CHUNK]
                    stream.write(chunk)
                    sha.update(chunk)
                    started = _write_back(stream, started)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise write_error(path, size, error) from error
    return {"tensors": {tensor_name(key): {"dtype": DTYPE_CODES[piece.tensor.dtype], "shape": piece.global_shape}
                        for key, piece in pieces.items()},
            "files": {file: {"bytes": size, "sha256": sha.hexdigest(),
                             "boxes": {key: {"offset": box.offset, "shape": box.shape}
                                       for key, box in boxes.items()}}}}


def _write_back(stream: BinaryIO, started: int) -> int:
    """Have the disk begin with what lies between `started` and the end of the file, once that is worth it: the fsync
    at the end then waits for little. Returns what is under way by now."""
    end = stream.tell()
    if end - started < WRITE_BACK or not hasattr(os, "posix_fadvise"):
        return started
    os.posix_fadvise(stream.fileno(), started, end - started, os.POSIX_FADV_DONTNEED)
    return end


def manifest_bytes(iteration: int, facts: Mapping[str, Any], tensors: Mapping[str, Any],
                   files: Mapping[str, Any]) -> bytes:
    parts = {"version": VERSION, "iteration": iteration, "facts": facts, "tensors": tensors, "files": files}
    body = "{" + "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in parts.items()) + '"sha256": "'
    return body.encode() + manifest_tail(body.encode())


def manifest_tail(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode() + b'"}\n'
