"""Text files to .bin/.idx pairs by several processes, restartable: the plan, the shards, the merge and the report. And
several token files into one pair.

The input is cut into shards by its size, so that the result is the same under any number of workers. Shards are made in
PREFIX.shards (`shards`), then merged and renamed, each `.idx` last; a later run continues with the finished ones.
"""

import contextlib
import errno
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.command_line import progress_bar
from data_utils.corpora.documents import MOST_BAD_LINES, Log, compression_of, json_object
from data_utils.files import damaged_parts, file_lock, replacing, sync_folder, write_sealed
from data_utils.indexed_dataset import (
    ForeignBin,
    IndexedDataset,
    IndexedDatasetBuilder,
    describe,
    open_tokens,
    read_manifest,
    token_dtype,
)
from data_utils.preprocessing.inputs import FileRange, Shard, cut, expand, records, whole_file
from data_utils.preprocessing.lengths import summary
from data_utils.preprocessing.shards import Progress, Recipe, bad_lines_of, make_shards
from data_utils.tokenizers import build_tokenizer
from data_utils.tokenizers.base import Tokenizer

SAMPLE_CHARACTERS = 1 << 16
COMPRESSED_TEXT = 4  # bytes of text that a byte of a compressed file may well hold


@dataclass(frozen=True)
class Job:
    """The pairs to make. tokenizer: the arguments of `build_tokenizer`, since each worker builds its own. ValueError names a
    flag."""

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


def preprocess(job: Job, *, log: Log) -> dict[str, dict[str, Any]]:
    """Make the pairs, unless they are there and were made from the same input in the same way. Returns each key's
    manifest.

    ValueError, FileNotFoundError or OSError, in one line, if the input, a flag or the disk is at fault; the shards that
    are finished are kept then, and nothing else.
    """
    tokenizer = build_tokenizer(**job.tokenizer)
    if job.append_eod and not tokenizer.has_eod:
        raise ValueError(f"--append-eod: the tokenizer {tokenizer.kind} has no end of document")
    recipe = Recipe(job.keys, job.append_eod, tokenizer.fingerprint)
    spans = [whole_file(path, job.keys) for path in expand(job.inputs)]
    shards = cut(spans)
    folder = Path(f"{job.output_prefix}.shards")
    manifests = _made_before(job, recipe, shards)
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
            _check_room(job, folder, spans, tokenizer)
            try:
                with _bar(sum(span.size for span in spans)) as progress:
                    facts = make_shards(
                        folder, shards, recipe, tokenizer, job.tokenizer, workers=job.workers, progress=progress
                    )
                _judge(job, folder, facts, log)
                manifests = {key: _merge_shards(job, key, folder, facts, tokenizer) for key in job.keys}
                for key in job.keys:  # all are whole before the first takes its name
                    _publish(_merged(folder, key), job.output(key))
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
    for left in folder.glob("*.tmp*"):
        left.unlink()


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Progress]:
    """A progress bar over `total` bytes of input, with their rate, the time to go and tokens per second."""
    started, all_tokens = time.monotonic(), 0
    with progress_bar(total=total, unit="B", unit_scale=True, desc="tokenising") as shown:

        def progress(read: int, tokens: int) -> None:
            nonlocal all_tokens
            all_tokens += tokens
            rate = all_tokens / max(time.monotonic() - started, 1e-9)
            shown.set_postfix_str(f"{rate / 1e6:.2f} M tokens/s", refresh=False)
            shown.update(read)

        yield progress


def _made_before(job: Job, recipe: Recipe, shards: Sequence[Shard]) -> dict[str, dict[str, Any]] | None:
    """The manifests, if every pair is there and was made of this input in this way. ValueError if a pair was made of
    something else."""
    there = [key for key in job.keys if os.path.exists(f"{job.output(key)}.idx")]
    if not there:
        return None
    today = _inputs((span, span.content_hash(), 0) for spans in shards for span in spans)
    found = {}
    for key in there:
        found[key] = manifest = read_manifest(job.output(key)) or {"inputs": []}
        made_of = [{**entry, "lines": 0} for entry in manifest["inputs"]]
        if manifest.get("recipe") != recipe.fingerprint or made_of != today:
            raise ValueError(
                f"{job.output(key)}.idx exists and was made of other input or in another way: remove it, or take "
                "another --output-prefix"
            )
    return found if len(there) == len(job.keys) else None


def _inputs(pieces: Iterable[tuple[FileRange, str, int]]) -> list[dict[str, Any]]:
    """Each input file with its size, lines and the hashes of its parts. A piece: its range, hash and lines."""
    inputs: list[dict[str, Any]] = []
    for span, hashed, lines in pieces:
        if span.start == 0:
            inputs.append({"file": span.path, "bytes": 0, "lines": 0, "parts": []})
        inputs[-1]["bytes"] = span.stop
        inputs[-1]["lines"] += lines
        inputs[-1]["parts"].append([span.size, hashed])
    return inputs


def _check_room(job: Job, folder: Path, spans: Sequence[FileRange], tokenizer: Tokenizer) -> None:
    """OSError if the disk has clearly too little room for the shards and the pairs merged from them, by what the first
    documents need."""
    characters = tokens = 0
    for _, record in records(spans[0], job.keys):
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            item = json_object(record)
            for text in (item[key] for key in job.keys):
                characters += len(text)
                tokens += len(tokenizer.encode(text[:SAMPLE_CHARACTERS])) * max(1, len(text) // SAMPLE_CHARACTERS)
        if characters > SAMPLE_CHARACTERS:
            break
    packed = [span.kind == "parquet" or compression_of(span.path) is not None for span in spans]
    text = sum(span.size * (COMPRESSED_TEXT if is_packed else 1) for span, is_packed in zip(spans, packed, strict=True))
    pair = int(text * tokens / max(1, characters)) * token_dtype(tokenizer.vocab_size).itemsize
    needed = 2 * pair - sum(path.stat().st_size for path in folder.iterdir())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"--output-prefix {job.output_prefix}: about {needed / 1e9:,.2f} GB are needed, shards and "
            f"result, but only {free / 1e9:,.2f} GB are free on that disk"
        )


def _judge(job: Job, folder: Path, facts: Sequence[Mapping[str, Any]], log: Log) -> None:
    """Gather the unusable lines; ValueError if they are too many or nothing else is left."""
    bad, usable = (sum(shard[name] for shard in facts) for name in ("bad", "records"))
    path = Path(f"{job.output_prefix}.bad.jsonl")
    path.unlink(missing_ok=True)  # an earlier run's
    first = _gather_bad_lines(path, folder, facts) if bad else ""
    if bad > job.max_bad_fraction * (bad + usable):
        raise ValueError(
            f"{first}; {bad:,} of {bad + usable:,} lines are unusable, more than --max-bad-fraction "
            f"{job.max_bad_fraction:g}: see {path}; --json-keys names the fields that hold text"
        )
    for key in job.keys:
        if not any(shard["outputs"][key]["documents"] for shard in facts):
            raise ValueError(f"--input {' '.join(job.inputs)} holds no text under the key {key!r}")
    if bad:
        log(f"{bad:,} of {bad + usable:,} lines are unusable and left out: see {path}")


def _gather_bad_lines(path: Path, folder: Path, facts: Sequence[Mapping[str, Any]]) -> str:
    """Write all unusable lines with their file and line; returns the first, in words."""
    first = ""
    lines_before: Counter[str] = Counter()
    with replacing(path, folder / "bad_lines.tmp") as out:
        for number, shard in enumerate(facts):
            places = []  # of each piece: its file, and how many lines of the file are before it
            for made in shard["pieces"]:
                name = made["piece"][0]
                places.append((name, lines_before[name]))
                lines_before[name] += made["lines"]
            if shard["bad"]:
                with open(bad_lines_of(folder / f"{number:05d}"), encoding="utf-8") as file:
                    for line in map(json.loads, file):
                        name, before = places[line.pop("piece")]
                        entry = {"file": name, **line, "line": before + line["line"]}
                        first = first or f"{name}:{entry['line']}: {line['reason']}"
                        out.write(json.dumps(entry).encode() + b"\n")
    return first


def _merge_shards(
    job: Job, key: str, folder: Path, facts: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Write the pair of a key, still under another name, with its manifest, which is returned."""
    prefix = _merged(folder, key)
    builder = IndexedDatasetBuilder(prefix, token_dtype(tokenizer.vocab_size))
    for number in range(len(facts)):
        builder.add_index(folder / f"{number:05d}_{key}")
    builder.finish()
    outputs = [shard["outputs"][key] for shard in facts]
    pieces = [piece for shard in facts for piece in shard["pieces"]]
    manifest = describe(
        prefix,
        {
            "key": key,
            "append_eod": job.append_eod,
            "recipe": facts[0]["recipe"],
            "tokenizer": {name: getattr(tokenizer, name) for name in ("kind", "fingerprint", "vocab_size", "eod")},
            "text_bytes": sum(output["text_bytes"] for output in outputs),
            "empty_documents": sum(output["empty"] for output in outputs),
            "bad_lines": sum(shard["bad"] for shard in facts),
            "inputs": _inputs((FileRange(*piece["piece"]), piece["hash"], piece["lines"]) for piece in pieces),
        },
        [part for output in outputs for part in output[".bin"]],
    )
    write_sealed(Path(f"{prefix}.json"), manifest)
    return manifest


def _merged(folder: Path, key: str) -> str:
    """Where the pair of a key grows: in the shards' folder, so that a run that is killed leaves nothing elsewhere."""
    return str(folder / f"merged_{key}.tmp")


def _publish(temporary: str, prefix: str) -> None:
    """A whole pair and its manifest take their names; the `.idx` last, without which there is no pair."""
    for suffix in (".bin", ".json", ".idx"):
        os.replace(f"{temporary}{suffix}", f"{prefix}{suffix}")
    sync_folder(Path(prefix).parent)


def report(job: Job, manifest: Mapping[str, Any], seconds: float) -> list[str]:
    """The closing report of one key, in lines."""
    output = job.output(manifest["key"])
    text, tokens = manifest["text_bytes"], manifest["tokens"]
    size = sum(entry["bytes"] for entry in manifest["inputs"])
    plain_tokens = tokens - manifest["documents"] * manifest["append_eod"]
    return [
        f"{output}.bin, .idx, .json: {manifest['documents']:,} documents, {tokens:,} tokens ({manifest['dtype']}), "
        f"{text:,} bytes of text, {text / plain_tokens:.2f} bytes per token",
        *summary(np.diff(IndexedDataset(output).document_starts)),
        f"{manifest['bad_lines']:,} bad lines and {manifest['empty_documents']:,} empty documents left out",
        f"{seconds:.1f} s, {size / 1e6 / seconds:.1f} MB/s of input, {tokens / 1e6 / seconds:.2f} M tokens/s",
    ]


def merge(sources: Sequence[str], output_prefix: str, eod: int) -> dict[str, Any]:
    """Write the documents of all `sources`, in order, to the pair at `output_prefix`; returns its manifest.

    eod: the end-of-document id, which cuts nanoGPT's and llm.c's files into documents. ValueError or FileNotFoundError
    if the sources cannot be one pair.
    """
    if os.path.exists(f"{output_prefix}.idx"):
        raise ValueError(f"--output-prefix {output_prefix}: the pair exists: remove it, or name another one")
    files = [open_tokens(source, eod) for source in sources]
    for source, file in zip(sources, files, strict=True):
        if file.dtype != files[0].dtype:
            raise ValueError(f"{source} holds {file.dtype}, but {sources[0]} {files[0].dtype}: they can't be one file")
    manifests = [file.manifest() for file in files]
    for source, file, manifest in zip(sources, files, manifests, strict=True):
        if manifest and damaged_parts(f"{file.prefix}.bin", manifest[".bin"]):
            raise ValueError(f"{source} is damaged: its tokens are not those of its manifest")
    tokenizers = [manifest["tokenizer"] for manifest in manifests if manifest and manifest["tokenizer"]]
    if any(tokenizer != tokenizers[0] for tokenizer in tokenizers):
        raise ValueError("the files were made by different tokenizers, as their manifests say: they can't be one")
    Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
    temporary = f"{output_prefix}.{os.getpid()}.tmp"
    builder = IndexedDatasetBuilder(temporary, files[0].dtype)
    try:
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
        merged = describe(temporary, {"tokenizer": made_by, "inputs": inputs})
        write_sealed(Path(f"{temporary}.json"), merged)
    except BaseException:
        builder.abandon()
        raise
    _publish(temporary, output_prefix)
    return merged
