"""One shard of a preprocessing run: some input in, a pair for each JSON key and a manifest out.

    FOLDER/00007_text.bin, .idx   the documents of shard 7 in order
    FOLDER/00007.bad.jsonl        its unusable lines, where it has any
    FOLDER/00007.json             what it was made from and the hashes of all; written last

A shard is written under other names and renamed when it is on the disk. One whose manifest fits its input, recipe and
files is not made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from data_utils.corpora.documents import HOPELESS_LINES, json_object, objects, text_of
from data_utils.files.atomic import flush_to_disk
from data_utils.files.compression import damage_named, open_bytes
from data_utils.files.hashing import ContentHash, content_hash, damaged_parts, fingerprint_of, hash_parts
from data_utils.files.sealed_json import read_sealed, write_sealed
from data_utils.indexed_dataset import IndexedDatasetBuilder, token_dtype
from data_utils.tokenizers.base import Tokenizer
from data_utils.tokenizers.text import PIECE_CHARACTERS, split_text

BOM = b"\xef\xbb\xbf"
REPORTED_LINES = 64  # between two reports of progress
SUFFIXES = (".bin", ".idx")

Progress = Callable[[int, int], object]  # bytes of input, tokens
Record = Any  # a line's bytes, an object, or an UnreadableLine


@dataclass(frozen=True)
class Piece:
    """Bytes of an input file: whole lines of a `json` one, or all of it. `kind`: json, packed (JSON that is compressed
    or one array), text or parquet."""

    path: str
    kind: str
    start: int
    stop: int


@dataclass(frozen=True)
class Recipe:
    """What is made of the text. `tokenizer` is the fingerprint."""

    keys: tuple[str, ...]
    append_eod: bool
    tokenizer: str

    @property
    def fingerprint(self) -> str:
        return fingerprint_of("1", json.dumps([self.keys, self.append_eod]), self.tokenizer)


class UnreadableLine(ValueError):
    """A line of plain text that is not UTF-8."""

    def __init__(self, reason: str, line: bytes) -> None:
        super().__init__(reason)
        self.line = line


def make_shard(folder: Path, number: int, pieces: tuple[Piece, ...], recipe: Recipe, tokenizer: Tokenizer,
               progress: Progress) -> dict[str, Any]:
    """The manifest of the shard, which is made where it is not there. ValueError for input of which nothing can be
    used or that changes meanwhile, OSError for a disk that fails; what was half written is then removed."""
    stem = folder / f"{number:05d}"
    before = [os.stat(piece.path).st_mtime_ns for piece in pieces]
    if (found := _finished(stem, pieces, recipe)) is not None:
        progress(sum(piece.stop - piece.start for piece in pieces),
                 sum(output["tokens"] for output in found["outputs"].values()))
        return found
    writer = _Writer(f"{stem}.{os.getpid()}.tmp", recipe, tokenizer)
    try:
        taken = [writer.take(number, piece, progress) for number, piece in enumerate(pieces)]
        if [os.stat(piece.path).st_mtime_ns for piece in pieces] != before:
            raise ValueError(f"{pieces[0].path} changed while it was read: start again")
        facts = {"recipe": recipe.fingerprint, "pieces": taken, **writer.finish(stem)}
    except BaseException:
        writer.abandon()
        raise
    write_sealed(Path(f"{stem}.json"), facts)
    return facts


def _finished(stem: Path, pieces: tuple[Piece, ...], recipe: Recipe) -> dict[str, Any] | None:
    """The manifest of a shard that is there as it was written and made of what is wanted."""
    try:
        facts = read_sealed(Path(f"{stem}.json"))
        if facts is None or facts["recipe"] != recipe.fingerprint \
                or [Piece(*entry["piece"]) for entry in facts["pieces"]] != list(pieces) \
                or any(content_hash(piece.path, piece.start, piece.stop) != entry["hash"]
                       for piece, entry in zip(pieces, facts["pieces"], strict=True)):
            return None
        same = not any(damaged_parts(f"{stem}_{key}{suffix}", output[suffix])
                       for key, output in facts["outputs"].items() for suffix in SUFFIXES)
        return facts if same and facts["bad"] == _line_count(bad_lines_of(stem)) else None
    except (OSError, ValueError):
        return None


def bad_lines_of(stem: Path) -> Path:
    return Path(f"{stem}.bad.jsonl")


def _line_count(path: Path) -> int:
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def records(piece: Piece, keys: tuple[str, ...], see: Callable[[bytes], object] = len
            ) -> Iterator[tuple[int, Record]]:
    """What stands in a piece, a document or an unreadable line each, with the number of its (last) line or row. `see`
    is shown all bytes of a `json` piece, each line just before it is yielded."""
    if piece.kind == "json":
        return enumerate(_lines(piece, see), 1)
    if piece.kind == "parquet":
        return enumerate(_rows(piece.path, keys), 1)
    return _unpacked(piece, keys[0])


def _lines(piece: Piece, see: Callable[[bytes], object]) -> Iterator[bytes]:
    with open(piece.path, "rb", buffering=1 << 18) as file:
        position = piece.start
        if position == 0 and file.read(len(BOM)) == BOM:
            position = len(BOM)
            see(BOM)
        file.seek(position)
        for line in file:
            position += len(line)
            see(line)
            yield line
            if position >= piece.stop:
                return


def _unpacked(piece: Piece, key: str) -> Iterator[tuple[int, Record]]:
    with damage_named(piece.path), open_bytes(piece.path) as file:
        yield from _whole_text(file, key) if piece.kind == "text" else enumerate(objects(file, piece.path), 1)


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
    """orjson, two to three times faster, where it is installed; what it refuses is read by json all the same."""
    try:
        import orjson
    except ImportError:
        return json.loads
    loads: Callable[[bytes], Any] = orjson.loads
    return loads


class _Output:
    """The pair of one key, still under another name."""

    def __init__(self, prefix: str, vocab_size: int) -> None:
        self.prefix = prefix
        self.builder = IndexedDatasetBuilder(prefix, token_dtype(vocab_size))
        self.empty = self.text_bytes = 0


class _Writer:
    """Documents to pairs, one a key."""

    def __init__(self, temporary: str, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self._temporary, self._keys, self._tokenizer = temporary, recipe.keys, tokenizer
        self._eod = tokenizer.eod if recipe.append_eod else None
        self._outputs = [_Output(f"{temporary}_{key}", tokenizer.vocab_size) for key in recipe.keys]
        self._bad: BinaryIO | None = None
        self._bad_count = self._records = 0  # a blank line is neither

    def take(self, piece_number: int, piece: Piece, progress: Progress) -> dict[str, Any]:
        """Write the documents of a piece; returns it with its hash and the number of its lines, or rows."""
        digest = ContentHash()
        keys, outputs, encode, loads = self._keys, self._outputs, self._tokenizer.encode_utf8, fast_json()
        number = read = tokens = 0
        left, before, bad_before = piece.stop - piece.start, self._tokens(), self._bad_count
        for number, record in records(piece, keys, digest.update):
            try:
                item = loads(record)
                texts = [item[key].encode() for key in keys]
                # None for a text that goes in by parts, so that its ids are never in memory at once.
                encoded = [encode(text) if len(text) <= PIECE_CHARACTERS else None for text in texts]
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # no plain line of JSON
                if isinstance(record, bytes) and not record.strip():
                    continue
                try:
                    texts = [text.encode() for text in _texts(record, keys)]
                except (ValueError, RecursionError) as error:
                    self._quarantine(piece_number, piece, number, record, error)
                    continue
                encoded = [None] * len(texts)
            self._records += 1
            for output, text, ids in zip(outputs, texts, encoded, strict=True):
                if not text:
                    output.empty += 1
                    continue
                if ids is not None:
                    output.builder.add(ids)
                else:
                    for part in split_text(text.decode()):
                        output.builder.add(encode(part.encode()))
                output.builder.end_document(self._eod)
                output.text_bytes += len(text)
            if piece.kind == "json":
                read += len(record)
            if not number % REPORTED_LINES:
                tokens = self._tokens()
                progress(read, tokens - before)
                left, read, before = left - read, 0, tokens
        progress(left, self._tokens() - before)
        if piece.kind == "text":  # one document, but its lines are what can be bad
            self._records += number - 1 - (self._bad_count - bad_before)
        hashed = str(digest) if piece.kind == "json" else content_hash(piece.path, piece.start, piece.stop)
        return {"piece": astuple(piece), "hash": hashed, "lines": number}

    def finish(self, stem: Path) -> dict[str, Any]:
        """Put everything on the disk and rename it."""
        outputs = {}
        for key, output in zip(self._keys, self._outputs, strict=True):
            builder = output.builder
            builder.finish()
            size = os.path.getsize(f"{output.prefix}.bin")
            outputs[key] = {"documents": len(builder), "tokens": builder.num_tokens, "empty": output.empty,
                            "text_bytes": output.text_bytes, ".idx": hash_parts(f"{output.prefix}.idx"),
                            ".bin": [{"bytes": size, "sha256": builder.sha256.hexdigest()}]}
            for suffix in SUFFIXES:
                os.replace(f"{output.prefix}{suffix}", f"{stem}_{key}{suffix}")
        bad_lines_of(stem).unlink(missing_ok=True)
        if self._bad is not None:
            flush_to_disk(self._bad)
            self._bad.close()
            os.replace(self._bad.name, bad_lines_of(stem))
        return {"records": self._records, "bad": self._bad_count, "outputs": outputs}

    def abandon(self) -> None:
        for output in self._outputs:
            output.builder.abandon()
        if self._bad is not None:
            self._bad.close()
            Path(self._bad.name).unlink(missing_ok=True)

    def _tokens(self) -> int:
        return sum(output.builder.num_tokens for output in self._outputs)

    def _quarantine(self, piece_number: int, piece: Piece, number: int, record: Record, error: Exception) -> None:
        """Keep an unusable line: the number of its piece in the shard, that of the line in its piece, why, what."""
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        self._bad_count += 1
        if self._bad_count == HOPELESS_LINES and not self._records:  # rather now than after hours
            raise ValueError(f"{piece.path}: {reason}; nor is any other of {HOPELESS_LINES} lines usable: --json-keys "
                             "names the fields that hold text")
        if isinstance(record, UnreadableLine):
            record = record.line
        content = record.decode("utf-8", "backslashreplace") if isinstance(record, bytes) else repr(record)
        if self._bad is None:
            self._bad = open(f"{self._temporary}.bad.jsonl", "wb")  # noqa: SIM115  closed by `finish` or `abandon`
        line = {"piece": piece_number, "line": number, "reason": reason, "content": content.rstrip("\n")}
        self._bad.write(json.dumps(line).encode() + b"\n")


def _texts(record: Record, keys: tuple[str, ...]) -> list[str]:
    """The fields of a record; ValueError or RecursionError where it has not all of them."""
    if isinstance(record, UnreadableLine):
        raise record
    item = json_object(record)
    return [text_of(item, key) for key in keys]
