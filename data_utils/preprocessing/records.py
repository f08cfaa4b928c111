"""What stands in a file of input: lines of JSON, a JSON array, plain text or the rows of a Parquet file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from data_utils.corpora.documents import json_object, objects, text_of
from data_utils.files.compression import open_bytes

BOM = b"\xef\xbb\xbf"

Record = Any  # a line's bytes, an object, or an UnreadableLine


@dataclass(frozen=True)
class FileRange:
    """A part of an input file: the bytes from `start` to `stop`, whole lines of a file of kind `json`, else all of it.

    kind: json, packed (JSON that is compressed or one array), text or parquet.
    """

    path: str
    kind: str
    start: int
    stop: int


class UnreadableLine(ValueError):
    """A line of plain text that is not UTF-8."""

    def __init__(self, reason: str, line: bytes) -> None:
        super().__init__(reason)
        self.line = line


def records(span: FileRange, keys: tuple[str, ...], see: Callable[[bytes], object] = len
            ) -> Iterator[tuple[int, Record]]:
    """The documents and the unreadable lines in a range of a file, each with the number of its (last) line or row.

    keys: the fields that are wanted, which a Parquet file has to have as columns. see: is called with all bytes of a
    `json` range, each line just before it is yielded. ValueError names a file that is damaged.
    """
    if span.kind == "json":
        return enumerate(_lines(span, see), 1)
    if span.kind == "parquet":
        return enumerate(_rows(span.path, keys), 1)
    return _unpacked(span, keys[0])


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


def _unpacked(span: FileRange, key: str) -> Iterator[tuple[int, Record]]:
    with open_bytes(span.path) as file:
        yield from _whole_text(file, key) if span.kind == "text" else enumerate(objects(file, span.path), 1)


def _whole_text(file: BinaryIO, key: str) -> Iterator[tuple[int, Record]]:
    parts = []
    number = 0
    for number, line in enumerate(file, 1):
        try:
            parts.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            yield number, UnreadableLine(str(error), line)
    yield number, {key: "".join(parts)}


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


def fast_json() -> Callable[[bytes], Any]:
    """A parser of JSON: orjson's, two to three times faster, where it is installed, else json's. The caller reads with
    json what this one refuses."""
    try:
        import orjson
    except ImportError:
        return json.loads
    loads: Callable[[bytes], Any] = orjson.loads
    return loads


def texts_of(record: Record, keys: tuple[str, ...]) -> list[str]:
    """The fields of a record; ValueError or RecursionError where it has not all of them."""
    if isinstance(record, UnreadableLine):
        raise record
    item = json_object(record)
    return [text_of(item, key) for key in keys]
