"""Which part of which file goes into which shard. It depends on the files alone, not on the number of workers."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_utils.corpora.documents import json_object
from data_utils.corpora.files import MANIFESTS, is_json
from data_utils.files.compression import compression_of
from data_utils.preprocessing.records import BOM, FileRange

LEAST_SHARD_BYTES = 1 << 23
MOST_SHARDS = 1024  # of one large input: more would be many files for nothing

Shard = tuple[FileRange, ...]


def expand(inputs: Sequence[str]) -> list[str]:
    """The files that `inputs` name: files, glob patterns, and folders. The files of a folder are taken in the order of
    their names; hidden ones are left out, and so are the manifests that a stage of tools/openwebtext leaves there.
    FileNotFoundError or ValueError names --input."""
    found: list[str] = []
    for name in inputs:
        if os.path.isdir(name):
            paths = sorted(str(path) for path in Path(name).rglob("*") if path.is_file()
                           and not any(part.startswith(".") or part == MANIFESTS
                                       for part in path.relative_to(name).parts))
        else:
            paths = [name] if os.path.exists(name) else sorted(glob.glob(name))
        if not paths:
            raise FileNotFoundError(f"--input {name}: no such file" if not os.path.isdir(name) else
                                    f"--input {name}: the folder holds no file")
        found += paths
    for path in found:
        if not os.access(path, os.R_OK):
            raise ValueError(f"--input {path}: may not be read by this user")
    return found


def whole_file(path: str, keys: tuple[str, ...]) -> FileRange:
    """A whole file as one range. JSON is recognised by its name, or by a first line that is an object with the keys."""
    with open(path, "rb") as file:
        head = file.read(1 << 16)
        size = file.seek(0, os.SEEK_END)
    packed = compression_of(path) is not None
    if head[:4] == b"PAR1":
        kind = "parquet"
    elif is_json(path) or (not packed and _is_object(head, keys)):
        kind = "packed" if packed or head.removeprefix(BOM).lstrip()[:1] == b"[" else "json"
    else:
        kind = "text"
        if len(keys) > 1:
            raise ValueError(f"{path} is plain text, which has no --json-keys {' '.join(keys)}")
    return FileRange(path, kind, 0, size)


def _is_object(head: bytes, keys: tuple[str, ...]) -> bool:
    try:
        return all(key in json_object(head.partition(b"\n")[0]) for key in keys)
    except (ValueError, RecursionError):
        return False


def cut(spans: Sequence[FileRange]) -> list[Shard]:
    """Shards of about equal size: large files of JSON lines are cut between lines, small files are joined."""
    total = sum(span.stop - span.start for span in spans)
    least = max(LEAST_SHARD_BYTES, -(-total // MOST_SHARDS))
    shards: list[Shard] = []
    open_shard: list[FileRange] = []
    size = 0
    for span in (part for whole in spans for part in _parts(whole, least)):
        open_shard.append(span)
        size += span.stop - span.start
        if size >= least:
            shards.append(tuple(open_shard))
            open_shard, size = [], 0
    return [*shards, tuple(open_shard)] if open_shard else shards


def _parts(span: FileRange, least: int) -> Iterator[FileRange]:
    if span.kind != "json" or span.stop < 2 * least:
        yield span
        return
    start = 0
    with open(span.path, "rb") as file:
        while start < span.stop:
            file.seek(min(start + least, span.stop) - 1)
            file.readline()  # to the end of the line that holds the last byte
            stop = min(file.tell(), span.stop)
            yield FileRange(span.path, span.kind, start, stop)
            start = stop
