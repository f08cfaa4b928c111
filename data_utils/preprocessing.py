"""Text files to .bin/.idx pairs by several processes, restartable: the plan, the pool, the merge and the report.

The input is cut into shards by its size alone, so that the result is the same under any number of workers. Shards are
made in PREFIX.shards (`preprocess_shards`), then merged and renamed, each `.idx` last; what is finished there is taken
up again by a later run.
"""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.compression import compression_of
from data_utils.corpora import MOST_BAD_LINES, Log, json_object
from data_utils.document_lengths import histogram, summary
from data_utils.file_lock import file_lock, sync_folder
from data_utils.indexed_dataset import merge_pairs, read_index, token_dtype
from data_utils.manifest import content_hash, describe, read_manifest, write_sealed
from data_utils.preprocess_plan import Shard, cut, expand, piece_of
from data_utils.preprocess_shards import SUFFIXES, Piece, Progress, Recipe, bad_lines_of, make_shard, records
from data_utils.tokenization import Tokenizer, build_tokenizer

SAMPLE_CHARACTERS = 1 << 18
COMPRESSED_TEXT = 4  # bytes of text that a byte of a compressed file may well hold
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    """What to make. `tokenizer` are the arguments of `build_tokenizer`: each worker builds its own."""

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

    def output(self, key: str) -> str:
        """The prefix of a key's pair, as Megatron names it."""
        return f"{self.output_prefix}_{key}_document"


def preprocess(job: Job, *, log: Log, progress: Callable[[int], contextlib.AbstractContextManager[Progress]]
               ) -> dict[str, dict[str, Any]]:
    """Make the pairs, or find them made of just this before; returns the manifest of each key.

    `progress(bytes)` opens a bar. ValueError, FileNotFoundError or OSError in one line where the input, a flag or the
    disk is at fault; whole shards are kept then, and nothing else.
    """
    tokenizer = build_tokenizer(**job.tokenizer)
    recipe = Recipe(job.keys, job.append_eod, tokenizer.fingerprint)
    pieces = [piece_of(path, job.keys) for path in expand(job.inputs)]
    shards = cut(pieces)
    folder = Path(f"{job.output_prefix}.shards")
    found = _made_before(job, recipe, pieces)
    if found is not None:
        log(f"{', '.join(job.output(key) for key in job.keys)}: made of this input before, nothing to do")
        shutil.rmtree(folder, ignore_errors=True)
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / "lock", lambda: _refuse(folder)):
            for left in folder.glob("*.tmp*"):  # of a run that was killed
                left.unlink()
            _check_room(job, folder, pieces, tokenizer)
            with progress(sum(piece.stop - piece.start for piece in pieces)) as bar:
                facts = _make_all(job, folder, shards, recipe, tokenizer, bar)
            _judge(job, folder, shards, facts, log)
            manifests = _merge(job, folder, shards, facts, tokenizer)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(f"no room left on the disk of {job.output_prefix}: nothing is half written; {folder} keeps the "
                      "shards that are finished, and the same command goes on with them") from None
    shutil.rmtree(folder)
    return manifests


def _refuse(folder: Path) -> None:
    raise ValueError(f"another process is writing into {folder}: wait for it, or take another --output-prefix")


def _made_before(job: Job, recipe: Recipe, pieces: Sequence[Piece]) -> dict[str, dict[str, Any]] | None:
    """The manifests, where every pair is there and was made of this input in this way. ValueError where a pair was
    made of something else."""
    found = {}
    for key in job.keys:
        output = job.output(key)
        if not os.path.exists(f"{output}.idx"):
            continue
        manifest = read_manifest(output)
        same = manifest is not None and manifest["recipe"] == recipe.fingerprint \
            and [entry["file"] for entry in manifest["inputs"]] == [piece.path for piece in pieces] \
            and all(_unchanged(entry, piece) for entry, piece in zip(manifest["inputs"], pieces, strict=True))
        if manifest is None or not same:
            raise ValueError(f"{output}.idx exists and was made of other input or in another way: remove it, or take "
                             "another --output-prefix")
        found[key] = manifest
    return found if len(found) == len(job.keys) else None


def _unchanged(entry: Mapping[str, Any], piece: Piece) -> bool:
    if entry["bytes"] != piece.stop:
        return False
    start = 0
    for size, hash_of_part in entry["parts"]:
        if content_hash(piece.path, start, start + size) != hash_of_part:
            return False
        start += size
    return True


def _check_room(job: Job, folder: Path, pieces: Sequence[Piece], tokenizer: Tokenizer) -> None:
    """OSError where the disk has clearly too little room for the shards and the pairs merged from them, by what the
    first documents need."""
    characters = tokens = 0
    for _, record in records(pieces[0], job.keys):
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            item = json_object(record)
            for text in (item[key] for key in job.keys):
                characters += len(text)
                tokens += len(tokenizer.encode(text[:SAMPLE_CHARACTERS])) * max(1, len(text) // SAMPLE_CHARACTERS)
        if characters > SAMPLE_CHARACTERS:
            break
    text = sum((piece.stop - piece.start) * (1 if compression_of(piece.path) is None and piece.kind != "parquet"
                                             else COMPRESSED_TEXT) for piece in pieces)
    pair = int(text * tokens / max(1, characters)) * token_dtype(tokenizer.vocab_size).itemsize
    there = sum(path.stat().st_size for path in folder.iterdir())
    needed, free = 2 * pair - there, shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(f"--output-prefix {job.output_prefix}: about {needed / 1e9:,.2f} GB are needed, shards and "
                      f"result, but only {free / 1e9:,.2f} GB are free on that disk")


# What a worker process has: set once, when it starts.
_work: Callable[[int, Shard], dict[str, Any]]


def _start_worker(folder: Path, recipe: Recipe, tokenizer: Mapping[str, Any], counters: Any) -> None:
    """`counters`: int64 [2] in shared memory, bytes of input and tokens."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # A pool's workers would wait for work for ever if the program were killed.
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()

    def count(read: int, tokens: int) -> None:
        with counters.get_lock():
            counters[0] += read
            counters[1] += tokens

    global _work
    _work = partial(make_shard, folder, recipe=recipe, tokenizer=build_tokenizer(**tokenizer), progress=count)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _work_on(number: int, pieces: Shard) -> dict[str, Any]:
    return _work(number, pieces)


def _make_all(job: Job, folder: Path, shards: Sequence[Shard], recipe: Recipe, tokenizer: Tokenizer,
              progress: Progress) -> list[dict[str, Any]]:
    """The facts of all shards in order; one process makes them itself."""
    if min(job.workers, len(shards)) == 1:
        return [make_shard(folder, number, pieces, recipe, tokenizer, progress)
                for number, pieces in enumerate(shards)]
    # Spawned, not forked: the libraries below start threads.
    context = multiprocessing.get_context("spawn")
    counters = context.Array("q", 2)
    told = [0, 0]

    def tell() -> None:
        now = counters[:]
        progress(now[0] - told[0], now[1] - told[1])
        told[:] = now

    with ProcessPoolExecutor(min(job.workers, len(shards)), context, _start_worker,
                             (folder, recipe, job.tokenizer, counters)) as pool:
        try:
            futures = [pool.submit(_work_on, number, pieces) for number, pieces in enumerate(shards)]
            left = set(futures)
            while left:
                done, left = wait(left, POLL_SECONDS, FIRST_COMPLETED)
                tell()
                for future in done:
                    future.result()  # raises what the worker raised
        except BrokenProcessPool:
            raise OSError("a worker process died, most likely for want of memory: the same command with fewer "
                          "--workers goes on with the shards that are finished") from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _judge(job: Job, folder: Path, shards: Sequence[Shard], facts: Sequence[Mapping[str, Any]], log: Log) -> None:
    """Gather the unusable lines; ValueError where they are too many or nothing else is left."""
    bad, usable = (sum(shard[name] for shard in facts) for name in ("bad", "records"))
    path = Path(f"{job.output_prefix}.bad.jsonl")
    path.unlink(missing_ok=True)  # an earlier run's
    first = _gather_bad_lines(path, folder, shards, facts) if bad else ""
    if bad > job.max_bad_fraction * (bad + usable):
        raise ValueError(f"{first}; {bad:,} of {bad + usable:,} lines are unusable, more than --max-bad-fraction "
                         f"{job.max_bad_fraction:g}: see {path}; --json-keys names the fields that hold text")
    for key in job.keys:
        if not any(shard["outputs"][key]["documents"] for shard in facts):
            raise ValueError(f"--input {' '.join(job.inputs)} holds no text under the key {key!r}")
    if bad:
        log(f"{bad:,} of {bad + usable:,} lines are unusable and left out: see {path}")


def _gather_bad_lines(path: Path, folder: Path, shards: Sequence[Shard], facts: Sequence[Mapping[str, Any]]) -> str:
    """Write all unusable lines with their file and line; returns the first, in words."""
    first = ""
    lines_before: dict[str, int] = {}
    temporary = folder / "bad_lines.tmp"
    with open(temporary, "w", encoding="utf-8") as out:
        for number, (pieces, shard) in enumerate(zip(shards, facts, strict=True)):
            starts = []
            for piece, made in zip(pieces, shard["pieces"], strict=True):
                starts.append(lines_before.get(piece.path, 0))
                lines_before[piece.path] = starts[-1] + made["lines"]
            if shard["bad"]:
                with open(bad_lines_of(folder / f"{number:05d}"), encoding="utf-8") as file:
                    for line in map(json.loads, file):
                        name, where = pieces[line["piece"]].path, starts[line["piece"]] + line["line"]
                        first = first or f"{name}:{where}: {line['reason']}"
                        json.dump({"file": name, "line": where, "reason": line["reason"], "content": line["content"]},
                                  out)
                        out.write("\n")
    os.replace(temporary, path)
    return first


def _merge(job: Job, folder: Path, shards: Sequence[Shard], facts: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
           ) -> dict[str, dict[str, Any]]:
    """The pairs and manifests of all keys in their place."""
    inputs: dict[int, dict[str, Any]] = {}
    place = -1
    for pieces, shard in zip(shards, facts, strict=True):
        for piece, made in zip(pieces, shard["pieces"], strict=True):
            place += piece.start == 0  # the same file may be named twice
            entry = inputs.setdefault(place, {"file": piece.path, "bytes": 0, "lines": 0, "parts": []})
            entry["bytes"] += piece.stop - piece.start
            entry["lines"] += made["lines"]
            entry["parts"].append([piece.stop - piece.start, made["hash"]])
    manifests = {}
    for key in job.keys:
        output, outputs = job.output(key), [shard["outputs"][key] for shard in facts]
        temporary = str(folder / f"merged_{key}.tmp")  # a run that is killed leaves nothing elsewhere
        try:
            merge_pairs([folder / f"{number:05d}_{key}" for number in range(len(shards))], temporary)
            manifests[key] = describe(temporary, {
                "key": key, "append_eod": job.append_eod, "recipe": facts[0]["recipe"],
                "tokenizer": {"kind": tokenizer.kind, "fingerprint": tokenizer.fingerprint,
                              "vocab_size": tokenizer.vocab_size, "eod": tokenizer.eod},
                "text_bytes": sum(entry["text_bytes"] for entry in outputs),
                "empty_documents": sum(entry["empty"] for entry in outputs),
                "bad_lines": sum(shard["bad"] for shard in facts), "inputs": list(inputs.values()),
            }, [part for entry in outputs for part in entry[".bin"]])
            write_sealed(Path(f"{temporary}.json"), manifests[key])
            for suffix in (".bin", ".json", ".idx"):
                os.replace(f"{temporary}{suffix}", f"{output}{suffix}")
        except BaseException:
            for suffix in (*SUFFIXES, ".json"):
                Path(f"{temporary}{suffix}").unlink(missing_ok=True)
            raise
        sync_folder(Path(output).parent)
    return manifests


def report(job: Job, manifest: Mapping[str, Any], seconds: float) -> list[str]:
    """The closing report of one key, in lines."""
    output = job.output(manifest["key"])
    index = read_index(output)
    lengths = np.diff(index.starts[index.firsts])
    text, tokens = manifest["text_bytes"], manifest["tokens"]
    size = sum(entry["bytes"] for entry in manifest["inputs"])
    plain_tokens = tokens - manifest["documents"] * manifest["append_eod"]
    return [f"{output}.bin, .idx, .json: {manifest['documents']:,} documents, {tokens:,} tokens ({manifest['dtype']}), "
            f"{text:,} bytes of text, {text / plain_tokens:.2f} bytes per token",
            summary(lengths), *histogram(lengths),
            f"{manifest['bad_lines']:,} bad lines and {manifest['empty_documents']:,} empty documents left out",
            f"{seconds:.1f} s, {size / 1e6 / seconds:.1f} MB/s of input, {tokens / 1e6 / seconds:.2f} M tokens/s"]
