"""The input of a preprocessing run: which files, which part of which file goes into which shard, and its documents.

The shards depend only on the files, not on the number of workers. A file holds lines of JSON, a JSON array, plain text
or the rows of a Parquet file.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_utils.corpora import (
    BOM,
    MANIFESTS,
    compression_of,
    is_json,
    json_object,
    objects,
    open_bytes,
    plain_text,
)

LEAST_SHARD_BYTES = 1 << 23
MOST_SHARDS = 1024  # of one large input: more would be many files for nothing

Record = Any  # a line's bytes, or an object


@dataclass(frozen=True)
class FileRange:
    """A part of an input file: the bytes from `start` to `stop`, whole lines of a file of kind `json`, else all of it.

    kind: json, packed (JSON that is compressed or one array), text or parquet.
    """

    path: str
    kind: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start


Shard = tuple[FileRange, ...]


def all_files(folder: Path) -> list[Path]:
    """The files of a folder and its subfolders, sorted by name. Hidden ones are left out, and so are the manifests that
    a stage of tools/openwebtext leaves there."""
    found = sorted((path.relative_to(folder) for path in folder.rglob("*") if path.is_file()), key=str)
    return [folder / path for path in found if not any(part[0] == "." or part == MANIFESTS for part in path.parts)]


def whole_file(path: str, keys: tuple[str, ...]) -> FileRange:
    """A whole file as one range. JSON is recognised by its name, or by a first line that is an object with the keys."""
    with open(path, "rb") as file:
        head = file.read(1 << 16)
    packed = compression_of(path) is not None
    if head[:4] == b"PAR1":
        kind = "parquet"
    elif is_json(path) or (not packed and _is_object(head, keys)):
        kind = "packed" if packed or head.removeprefix(BOM).lstrip()[:1] == b"[" else "json"
    else:
        kind = "text"
        if len(keys) > 1:
            raise ValueError(f"{path} is plain text, which has no --json-keys {' '.join(keys)}")
    return FileRange(path, kind, 0, os.path.getsize(path))


def _is_object(head: bytes, keys: tuple[str, ...]) -> bool:
    try:
        return all(key in json_object(head.partition(b"\n")[0]) for key in keys)
    except (ValueError, RecursionError):
        return False


def cut(spans: Sequence[FileRange]) -> list[Shard]:
    """Shards of about equal size: large files of JSON lines are cut between lines, small files are joined."""
    least = max(LEAST_SHARD_BYTES, -(-sum(span.size for span in spans) // MOST_SHARDS))
    shards: list[list[FileRange]] = [[]]
    size = 0  # of the last shard
    for span in (part for whole in spans for part in _parts(whole, least)):
        if size >= least:
            shards.append([])
            size = 0
        shards[-1].append(span)
        size += span.size
    return list(map(tuple, shards))


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


def records(span: FileRange, keys: tuple[str, ...]) -> Iterator[tuple[int, Record]]:
    """The documents in a range of a file, each with the number of its (last) line or row. Some may be unreadable; of
    plain text they are the lines that are not UTF-8.

    keys: the fields that are wanted, which a Parquet file has to have as columns. ValueError names a file that is
    damaged.
    """
    if span.kind == "parquet":
        yield from enumerate(_rows(span.path, keys), 1)
        return
    with open_bytes(span.path) as file:
        if span.kind == "text":
            yield from plain_text(file, keys[0])
        elif span.kind == "packed":
            yield from enumerate(objects(file, span.path), 1)
        else:
            file.seek(span.start)
            left = span.size
            for number, line in enumerate(file, 1):
                left -= len(line)
                yield number, line.removeprefix(BOM) if span.start == 0 and number == 1 else line
                if left <= 0:
                    return


def _rows(path: str, keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{path} is a Parquet file, which needs the package pyarrow: pip install pyarrow") from None
    try:
        file = parquet.ParquetFile(path)
        for key in keys:
            if key not in file.schema_arrow.names:
                raise ValueError(f"{path} has no column {key!r}, but {', '.join(file.schema_arrow.names)}: --json-keys")
        for batch in file.iter_batches(1024, columns=list(keys)):
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from None
