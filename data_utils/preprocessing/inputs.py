"""The input of preprocessing: find the files, cut them into shards, and read their documents.

The shards depend only on the files, not on the number of workers. A file contains lines of JSON, a JSON array, plain
text, or the rows of a table (Parquet).
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_utils.command_line import missing_package
from data_utils.corpora import (
    BOM,
    MANIFESTS,
    detect_compression,
    is_json,
    json_object,
    open_bytes,
    read_items,
    read_plain_text,
)

MIN_SHARD_BYTES = 1 << 23
MAX_SHARDS = 1024  # About the most shards of an input. For a larger input, `cut_into_shards` makes larger shards.

Record = Any  # A record is the bytes of a line, or a dict (a JSON object, or a row of a Parquet file).


class FileRange(NamedTuple):
    """The bytes from `start` to `stop` of an input file: whole lines for kind `json`, otherwise the whole file.

    kind: json, packed (compressed JSON or a JSON array), text or parquet.
    """

    path: str
    start: int
    stop: int
    kind: str

    @property
    def size(self) -> int:
        """The number of bytes of the file range."""
        return self.stop - self.start


Shard = tuple[FileRange, ...]


def list_input_files(folder: Path) -> list[Path]:
    """List the files of a folder and its subfolders, sorted by name, without hidden files and without the manifests of
    tools/openwebtext."""
    found = sorted((path.relative_to(folder) for path in folder.rglob("*") if path.is_file()), key=str)
    return [folder / path for path in found if not any(part[0] == "." or part == MANIFESTS for part in path.parts)]


def whole_file(path: str, keys: tuple[str, ...]) -> FileRange:
    """Return a whole file as one range. A file is JSON by its suffix, or if its first line is an object with the
    keys."""
    with open(path, "rb") as file:
        head = file.read(1 << 16)
    packed = detect_compression(path) is not None
    if head[:4] == b"PAR1":
        kind = "parquet"
    elif is_json(path) or (not packed and _is_object(head, keys)):
        kind = "packed" if packed or head.removeprefix(BOM).lstrip()[:1] == b"[" else "json"
    else:
        kind = "text"
        if len(keys) > 1:
            raise ValueError(f"{path} is plain text, which does not have the fields --json-keys {' '.join(keys)}")
    return FileRange(path, 0, os.path.getsize(path), kind)


def _is_object(head: bytes, keys: tuple[str, ...]) -> bool:
    try:
        return json_object(head.partition(b"\n")[0]).keys() >= set(keys)
    except ValueError:
        return False


def cut_into_shards(files: Sequence[FileRange]) -> list[Shard]:
    """Make shards of about equal size: cut large files of JSON lines between lines, and join small files."""
    least = max(MIN_SHARD_BYTES, -(-sum(file.size for file in files) // MAX_SHARDS))
    shards: list[list[FileRange]] = [[]]
    size = 0  # number of bytes of the last shard
    for part in (part for file in files for part in _parts(file, least)):
        if size >= least:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += part.size
    return list(map(tuple, shards))


def _parts(file: FileRange, least: int) -> Iterator[FileRange]:
    if file.kind != "json" or file.size < 2 * least:
        yield file
        return
    stop = 0
    with open(file.path, "rb") as content:
        while (start := stop) < file.stop:
            content.seek(min(start + least, file.stop) - 1)
            content.readline()
            stop = min(content.tell(), file.stop)
            yield FileRange(file.path, start, stop, file.kind)


def records(part: FileRange, keys: tuple[str, ...]) -> Iterator[tuple[int, Record]]:
    """Yield the documents in a range of a file, each with the number of its (last) line or row. The documents of kind
    `json` are the bytes of their lines. Lines of plain text that are not UTF-8 are yielded as bytes, too.

    keys: the fields to read; a Parquet file must have them as columns. A ValueError names a damaged file.
    """
    if part.kind == "parquet":
        yield from enumerate(_rows(part.path, keys), 1)
        return
    with open_bytes(part.path) as file:
        if part.kind == "text":
            yield from read_plain_text(file, keys[0])
        elif part.kind == "packed":
            yield from enumerate(read_items(file, part.path), 1)
        else:
            file.seek(part.start)
            left = part.size
            for number, line in enumerate(file, 1):
                left -= len(line)
                yield number, line.removeprefix(BOM) if part.start == 0 and number == 1 else line
                if left <= 0:
                    return


def _rows(path: str, keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise missing_package(f"{path} is a Parquet file, which", "pyarrow", "data") from None
    try:
        file = parquet.ParquetFile(path)
        for key in keys:
            if key not in file.schema_arrow.names:
                raise ValueError(f"{path} has no column {key!r}, but {', '.join(file.schema_arrow.names)}: --json-keys")
        for batch in file.iter_batches(1024, columns=list(keys)):
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from None
