"""The shards of a preprocessing run: of each some input in, a pair for each JSON key and a manifest out.

    FOLDER/00007_text.bin, .idx   the documents of shard 7 in order
    FOLDER/00007.bad.jsonl        its unusable lines, if it has any
    FOLDER/00007.json             its input and the hashes of all; written last

A shard is written under other names and renamed when it is on the disk. One whose manifest fits its input, recipe and
files is not made again. Several processes make many shards, each with its own tokenizer.
"""

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from data_utils.corpora.documents import HOPELESS_LINES, json_object, reason_of, text_of
from data_utils.files import (
    PREPROCESSING_SHARD_VERSION,
    ContentHash,
    damaged_parts,
    fingerprint_of,
    flush_to_disk,
    hash_parts,
    read_sealed,
    write_sealed,
)
from data_utils.indexed_dataset import IndexedDatasetBuilder, token_dtype
from data_utils.preprocessing.inputs import FileRange, Record, Shard, records
from data_utils.tokenizers import build_tokenizer
from data_utils.tokenizers.base import PART_CHARACTERS, Tokenizer, split_text
from data_utils.worker_processes import by_processes, count_work

REPORTED_LINES = 64  # between two reports of progress
SUFFIXES = (".bin", ".idx")

Progress = Callable[[int, int], object]  # is called with the bytes of input and the tokens since its last call


@dataclass(frozen=True)
class Recipe:
    """How tokens are made from the text. keys: the JSON fields. tokenizer: its fingerprint."""

    keys: tuple[str, ...]
    append_eod: bool
    tokenizer: str

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the tokens of a text."""
        facts = json.dumps([self.keys, self.append_eod])
        return fingerprint_of(str(PREPROCESSING_SHARD_VERSION), facts, self.tokenizer)


def make_shards(
    folder: Path,
    shards: Sequence[Shard],
    recipe: Recipe,
    tokenizer: Tokenizer,
    arguments: Mapping[str, Any],
    *,
    workers: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """The manifests of all shards. One process makes them itself; each of several builds its own tokenizer from
    `arguments`. Raises what `make_shard` raises, and OSError if a worker dies."""
    if workers > 1 and len(shards) > 1:
        work = functools.partial(_make_in_worker, folder, recipe, tuple(arguments.items()))
        # Spawned, not forked: the tokenizers' libraries start threads.
        return by_processes(work, list(enumerate(shards)), workers=workers, counted=2, progress=progress, start="spawn")
    return [make_shard(folder, number, spans, recipe, tokenizer, progress) for number, spans in enumerate(shards)]


@functools.lru_cache(1)  # a worker makes many shards
def _tokenizer_of(arguments: tuple[tuple[str, Any], ...]) -> Tokenizer:
    return build_tokenizer(**dict(arguments))


def _make_in_worker(
    folder: Path, recipe: Recipe, arguments: tuple[tuple[str, Any], ...], number: int, spans: Shard
) -> dict[str, Any]:
    return make_shard(folder, number, spans, recipe, _tokenizer_of(arguments), count_work)


def make_shard(
    folder: Path, number: int, spans: Shard, recipe: Recipe, tokenizer: Tokenizer, progress: Progress
) -> dict[str, Any]:
    """The manifest of shard `number`, which is made unless it is there.

    ValueError if nothing of the input can be used, or if it changes meanwhile. OSError if the disk fails. A half-written
    shard is then removed.
    """
    stem = folder / f"{number:05d}"
    before = [os.stat(span.path).st_mtime_ns for span in spans]
    if (found := _finished(stem, spans, recipe)) is not None:
        progress(sum(span.size for span in spans), sum(output["tokens"] for output in found["outputs"].values()))
        return found
    writer = _Writer(f"{stem}.{os.getpid()}.tmp", recipe, tokenizer)
    try:
        taken = [writer.take(number, span, progress) for number, span in enumerate(spans)]
        if [os.stat(span.path).st_mtime_ns for span in spans] != before:
            raise ValueError(f"{spans[0].path} changed while it was read: start again")
        facts = {"recipe": recipe.fingerprint, "pieces": taken, **writer.finish(stem)}
    except BaseException:
        writer.abandon()
        raise
    write_sealed(Path(f"{stem}.json"), facts)
    return facts


def _finished(stem: Path, spans: Shard, recipe: Recipe) -> dict[str, Any] | None:
    """The manifest of a shard that is there as it was written, from the input and recipe of today."""
    try:
        facts = read_sealed(Path(f"{stem}.json"))
        if facts is None or facts["recipe"] != recipe.fingerprint:
            return None
        made_of = [(piece["piece"], piece["hash"]) for piece in facts["pieces"]]
        damaged = any(
            damaged_parts(f"{stem}_{key}{suffix}", output[suffix])
            for key, output in facts["outputs"].items()
            for suffix in SUFFIXES
        )
        bad_lines = bad_lines_of(stem)
        bad = bad_lines.read_bytes().count(b"\n") if bad_lines.exists() else 0
        unchanged = made_of == [(list(astuple(span)), span.content_hash()) for span in spans]
        return facts if unchanged and not damaged and facts["bad"] == bad else None
    except (OSError, ValueError):
        return None


def bad_lines_of(stem: Path) -> Path:
    """The file of a shard's unusable lines; it is there if the shard has any."""
    return Path(f"{stem}.bad.jsonl")


def fast_json() -> Callable[[bytes], Any]:
    """A parser of JSON: orjson's, two to three times faster, if it is installed, else json's. The caller reads with
    json what this one refuses."""
    try:
        import orjson
    except ImportError:
        return json.loads
    loads: Callable[[bytes], Any] = orjson.loads
    return loads


class _Output(IndexedDatasetBuilder):
    """The pair of one key, still under another name, and what of its texts the pair does not tell."""

    empty = text_bytes = 0


class _Writer:
    """Documents to pairs, one a key."""

    def __init__(self, temporary: str, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self._temporary, self._keys, self._encode = temporary, recipe.keys, tokenizer.encode_utf8
        self._eod = tokenizer.eod if recipe.append_eod else None
        self._outputs = [_Output(f"{temporary}_{key}", token_dtype(tokenizer.vocab_size)) for key in recipe.keys]
        self._bad: BinaryIO | None = None
        self._bad_count = self._records = 0  # a blank line is neither

    def take(self, span_number: int, span: FileRange, progress: Progress) -> dict[str, Any]:
        """Write the documents of a range; returns it with its hash and the number of its lines, or rows."""
        digest, loads, keys = ContentHash(), fast_json(), self._keys
        number = read = 0
        left, tokens, bad_before = span.size, self._tokens(), self._bad_count
        for number, record in records(span, keys, digest.update):
            try:
                item = loads(record)
                texts = [item[key].encode() for key in keys]
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # not a plain line of JSON
                if isinstance(record, bytes) and not record.strip():
                    continue
                try:
                    item = json_object(record)
                    texts = [text_of(item, key).encode() for key in keys]
                except (ValueError, RecursionError) as error:
                    self._quarantine(span_number, span, number, record, error)
                    continue
            self._records += 1
            for output, text in zip(self._outputs, texts, strict=True):
                self._add(output, text)
            if span.kind == "json":
                read += len(record)
            if not number % REPORTED_LINES:
                now = self._tokens()
                progress(read, now - tokens)
                left, read, tokens = left - read, 0, now
        progress(left, self._tokens() - tokens)
        if span.kind == "text":  # one document, but its lines are what can be bad
            self._records += number - 1 - (self._bad_count - bad_before)
        hashed = str(digest) if span.kind == "json" else span.content_hash()
        return {"piece": astuple(span), "hash": hashed, "lines": number}

    def _add(self, output: _Output, text: bytes) -> None:
        if not text:
            output.empty += 1
            return
        if len(text) <= PART_CHARACTERS:
            output.add(self._encode(text))
        else:  # by parts, so that its ids are never in memory at once
            for part in split_text(text.decode()):
                output.add(self._encode(part.encode()))
        output.end_document(self._eod)
        output.text_bytes += len(text)

    def finish(self, stem: Path) -> dict[str, Any]:
        """Put everything on the disk and rename it."""
        outputs = {}
        for key, output in zip(self._keys, self._outputs, strict=True):
            output.finish()
            outputs[key] = {
                "documents": len(output),
                "tokens": output.num_tokens,
                "empty": output.empty,
                "text_bytes": output.text_bytes,
                ".idx": hash_parts(f"{output.prefix}.idx"),
                ".bin": [{"bytes": os.path.getsize(f"{output.prefix}.bin"), "sha256": output.sha256.hexdigest()}],
            }
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
            output.abandon()
        if self._bad is not None:
            self._bad.close()
            Path(self._bad.name).unlink(missing_ok=True)

    def _tokens(self) -> int:
        return sum(output.num_tokens for output in self._outputs)

    def _quarantine(self, span_number: int, span: FileRange, number: int, record: Record, error: Exception) -> None:
        """Keep an unusable line: the number of its range in the shard, that of the line in its range, why, its text."""
        self._bad_count += 1
        if self._bad_count == HOPELESS_LINES and not self._records:  # rather now than after hours
            raise ValueError(
                f"{span.path}: {reason_of(error)}; nor is any other of {HOPELESS_LINES} lines usable: --json-keys "
                "names the fields that hold text"
            )
        content = record.decode("utf-8", "backslashreplace") if isinstance(record, bytes) else repr(record)
        if self._bad is None:
            self._bad = open(f"{self._temporary}.bad.jsonl", "wb")  # noqa: SIM115  closed by `finish` or `abandon`
        line = {"piece": span_number, "line": number, "reason": reason_of(error), "content": content.rstrip("\n")}
        self._bad.write(json.dumps(line).encode() + b"\n")
