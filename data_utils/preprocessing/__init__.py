"""Preprocessing: turn text files into .bin/.idx pairs with several processes. Merge token files.

The input is cut into shards by its size (`inputs`), so that the result does not depend on the number of workers. The
output of shard 7 is in PREFIX.shards:

    00007_text.bin, .idx   its documents in order, a pair for each JSON key
    00007.bad.jsonl        its unusable lines
    00007.json             its manifest: the input and the hashes of all files; written last

Preprocessing can be restarted. A shard without a manifest is unfinished, and its files are removed. A shard is not made
again if its manifest matches the input, the recipe and the files. At the end the shards are merged, and the pairs are
renamed to their final names, each `.idx` last.
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
    MAX_BAD_FRACTION,
    MAX_LEADING_BAD_LINES,
    Log,
    detect_compression,
    error_reason,
    expand_paths,
    get_text,
    json_object,
)
from data_utils.files import (
    PREPROCESSING_SHARD_VERSION,
    atomic_write,
    content_hash,
    file_lock,
    find_damaged_chunks,
    fingerprint_of,
    fsync_path,
    hash_chunks,
    read_checksummed_json,
    write_checksummed_json,
)
from data_utils.indexed_dataset import (
    IndexedDatasetBuilder,
    RawTokenFile,
    open_token_file,
    read_manifest,
    token_dtype,
    write_manifest,
)
from data_utils.preprocessing.inputs import (
    FileRange,
    Record,
    Shard,
    cut_into_shards,
    list_input_files,
    records,
    whole_file,
)
from data_utils.tokenizers import build_tokenizer
from data_utils.tokenizers.base import PART_CHARACTERS, Tokenizer, split_text
from data_utils.worker_processes import map_in_processes, report_progress

SAMPLE_CHARACTERS = 1 << 16
COMPRESSION_RATIO = 4  # an estimate: bytes of text for each byte of a compressed file

Manifest = dict[str, Any]
Progress = Callable[[int], object]  # is called with the bytes of input that were read since its last call


@dataclass(frozen=True)
class PreprocessingJob:
    """The options of `preprocess`. tokenizer: the arguments of `build_tokenizer`, because each worker builds a
    tokenizer. A ValueError names the flag."""

    inputs: tuple[str, ...]
    output_prefix: str
    keys: tuple[str, ...]
    tokenizer: Mapping[str, Any]
    append_eod: bool = False
    workers: int = 1
    max_bad_fraction: float = MAX_BAD_FRACTION

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
                raise ValueError(f"--output-prefix {self.output_prefix} is inside the input folder {name}")

    def output(self, key: str) -> str:
        """Return the prefix of a key's pair, with Megatron's name."""
        return f"{self.output_prefix}_{key}_document"

    @property
    def folder(self) -> Path:
        """The folder of the shards."""
        return Path(f"{self.output_prefix}.shards")

    def recipe(self, tokenizer: Tokenizer) -> str:
        """Return a hash of everything that decides the tokens of a text."""
        entries = json.dumps([self.keys, self.append_eod])
        return fingerprint_of(str(PREPROCESSING_SHARD_VERSION), entries, tokenizer.fingerprint)


def preprocess(job: PreprocessingJob, *, log: Log) -> dict[str, Manifest]:
    """Make the pairs, unless they exist and were made from the same input in the same way. Returns each key's manifest.

    Raises ValueError or OSError if the input, a flag or the disk is wrong. Only finished shards are kept then.
    """
    tokenizer = build_tokenizer(**job.tokenizer)
    if job.append_eod and not tokenizer.has_eod:
        raise ValueError(f"--append-eod: the tokenizer {tokenizer.kind} has no end-of-document token")
    spans = [whole_file(path, job.keys) for path in expand_paths(job.inputs, "--input", list_input_files)]
    shards, folder = cut_into_shards(spans), job.folder
    manifests = _existing_manifests(job, tokenizer, shards)
    if manifests is not None:
        log(f"{', '.join(map(job.output, job.keys))}: already made from this input, nothing to do")
        shutil.rmtree(folder, ignore_errors=True)
        return manifests

    def refuse() -> None:
        raise ValueError(f"another process is writing into {folder}: wait for it, or choose another --output-prefix")

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / "lock", refuse):
            _remove_unfinished(folder)  # files of a killed run
            _check_disk_space(job, spans, tokenizer)
            try:
                shard_manifests = _make_shards(job, shards, tokenizer)
                _check_bad_lines(job, shard_manifests, log)
                manifests = {key: _merge_shards(job, key, shard_manifests, tokenizer) for key in job.keys}
                for key in job.keys:  # all pairs are complete before the first one is renamed
                    _rename_pair(_merged_prefix(job, key), job.output(key))
            except BaseException:
                _remove_unfinished(folder)
                raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"no room left on the disk of {job.output_prefix}: free some, and run the same command again; it continues "
            f"with the finished shards in {folder}"
        ) from None
    shutil.rmtree(folder)
    return manifests


def _remove_unfinished(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "lock" and not (folder / f"{path.name[:5]}.json").exists():
            path.unlink()


def _input_entries(shard_manifests: Sequence[Manifest]) -> list[dict[str, Any]]:
    """Return size, lines and hashes of each input file, from the manifests of shards."""
    inputs: list[dict[str, Any]] = []
    for shard in shard_manifests:
        for ((path, _, start, stop), hashed), lines in zip(shard["pieces"], shard["lines"], strict=True):
            if start == 0:
                inputs.append({"file": path, "bytes": 0, "lines": 0, "parts": []})
            inputs[-1]["bytes"] = stop
            inputs[-1]["lines"] += lines
            inputs[-1]["parts"].append([stop - start, hashed])
    return inputs


def _existing_manifests(
    job: PreprocessingJob, tokenizer: Tokenizer, shards: Sequence[Shard]
) -> dict[str, Manifest] | None:
    """Return the manifests if every pair exists and was made from this input in this way. Raises ValueError if a pair
    was made differently."""
    existing = [key for key in job.keys if os.path.exists(f"{job.output(key)}.idx")]
    if not existing:
        return None
    current_inputs = _input_entries([{"pieces": _hash_ranges(shard), "lines": [0] * len(shard)} for shard in shards])
    found = {}
    for key in existing:
        found[key] = manifest = read_manifest(job.output(key)) or {"inputs": []}
        made_of = [{**entry, "lines": 0} for entry in manifest["inputs"]]
        if manifest.get("recipe") != job.recipe(tokenizer) or made_of != current_inputs:
            raise ValueError(
                f"{job.output(key)}.idx exists and was made from different input or in a different way: remove it, or "
                "choose another --output-prefix"
            )
    return found if len(existing) == len(job.keys) else None


def _check_disk_space(job: PreprocessingJob, spans: Sequence[FileRange], tokenizer: Tokenizer) -> None:
    """Raise OSError if the disk has too little room for the shards and the merged pairs. The size is estimated from the
    first documents."""
    sample = ""
    for _, record in records(spans[0], job.keys):
        with contextlib.suppress(ValueError, RecursionError):
            item = json_object(record)
            sample += "".join(get_text(item, key)[:SAMPLE_CHARACTERS] for key in job.keys)
        if len(sample) > SAMPLE_CHARACTERS:
            break
    text = sum(
        span.size * (COMPRESSION_RATIO if span.kind == "parquet" or detect_compression(span.path) else 1)
        for span in spans
    )
    pair = text * len(tokenizer.encode(sample)) // max(1, len(sample)) * token_dtype(tokenizer.vocab_size).itemsize
    needed = 2 * pair - sum(path.stat().st_size for path in job.folder.iterdir())
    free = shutil.disk_usage(job.folder).free
    if needed > free:
        raise OSError(
            f"--output-prefix {job.output_prefix}: about {needed / 1e9:,.2f} GB are needed for shards and "
            f"result, but only {free / 1e9:,.2f} GB are free on that disk"
        )


# --- a shard


def _make_shards(job: PreprocessingJob, shards: Sequence[Shard], tokenizer: Tokenizer) -> list[Manifest]:
    """Make all shards and return their manifests. Raises OSError if a worker dies."""
    total = sum(span.size for shard in shards for span in shard)
    with progress_bar(total=total, unit="B", unit_scale=True, desc="tokenising") as bar:
        if job.workers > 1 and len(shards) > 1:
            work = functools.partial(_in_worker, job, tuple(job.tokenizer.items()))
            # Spawn, because the tokenizers' libraries start threads, which a fork would break.
            return map_in_processes(
                work, list(enumerate(shards)), workers=job.workers, progress=bar.update, start="spawn"
            )
        return [make_shard(job, number, shard, tokenizer, bar.update) for number, shard in enumerate(shards)]


@functools.lru_cache(1)  # a worker makes many shards
def _tokenizer_of(arguments: tuple[tuple[str, Any], ...]) -> Tokenizer:
    return build_tokenizer(**dict(arguments))


def _in_worker(job: PreprocessingJob, tokenizer: tuple[tuple[str, Any], ...], number: int, shard: Shard) -> Manifest:
    return make_shard(job, number, shard, _tokenizer_of(tokenizer), report_progress)


def _hash_ranges(shard: Shard) -> list[list[Any]]:
    """Return each range of a shard as a list, with the hash of its content."""
    return [[list(astuple(span)), content_hash(span.path, span.start, span.stop)] for span in shard]


def make_shard(job: PreprocessingJob, number: int, shard: Shard, tokenizer: Tokenizer, progress: Progress) -> Manifest:
    """Make a shard, unless it exists, and return its manifest.

    Raises ValueError if nothing of the input is usable or the input changes meanwhile, and OSError if the disk fails.
    """
    stem = str(job.folder / f"{number:05d}")
    before = [os.stat(span.path).st_mtime_ns for span in shard]
    expected = {"recipe": job.recipe(tokenizer), "pieces": _hash_ranges(shard)}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = read_checksummed_json(Path(f"{stem}.json")) or {}
        whole = not any(find_damaged_chunks(f"{stem}{suffix}", parts) for suffix, parts in found["files"].items())
        if whole and {name: found[name] for name in expected} == expected:
            progress(sum(span.size for span in shard))
            return found
    Path(f"{stem}.json").unlink(missing_ok=True)
    manifest = {**expected, **_write_shard(job, stem, shard, tokenizer, progress)}
    if [os.stat(span.path).st_mtime_ns for span in shard] != before:
        raise ValueError(f"{shard[0].path} changed while it was read: start again")
    write_checksummed_json(Path(f"{stem}.json"), manifest)
    return manifest


def _write_shard(job: PreprocessingJob, stem: str, shard: Shard, tokenizer: Tokenizer, progress: Progress) -> Manifest:
    """Write the pairs and the unusable lines. Returns the manifest's counts and hashes."""
    dtype, eod = token_dtype(tokenizer.vocab_size), tokenizer.eod if job.append_eod else None
    counts = {key: {"empty": 0, "text_bytes": 0} for key in job.keys}
    lines, usable, bad = [], 0, 0
    with contextlib.ExitStack() as stack:
        bad_lines = stack.enter_context(atomic_write(f"{stem}.bad.jsonl"))
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
                    texts = _parse_texts(record, job.keys)
                except (ValueError, RecursionError) as error:
                    bad += 1
                    if bad == MAX_LEADING_BAD_LINES and not usable:  # fail now instead of after hours
                        raise ValueError(
                            f"{span.path}: {error_reason(error)}; none of {MAX_LEADING_BAD_LINES} lines is usable: "
                            "name the text fields with --json-keys"
                        ) from None
                    content = record.decode("utf-8", "backslashreplace") if isinstance(record, bytes) else repr(record)
                    entry = {"line": number, "reason": error_reason(error), "content": content.rstrip("\n")}
                    bad_lines.write(json.dumps({"file": span.path, **entry}).encode() + b"\n")
                    continue
                usable += 1
                for key, text in zip(job.keys, texts, strict=True):
                    _add_document(pairs[key], text, tokenizer, eod)
                    counts[key]["empty"] += not text
                    counts[key]["text_bytes"] += len(text)
            progress(left)
            lines.append(number)
            if span.kind == "text":  # one document, but bad lines are counted
                usable += number - 1 - (bad - bad_before)
    files = {".bad.jsonl": hash_chunks(f"{stem}.bad.jsonl")}
    for key, pair in pairs.items():
        counts[key].update(documents=len(pair), tokens=pair.num_tokens)
        files[f"_{key}.idx"] = hash_chunks(f"{stem}_{key}.idx")
        files[f"_{key}.bin"] = [{"bytes": pair.num_tokens * dtype.itemsize, "sha256": pair.sha256.hexdigest()}]
    return {"lines": lines, "records": usable, "bad": bad, "outputs": counts, "files": files}


def _add_document(pair: IndexedDatasetBuilder, text: bytes, tokenizer: Tokenizer, eod: int | None) -> None:
    """Append a document, unless the text is empty."""
    if len(text) > PART_CHARACTERS:  # in parts, because the ids of a very long text need much memory
        for part in split_text(text.decode()):
            pair.add(tokenizer.encode_utf8(part.encode()))
    elif text:
        pair.add(tokenizer.encode_utf8(text))
    if text:
        pair.end_document(eod)


def _parse_texts(record: Record, keys: tuple[str, ...]) -> list[bytes]:
    """Return the texts of a document in UTF-8. Raises ValueError or RecursionError if it is unusable."""
    try:
        item = json_parser()(record)
        return [item[key].encode() for key in keys]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # try the slow parser
        item = json_object(record)
        return [get_text(item, key).encode() for key in keys]


@functools.lru_cache(1)
def json_parser() -> Callable[[bytes], Any]:
    """Return orjson's parser if it is installed, which is two to three times faster than json's, otherwise json's. The
    caller must parse lines that it refuses with json."""
    try:
        import orjson
    except ImportError:
        return json.loads
    loads: Callable[[bytes], Any] = orjson.loads
    return loads


# --- shards to pairs


def _check_bad_lines(job: PreprocessingJob, shard_manifests: Sequence[Manifest], log: Log) -> None:
    """Collect the unusable lines of all shards. Raises ValueError if there are too many, or if there is no text."""
    bad, usable = (sum(shard[name] for shard in shard_manifests) for name in ("bad", "records"))
    path = Path(f"{job.output_prefix}.bad.jsonl")
    path.unlink(missing_ok=True)  # from an earlier run
    first = _gather_bad_lines(path, job.folder, shard_manifests) if bad else ""
    if bad > job.max_bad_fraction * (bad + usable):
        raise ValueError(
            f"{first}; {bad:,} of {bad + usable:,} lines are unusable, more than --max-bad-fraction "
            f"{job.max_bad_fraction:g}: see {path}, or name the text fields with --json-keys"
        )
    for key in job.keys:
        if not any(shard["outputs"][key]["documents"] for shard in shard_manifests):
            raise ValueError(f"--input {' '.join(job.inputs)} holds no text under the key {key!r}")
    if bad:
        log(f"{bad:,} of {bad + usable:,} lines are unusable and left out: see {path}")


def _gather_bad_lines(path: Path, folder: Path, shard_manifests: Sequence[Manifest]) -> str:
    """Write all unusable lines with their file and line number. Returns a description of the first."""
    first = ""
    lines_before: Counter[str] = Counter()  # lines of each file in earlier shards
    with atomic_write(path, folder / "bad_lines") as out:
        for number, shard in enumerate(shard_manifests):
            for line in (folder / f"{number:05d}.bad.jsonl").read_bytes().splitlines():
                entry = json.loads(line)
                entry["line"] += lines_before[entry["file"]]
                first = first or f"{entry['file']}:{entry['line']}: {entry['reason']}"
                out.write(json.dumps(entry).encode() + b"\n")
            for ((name, *_), _), lines in zip(shard["pieces"], shard["lines"], strict=True):
                lines_before[name] += lines
    return first


def _merge_shards(
    job: PreprocessingJob, key: str, shard_manifests: Sequence[Manifest], tokenizer: Tokenizer
) -> Manifest:
    """Merge the shards of a key into a pair in the shards' folder. Returns its manifest."""
    outputs = [shard["outputs"][key] for shard in shard_manifests]
    with IndexedDatasetBuilder(_merged_prefix(job, key), token_dtype(tokenizer.vocab_size)) as builder:
        for number in range(len(shard_manifests)):
            builder.add_index(job.folder / f"{number:05d}_{key}")
    entries = {
        "key": key,
        "append_eod": job.append_eod,
        "recipe": job.recipe(tokenizer),
        "tokenizer": {name: getattr(tokenizer, name) for name in ("kind", "fingerprint", "vocab_size", "eod")},
        "text_bytes": sum(output["text_bytes"] for output in outputs),
        "empty_documents": sum(output["empty"] for output in outputs),
        "bad_lines": sum(shard["bad"] for shard in shard_manifests),
        "inputs": _input_entries(shard_manifests),
    }
    parts = [part for shard in shard_manifests for part in shard["files"][f"_{key}.bin"]]
    return write_manifest(_merged_prefix(job, key), entries, parts)


def _merged_prefix(job: PreprocessingJob, key: str) -> str:
    """Return the temporary prefix of a key's pair. It is in the shards' folder, so that a killed run leaves files only
    there."""
    return str(job.folder / f"merged_{key}")


def _rename_pair(temporary: str, prefix: str) -> None:
    """Rename a complete pair and its manifest. The `.idx` is last, because readers look for it."""
    for suffix in (".bin", ".json", ".idx"):
        os.replace(f"{temporary}{suffix}", f"{prefix}{suffix}")
    fsync_path(Path(prefix).parent)


def merge_datasets(sources: Sequence[str], output_prefix: str, eod: int) -> Manifest:
    """Merge the documents of all `sources`, in order, into the pair at `output_prefix`. Returns its manifest.

    eod: the end-of-document id in files of nanoGPT and llm.c. Raises ValueError or FileNotFoundError if the sources
    cannot be merged.
    """
    if os.path.exists(f"{output_prefix}.idx"):
        raise ValueError(f"--output-prefix {output_prefix}: the pair exists: remove it, or name another one")
    files = [open_token_file(source, eod) for source in sources]
    manifests = [file.manifest() for file in files]
    for source, file, manifest in zip(sources, files, manifests, strict=True):
        if file.dtype != files[0].dtype:
            raise ValueError(f"{source} holds {file.dtype}, but {sources[0]} {files[0].dtype}: they can't be one file")
        if manifest and find_damaged_chunks(f"{file.prefix}.bin", manifest[".bin"]):
            raise ValueError(f"{source} is damaged: its tokens do not match the hashes in its manifest")
    tokenizers = [manifest["tokenizer"] for manifest in manifests if manifest and manifest["tokenizer"]]
    if any(tokenizer != tokenizers[0] for tokenizer in tokenizers):
        raise ValueError("the manifests name different tokenizers: the files can't be merged")
    Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
    temporary = f"{output_prefix}.{os.getpid()}.tmp"
    with IndexedDatasetBuilder(temporary, files[0].dtype) as builder:
        for file in files:
            if isinstance(file, RawTokenFile):
                for number in range(len(file)):
                    builder.add(file[number])
                    builder.end_document()
            else:
                builder.add_index(file.prefix)
        builder.finish()
        inputs = [{"file": name, "bytes": file.tokens.nbytes} for name, file in zip(sources, files, strict=True)]
        made_by = tokenizers[0] if len(tokenizers) == len(sources) else None
        merged = write_manifest(temporary, {"tokenizer": made_by, "inputs": inputs})
    _rename_pair(temporary, output_prefix)
    return merged
