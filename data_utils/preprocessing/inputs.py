"""The input of a preprocessing run: which files, which part of which file goes into which shard, and its documents.

The shards depend only on the files, not on the number of workers. A file holds lines of JSON, a JSON array, plain text
or the rows of a Parquet file.
"""

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_utils.corpora.documents import BOM, MANIFESTS, compression_of, is_json, json_object, objects, open_bytes
from data_utils.files import content_hash

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

    def content_hash(self) -> str:
        """The ContentHash of the bytes, as text."""
        return content_hash(self.path, self.start, self.stop)


Shard = tuple[FileRange, ...]


def expand(inputs: Sequence[str]) -> list[str]:
    """The files that `inputs` name: files, glob patterns, and folders. The files of a folder are taken in the order of
    their names; hidden ones are left out, and so are the manifests that a stage of tools/openwebtext leaves there.
    FileNotFoundError or ValueError names --input."""
    found: list[str] = []
    for name in inputs:
        paths, missing = [name] if os.path.exists(name) else sorted(glob.glob(name)), "no such file"
        if os.path.isdir(name):
            missing = "the folder holds no file"
            paths = sorted(
                str(path)
                for path in Path(name).rglob("*")
                if path.is_file()
                and not any(part.startswith(".") or part == MANIFESTS for part in path.relative_to(name).parts)
            )
        if not paths:
            raise FileNotFoundError(f"--input {name}: {missing}")
        found += paths
    for path in found:
        if not os.access(path, os.R_OK):
            raise ValueError(f"--input {path}: may not be read by this user")
    return found


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
    shards: list[Shard] = []
    open_shard: list[FileRange] = []
    for span in (part for whole in spans for part in _parts(whole, least)):
        open_shard.append(span)
        if sum(span.size for span in open_shard) >= least:
            shards.append(tuple(open_shard))
            open_shard = []
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


def records(
    span: FileRange, keys: tuple[str, ...], see: Callable[[bytes], object] = len
) -> Iterator[tuple[int, Record]]:
    """The documents in a range of a file, each with the number of its (last) line or row. Some may be unreadable; of
    plain text they are the lines that are not UTF-8.

    keys: the fields that are wanted, which a Parquet file has to have as columns. see: is called with all bytes of a
    `json` range, each line just before it is yielded. ValueError names a file that is damaged.
    """
    if span.kind == "json":
        yield from enumerate(_lines(span, see), 1)
    elif span.kind == "parquet":
        yield from enumerate(_rows(span.path, keys), 1)
    else:
        with open_bytes(span.path) as file:
            if span.kind == "packed":
                yield from enumerate(objects(file, span.path), 1)
                return
            parts, number = [], 0
            for number, line in enumerate(file, 1):
                try:
                    parts.append(line.decode("utf-8"))
                except UnicodeDecodeError:
                    yield number, line  # which is not JSON either
            yield number, {keys[0]: "".join(parts)}


def _lines(span: FileRange, see: Callable[[bytes], object]) -> Iterator[bytes]:
    with open(span.path, "rb", buffering=1 << 18) as file:
        position = span.start
        if position == 0 and file.read(len(BOM)) == BOM:
            position = len(BOM)
            see(BOM)
        file.seek(position)
        for line in file:
            position += len(line)
            see(line)
            yield line
            if position >= span.stop:
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
