"""Preprocessing: text files to .bin/.idx pairs by several processes, restartable. Several token files into one pair.

The input is cut into shards by its size (`inputs`), so that the result is the same under any number of workers. A shard
is some of the input in, and in PREFIX.shards out:

    00007_text.bin, .idx   the documents of shard 7 in order, a pair for each JSON key
    00007.bad.jsonl        its unusable lines
    00007.json             its input and the hashes of all; written last

A shard without this manifest is not finished: its files are removed. One whose manifest fits its input, the recipe and
the files is not made again. At the end the shards are merged, and the pairs take their names, each `.idx` last.
"""

import contextlib
import errno
import functools
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from data_utils.command_line import progress_bar
from data_utils.corpora import (
    HOPELESS_LINES,
    MOST_BAD_LINES,
    Log,
    compression_of,
    files_of,
    json_object,
    reason_of,
    text_of,
)
from data_utils.files import (
    PREPROCESSING_SHARD_VERSION,
    content_hash,
    damaged_parts,
    file_lock,
    fingerprint_of,
    hash_parts,
    read_sealed,
    replacing,
    sync_folder,
    write_sealed,
)
from data_utils.indexed_dataset import (
    ForeignBin,
    IndexedDatasetBuilder,
    open_tokens,
    read_manifest,
    token_dtype,
    write_manifest,
)
from data_utils.preprocessing.inputs import FileRange, Record, Shard, all_files, cut, records, whole_file
from data_utils.tokenizers import build_tokenizer
from data_utils.tokenizers.base import PART_CHARACTERS, Tokenizer, split_text
from data_utils.worker_processes import by_processes, count_work

SAMPLE_CHARACTERS = 1 << 16
COMPRESSED_TEXT = 4  # bytes of text that a byte of a compressed file may well hold

Manifest = dict[str, Any]
Progress = Callable[[int], object]  # is called with the bytes of input since its last call


@dataclass(frozen=True)
class Job:
    """The pairs to make. tokenizer: the arguments of `build_tokenizer`, since each worker builds its own. ValueError
    names a flag."""

    inputs: tuple[str, ...]
    output_prefix: str
    keys: tuple[str, ...]
    tokenizer: Mapping[str, Any]
    append_eod: bool = False
    workers: int = 1
    max_bad_fraction: float = MOST_BAD_LINES

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"--workers must be positive, not {self.workers}")
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"--max-bad-fraction must lie between 0 and 1, not {self.max_bad_fraction}")
        if not self.keys or len(set(self.keys)) < len(self.keys) or any("/" in key for key in self.keys):
            raise ValueError(f"--json-keys {' '.join(self.keys)}: name each field once, without a slash")
        output = Path(self.output_prefix).resolve()
        for name in self.inputs:
            if os.path.isdir(name) and output.is_relative_to(Path(name).resolve()):
                raise ValueError(f"--output-prefix {self.output_prefix} lies in the folder {name}, which is all input")

    def output(self, key: str) -> str:
        """The prefix of a key's pair, as Megatron names it."""
        return f"{self.output_prefix}_{key}_document"

    @property
    def folder(self) -> Path:
        """Where the shards are made."""
        return Path(f"{self.output_prefix}.shards")

    def recipe(self, tokenizer: Tokenizer) -> str:
        """A hash of all that decides the tokens of a text."""
        facts = json.dumps([self.keys, self.append_eod])
        return fingerprint_of(str(PREPROCESSING_SHARD_VERSION), facts, tokenizer.fingerprint)


def preprocess(job: Job, *, log: Log) -> dict[str, Manifest]:
    """Make the pairs, unless they are there and were made from the same input in the same way. Returns each key's
    manifest.

    ValueError, FileNotFoundError or OSError, in one line, if the input, a flag or the disk is at fault; the shards that
    are finished are kept then, and nothing else.
    """
    tokenizer = build_tokenizer(**job.tokenizer)
    if job.append_eod and not tokenizer.has_eod:
        raise ValueError(f"--append-eod: the tokenizer {tokenizer.kind} has no end of document")
    spans = [whole_file(path, job.keys) for path in files_of(job.inputs, "--input", all_files)]
    shards, folder = cut(spans), job.folder
    manifests = _made_before(job, tokenizer, shards)
    if manifests is not None:
        log(f"{', '.join(map(job.output, job.keys))}: made of this input before, nothing to do")
        shutil.rmtree(folder, ignore_errors=True)
        return manifests

    def refuse() -> None:
        raise ValueError(f"another process is writing into {folder}: wait for it, or take another --output-prefix")

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / "lock", refuse):
            _remove_unfinished(folder)  # what a run that was killed has left
            _check_room(job, spans, tokenizer)
            try:
                made = _make_shards(job, shards, tokenizer)
                _judge(job, made, log)
                manifests = {key: _merge_shards(job, key, made, tokenizer) for key in job.keys}
                for key in job.keys:  # all are whole before the first takes its name
                    _publish(_merged(job, key), job.output(key))
            except BaseException:
                _remove_unfinished(folder)
                raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"no room left on the disk of {job.output_prefix}: nothing is half written; {folder} keeps the "
            "shards that are finished, and the same command goes on with them"
        ) from None
    shutil.rmtree(folder)
    return manifests


def _remove_unfinished(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "lock" and not (folder / f"{path.name[:5]}.json").exists():
            path.unlink()


def _inputs(made: Sequence[Manifest]) -> list[dict[str, Any]]:
    """Each input file with its size, lines and the hashes of its parts, out of the manifests of shards."""
    inputs: list[dict[str, Any]] = []
    for shard in made:
        for ((path, _, start, stop), hashed), lines in zip(shard["pieces"], shard["lines"], strict=True):
            if start == 0:
                inputs.append({"file": path, "bytes": 0, "lines": 0, "parts": []})
            inputs[-1]["bytes"] = stop
            inputs[-1]["lines"] += lines
            inputs[-1]["parts"].append([stop - start, hashed])
    return inputs


def _made_before(job: Job, tokenizer: Tokenizer, shards: Sequence[Shard]) -> dict[str, Manifest] | None:
    """The manifests, if every pair is there and was made of this input in this way. ValueError if a pair was made of
    something else."""
    there = [key for key in job.keys if os.path.exists(f"{job.output(key)}.idx")]
    if not there:
        return None
    today = _inputs([{"pieces": _pieces(shard), "lines": [0] * len(shard)} for shard in shards])
    found = {}
    for key in there:
        found[key] = manifest = read_manifest(job.output(key)) or {"inputs": []}
        made_of = [{**entry, "lines": 0} for entry in manifest["inputs"]]
        if manifest.get("recipe") != job.recipe(tokenizer) or made_of != today:
            raise ValueError(
                f"{job.output(key)}.idx exists and was made of other input or in another way: remove it, or take "
                "another --output-prefix"
            )
    return found if len(there) == len(job.keys) else None


def _check_room(job: Job, spans: Sequence[FileRange], tokenizer: Tokenizer) -> None:
    """OSError if the disk has clearly too little room for the shards and the pairs merged from them, by what the first
    documents need."""
    sample = ""
    for _, record in records(spans[0], job.keys):
        with contextlib.suppress(ValueError, RecursionError):
            item = json_object(record)
            sample += "".join(text_of(item, key)[:SAMPLE_CHARACTERS] for key in job.keys)
        if len(sample) > SAMPLE_CHARACTERS:
            break
    text = sum(
        span.size * (COMPRESSED_TEXT if span.kind == "parquet" or compression_of(span.path) else 1) for span in spans
    )
    pair = text * len(tokenizer.encode(sample)) // max(1, len(sample)) * token_dtype(tokenizer.vocab_size).itemsize
    needed = 2 * pair - sum(path.stat().st_size for path in job.folder.iterdir())
    free = shutil.disk_usage(job.folder).free
    if needed > free:
        raise OSError(
            f"--output-prefix {job.output_prefix}: about {needed / 1e9:,.2f} GB are needed, shards and "
            f"result, but only {free / 1e9:,.2f} GB are free on that disk"
        )


# --- a shard


def _make_shards(job: Job, shards: Sequence[Shard], tokenizer: Tokenizer) -> list[Manifest]:
    """The manifests of all shards. OSError if a worker dies."""
    total = sum(span.size for shard in shards for span in shard)
    with progress_bar(total=total, unit="B", unit_scale=True, desc="tokenising") as bar:
        if job.workers > 1 and len(shards) > 1:
            work = functools.partial(_in_worker, job, tuple(job.tokenizer.items()))
            # Spawned, not forked: the tokenizers' libraries start threads.
            return by_processes(work, list(enumerate(shards)), workers=job.workers, progress=bar.update, start="spawn")
        return [make_shard(job, number, shard, tokenizer, bar.update) for number, shard in enumerate(shards)]


@functools.lru_cache(1)  # a worker makes many shards
def _tokenizer_of(arguments: tuple[tuple[str, Any], ...]) -> Tokenizer:
    return build_tokenizer(**dict(arguments))


def _in_worker(job: Job, tokenizer: tuple[tuple[str, Any], ...], number: int, shard: Shard) -> Manifest:
    return make_shard(job, number, shard, _tokenizer_of(tokenizer), count_work)


def _pieces(shard: Shard) -> list[list[Any]]:
    """Each range of a shard, as JSON has it, with the hash of its content."""
    return [[list(astuple(span)), content_hash(span.path, span.start, span.stop)] for span in shard]


def make_shard(job: Job, number: int, shard: Shard, tokenizer: Tokenizer, progress: Progress) -> Manifest:
    """The manifest of a shard, which is made unless it is there.

    ValueError if nothing of the input can be used, or if it changes meanwhile. OSError if the disk fails.
    """
    stem = str(job.folder / f"{number:05d}")
    before = [os.stat(span.path).st_mtime_ns for span in shard]
    made_of = {"recipe": job.recipe(tokenizer), "pieces": _pieces(shard)}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = read_sealed(Path(f"{stem}.json")) or {}
        whole = not any(damaged_parts(f"{stem}{suffix}", parts) for suffix, parts in found["files"].items())
        if whole and {name: found[name] for name in made_of} == made_of:
            progress(sum(span.size for span in shard))
            return found
    Path(f"{stem}.json").unlink(missing_ok=True)
    made = {**made_of, **_write_shard(job, stem, shard, tokenizer, progress)}
    if [os.stat(span.path).st_mtime_ns for span in shard] != before:
        raise ValueError(f"{shard[0].path} changed while it was read: start again")
    write_sealed(Path(f"{stem}.json"), made)
    return made


def _write_shard(job: Job, stem: str, shard: Shard, tokenizer: Tokenizer, progress: Progress) -> Manifest:
    """Write the pairs and the unusable lines; returns the counts and hashes of a manifest."""
    dtype, eod = token_dtype(tokenizer.vocab_size), tokenizer.eod if job.append_eod else None
    counts = {key: {"empty": 0, "text_bytes": 0} for key in job.keys}
    lines, usable, bad = [], 0, 0
    with contextlib.ExitStack() as stack:
        bad_lines = stack.enter_context(replacing(f"{stem}.bad.jsonl"))
        pairs = {key: stack.enter_context(IndexedDatasetBuilder(f"{stem}_{key}", dtype)) for key in job.keys}
        for span in shard:
            number, left, bad_before = 0, span.size, bad
            for number, record in records(span, job.keys):
                if span.kind == "json":
                    progress(len(record))
                    left -= len(record)
                if isinstance(record, bytes) and not record.strip():
                    continue
                try:
                    texts = _texts(record, job.keys)
                except (ValueError, RecursionError) as error:
                    bad += 1
                    if bad == HOPELESS_LINES and not usable:  # rather now than after hours
                        raise ValueError(
                            f"{span.path}: {reason_of(error)}; nor is any other of {HOPELESS_LINES} lines usable: "
                            "--json-keys names the fields that hold text"
                        ) from None
                    content = record.decode("utf-8", "backslashreplace") if isinstance(record, bytes) else repr(record)
                    entry = {"line": number, "reason": reason_of(error), "content": content.rstrip("\n")}
                    bad_lines.write(json.dumps({"file": span.path, **entry}).encode() + b"\n")
                    continue
                usable += 1
                for key, text in zip(job.keys, texts, strict=True):
                    _add(pairs[key], text, tokenizer, eod)
                    counts[key]["empty"] += not text
                    counts[key]["text_bytes"] += len(text)
            progress(left)
            lines.append(number)
            if span.kind == "text":  # one document, but its lines are what can be bad
                usable += number - 1 - (bad - bad_before)
    files = {".bad.jsonl": hash_parts(f"{stem}.bad.jsonl")}
    for key, pair in pairs.items():
        counts[key].update(documents=len(pair), tokens=pair.num_tokens)
        files[f"_{key}.idx"] = hash_parts(f"{stem}_{key}.idx")
        files[f"_{key}.bin"] = [{"bytes": pair.num_tokens * dtype.itemsize, "sha256": pair.sha256.hexdigest()}]
    return {"lines": lines, "records": usable, "bad": bad, "outputs": counts, "files": files}


def _add(pair: IndexedDatasetBuilder, text: bytes, tokenizer: Tokenizer, eod: int | None) -> None:
    """Append a document; none if the text is empty."""
    if len(text) > PART_CHARACTERS:  # by parts, so that its ids are never in memory at once
        for part in split_text(text.decode()):
            pair.add(tokenizer.encode_utf8(part.encode()))
    elif text:
        pair.add(tokenizer.encode_utf8(text))
    if text:
        pair.end_document(eod)


def _texts(record: Record, keys: tuple[str, ...]) -> list[bytes]:
    """The texts of a document, in UTF-8. ValueError or RecursionError if it cannot be used."""
    try:
        item = fast_json()(record)
        return [item[key].encode() for key in keys]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # not a plain line of JSON
        item = json_object(record)
        return [text_of(item, key).encode() for key in keys]


@functools.lru_cache(1)
def fast_json() -> Callable[[bytes], Any]:
    """A parser of JSON: orjson's, two to three times faster, if it is installed, else json's. What it refuses is read
    with json."""
    try:
        import orjson
    except ImportError:
        return json.loads
    loads: Callable[[bytes], Any] = orjson.loads
    return loads


# --- shards to pairs


def _judge(job: Job, made: Sequence[Manifest], log: Log) -> None:
    """Gather the unusable lines; ValueError if they are too many or nothing else is left."""
    bad, usable = (sum(shard[name] for shard in made) for name in ("bad", "records"))
    path = Path(f"{job.output_prefix}.bad.jsonl")
    path.unlink(missing_ok=True)  # an earlier run's
    first = _gather_bad_lines(path, job.folder, made) if bad else ""
    if bad > job.max_bad_fraction * (bad + usable):
        raise ValueError(
            f"{first}; {bad:,} of {bad + usable:,} lines are unusable, more than --max-bad-fraction "
            f"{job.max_bad_fraction:g}: see {path}; --json-keys names the fields that hold text"
        )
    for key in job.keys:
        if not any(shard["outputs"][key]["documents"] for shard in made):
            raise ValueError(f"--input {' '.join(job.inputs)} holds no text under the key {key!r}")
    if bad:
        log(f"{bad:,} of {bad + usable:,} lines are unusable and left out: see {path}")


def _gather_bad_lines(path: Path, folder: Path, made: Sequence[Manifest]) -> str:
    """Write all unusable lines with their file and line; returns the first, in words."""
    first = ""
    lines_before: Counter[str] = Counter()  # of each file, in earlier shards
    with replacing(path, folder / "bad_lines") as out:
        for number, shard in enumerate(made):
            for line in (folder / f"{number:05d}.bad.jsonl").read_bytes().splitlines():
                entry = json.loads(line)
                entry["line"] += lines_before[entry["file"]]
                first = first or f"{entry['file']}:{entry['line']}: {entry['reason']}"
                out.write(json.dumps(entry).encode() + b"\n")
            for ((name, *_), _), lines in zip(shard["pieces"], shard["lines"], strict=True):
                lines_before[name] += lines
    return first


def _merge_shards(job: Job, key: str, made: Sequence[Manifest], tokenizer: Tokenizer) -> Manifest:
    """Write the pair of a key into the folder of the shards, with its manifest, which is returned."""
    outputs = [shard["outputs"][key] for shard in made]
    with IndexedDatasetBuilder(_merged(job, key), token_dtype(tokenizer.vocab_size)) as builder:
        for number in range(len(made)):
            builder.add_index(job.folder / f"{number:05d}_{key}")
    facts = {
        "key": key,
        "append_eod": job.append_eod,
        "recipe": job.recipe(tokenizer),
        "tokenizer": {name: getattr(tokenizer, name) for name in ("kind", "fingerprint", "vocab_size", "eod")},
        "text_bytes": sum(output["text_bytes"] for output in outputs),
        "empty_documents": sum(output["empty"] for output in outputs),
        "bad_lines": sum(shard["bad"] for shard in made),
        "inputs": _inputs(made),
    }
    parts = [part for shard in made for part in shard["files"][f"_{key}.bin"]]
    return write_manifest(_merged(job, key), facts, parts)


def _merged(job: Job, key: str) -> str:
    """Where the pair of a key grows: among the shards, so that a run that is killed leaves nothing elsewhere."""
    return str(job.folder / f"merged_{key}")


def _publish(temporary: str, prefix: str) -> None:
    """A whole pair and its manifest take their names; the `.idx` last, without which there is no pair."""
    for suffix in (".bin", ".json", ".idx"):
        os.replace(f"{temporary}{suffix}", f"{prefix}{suffix}")
    sync_folder(Path(prefix).parent)


def merge(sources: Sequence[str], output_prefix: str, eod: int) -> Manifest:
    """Write the documents of all `sources`, in order, to the pair at `output_prefix`; returns its manifest.

    eod: the end-of-document id, which cuts nanoGPT's and llm.c's files into documents. ValueError or FileNotFoundError
    if the sources cannot be one pair.
    """
    if os.path.exists(f"{output_prefix}.idx"):
        raise ValueError(f"--output-prefix {output_prefix}: the pair exists: remove it, or name another one")
    files = [open_tokens(source, eod) for source in sources]
    manifests = [file.manifest() for file in files]
    for source, file, manifest in zip(sources, files, manifests, strict=True):
        if file.dtype != files[0].dtype:
            raise ValueError(f"{source} holds {file.dtype}, but {sources[0]} {files[0].dtype}: they can't be one file")
        if manifest and damaged_parts(f"{file.prefix}.bin", manifest[".bin"]):
            raise ValueError(f"{source} is damaged: its tokens are not those of its manifest")
    tokenizers = [manifest["tokenizer"] for manifest in manifests if manifest and manifest["tokenizer"]]
    if any(tokenizer != tokenizers[0] for tokenizer in tokenizers):
        raise ValueError("the files were made by different tokenizers, as their manifests say: they can't be one")
    Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
    temporary = f"{output_prefix}.{os.getpid()}.tmp"
    with IndexedDatasetBuilder(temporary, files[0].dtype) as builder:
        for file in files:
            if isinstance(file, ForeignBin):
                for number in range(len(file)):
                    builder.add(file[number])
                    builder.end_document()
            else:
                builder.add_index(file.prefix)
        builder.finish()
        inputs = [{"file": name, "bytes": file.tokens.nbytes} for name, file in zip(sources, files, strict=True)]
        made_by = tokenizers[0] if len(tokenizers) == len(sources) else None
        merged = write_manifest(temporary, {"tokenizer": made_by, "inputs": inputs})
    _publish(temporary, output_prefix)
    return merged
