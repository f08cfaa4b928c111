"""Text files to .bin/.idx pairs by several processes, restartable: the plan, the shards, the merge and the report.

The input is cut into shards by its size alone, so that the result is the same under any number of workers. Shards are
made in PREFIX.shards (`shards`), then merged and renamed, each `.idx` last; what is finished there is taken
up again by a later run.
"""

import contextlib
import errno
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.corpora.documents import MOST_BAD_LINES, Log, compression_of, json_object
from data_utils.files import content_hash, file_lock, replacing, sync_folder, write_sealed
from data_utils.indexed_dataset import PairMerger, read_index, token_dtype
from data_utils.preprocessing.document_lengths import histogram, summary
from data_utils.preprocessing.inputs import FileRange, cut, expand, records, whole_file
from data_utils.preprocessing.shards import Progress, Recipe, bad_lines_of, make_shards
from data_utils.token_files import describe, read_manifest
from data_utils.tokenizers import build_tokenizer
from data_utils.tokenizers.base import Tokenizer

SAMPLE_CHARACTERS = 1 << 16
COMPRESSED_TEXT = 4  # bytes of text that a byte of a compressed file may well hold


@dataclass(frozen=True)
class Job:
    """What to make. tokenizer: the arguments of `build_tokenizer`, since each worker builds its own. ValueError names a
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


def preprocess(
    job: Job, *, log: Log, progress: Callable[[int], contextlib.AbstractContextManager[Progress]]
) -> dict[str, dict[str, Any]]:
    """Make the pairs, unless they are there and were made from the same input in the same way. Returns each key's
    manifest.

    progress: opens a bar for a number of bytes. ValueError, FileNotFoundError or OSError, in one line, where the input,
    a flag or the disk is at fault; the shards that are finished are kept then, and nothing else.
    """
    tokenizer = build_tokenizer(**job.tokenizer)
    if job.append_eod and not tokenizer.has_eod:
        raise ValueError(f"--append-eod: the tokenizer {tokenizer.kind} has no end of document")
    recipe = Recipe(job.keys, job.append_eod, tokenizer.fingerprint)
    spans = [whole_file(path, job.keys) for path in expand(job.inputs)]
    shards = cut(spans)
    folder = Path(f"{job.output_prefix}.shards")
    found = _made_before(job, recipe, spans)
    if found is not None:
        log(f"{', '.join(job.output(key) for key in job.keys)}: made of this input before, nothing to do")
        shutil.rmtree(folder, ignore_errors=True)
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / "lock", lambda: _refuse(folder)):
            for left in folder.glob("*.tmp*"):  # of a run that was killed
                left.unlink()
            _check_room(job, folder, spans, tokenizer)
            mergers = {key: PairMerger(_merged(folder, key)) for key in job.keys}
            try:

                def append(number: int) -> None:
                    for key, merger in mergers.items():
                        merger.append(folder / f"{number:05d}_{key}")

                with progress(sum(span.stop - span.start for span in spans)) as bar:
                    facts = make_shards(
                        folder,
                        shards,
                        recipe,
                        tokenizer,
                        job.tokenizer,
                        workers=job.workers,
                        progress=bar,
                        finished=append,
                    )
                _judge(job, folder, facts, log)
                manifests = _publish(job, folder, facts, tokenizer, mergers)
            except BaseException:
                for merger in mergers.values():
                    merger.abandon()
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


def _refuse(folder: Path) -> None:
    raise ValueError(f"another process is writing into {folder}: wait for it, or take another --output-prefix")


def _made_before(job: Job, recipe: Recipe, spans: Sequence[FileRange]) -> dict[str, dict[str, Any]] | None:
    """The manifests, where every pair is there and was made of this input in this way. ValueError where a pair was
    made of something else."""
    found = {}
    for key in job.keys:
        output = job.output(key)
        if not os.path.exists(f"{output}.idx"):
            continue
        manifest = read_manifest(output)
        if (
            manifest is None
            or manifest["recipe"] != recipe.fingerprint
            or [entry["file"] for entry in manifest["inputs"]] != [span.path for span in spans]
            or not all(_unchanged(entry, span) for entry, span in zip(manifest["inputs"], spans, strict=True))
        ):
            raise ValueError(
                f"{output}.idx exists and was made of other input or in another way: remove it, or take "
                "another --output-prefix"
            )
        found[key] = manifest
    return found if len(found) == len(job.keys) else None


def _unchanged(entry: Mapping[str, Any], span: FileRange) -> bool:
    stops = itertools.accumulate(size for size, _ in entry["parts"])
    return entry["bytes"] == span.stop and all(
        content_hash(span.path, stop - size, stop) == written
        for stop, (size, written) in zip(stops, entry["parts"], strict=True)
    )


def _check_room(job: Job, folder: Path, spans: Sequence[FileRange], tokenizer: Tokenizer) -> None:
    """OSError where the disk has clearly too little room for the shards and the pairs merged from them, by what the
    first documents need."""
    characters = tokens = 0
    for _, record in records(spans[0], job.keys):
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            item = json_object(record)
            for text in (item[key] for key in job.keys):
                characters += len(text)
                tokens += len(tokenizer.encode(text[:SAMPLE_CHARACTERS])) * max(1, len(text) // SAMPLE_CHARACTERS)
        if characters > SAMPLE_CHARACTERS:
            break
    text = sum(
        (span.stop - span.start)
        * (1 if compression_of(span.path) is None and span.kind != "parquet" else COMPRESSED_TEXT)
        for span in spans
    )
    pair = int(text * tokens / max(1, characters)) * token_dtype(tokenizer.vocab_size).itemsize
    there = sum(path.stat().st_size for path in folder.iterdir())
    needed, free = 2 * pair - there, shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"--output-prefix {job.output_prefix}: about {needed / 1e9:,.2f} GB are needed, shards and "
            f"result, but only {free / 1e9:,.2f} GB are free on that disk"
        )


def _judge(job: Job, folder: Path, facts: Sequence[Mapping[str, Any]], log: Log) -> None:
    """Gather the unusable lines; ValueError where they are too many or nothing else is left."""
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


def _publish(
    job: Job, folder: Path, facts: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, mergers: Mapping[str, PairMerger]
) -> dict[str, dict[str, Any]]:
    """The pairs and manifests of all keys in their place."""
    manifests = {}
    for key, merger in mergers.items():
        merger.finish()
        outputs = [shard["outputs"][key] for shard in facts]
        manifests[key] = describe(
            _merged(folder, key),
            {
                "key": key,
                "append_eod": job.append_eod,
                "recipe": facts[0]["recipe"],
                "tokenizer": {
                    "kind": tokenizer.kind,
                    "fingerprint": tokenizer.fingerprint,
                    "vocab_size": tokenizer.vocab_size,
                    "eod": tokenizer.eod,
                },
                "text_bytes": sum(output["text_bytes"] for output in outputs),
                "empty_documents": sum(output["empty"] for output in outputs),
                "bad_lines": sum(shard["bad"] for shard in facts),
                "inputs": _inputs(facts),
            },
            [part for output in outputs for part in output[".bin"]],
        )
        write_sealed(Path(f"{_merged(folder, key)}.json"), manifests[key])
    for key in mergers:
        for suffix in (".bin", ".json", ".idx"):
            os.replace(f"{_merged(folder, key)}{suffix}", f"{job.output(key)}{suffix}")
    sync_folder(Path(job.output_prefix).parent)
    return manifests


def _merged(folder: Path, key: str) -> str:
    """Where the pair of a key grows: in the shards' folder, so that a run that is killed leaves nothing elsewhere."""
    return str(folder / f"merged_{key}.tmp")


def _inputs(facts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each input file with its size, lines and the hashes of its parts."""
    inputs: list[dict[str, Any]] = []
    for made in (piece for shard in facts for piece in shard["pieces"]):
        path, _, start, stop = made["piece"]
        if start == 0:
            inputs.append({"file": path, "bytes": 0, "lines": 0, "parts": []})
        inputs[-1]["bytes"] = stop
        inputs[-1]["lines"] += made["lines"]
        inputs[-1]["parts"].append([stop - start, made["hash"]])
    return inputs


def report(job: Job, manifest: Mapping[str, Any], seconds: float) -> list[str]:
    """The closing report of one key, in lines."""
    output = job.output(manifest["key"])
    index = read_index(output)
    lengths = np.diff(index.starts[index.firsts])
    text, tokens = manifest["text_bytes"], manifest["tokens"]
    size = sum(entry["bytes"] for entry in manifest["inputs"])
    plain_tokens = tokens - manifest["documents"] * manifest["append_eod"]
    return [
        f"{output}.bin, .idx, .json: {manifest['documents']:,} documents, {tokens:,} tokens ({manifest['dtype']}), "
        f"{text:,} bytes of text, {text / plain_tokens:.2f} bytes per token",
        summary(lengths),
        *histogram(lengths),
        f"{manifest['bad_lines']:,} bad lines and {manifest['empty_documents']:,} empty documents left out",
        f"{seconds:.1f} s, {size / 1e6 / seconds:.1f} MB/s of input, {tokens / 1e6 / seconds:.2f} M tokens/s",
    ]
