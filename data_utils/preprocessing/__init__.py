"""Preprocessing: turn text files into .bin/.idx pairs with several processes. Merge token files.

The input is cut into shards by its size (`inputs`), so that the result does not depend on the number of workers. The
output of shard 7 is in PREFIX.shards:

    00007_text.bin, .idx   the documents in order, in a pair for each JSON key
    00007.json             the manifest: the input, its unusable lines and the hashes of the files; written last

Preprocessing can be restarted: a finished shard is not made again (`data_utils.shards`). At the end the shards are
merged, and the pairs are renamed to their final names, each `.idx` last.
"""

import contextlib
import functools
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_utils.command_line import Log, progress_bar
from data_utils.corpora import (
    MAX_BAD_FRACTION,
    MAX_LEADING_BAD_LINES,
    check_bad_lines,
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
    make_folder,
)
from data_utils.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
    open_token_file,
    read_manifest,
    token_dtype,
)
from data_utils.preprocessing.inputs import (
    Record,
    Shard,
    cut_into_shards,
    list_input_files,
    records,
    whole_file,
)
from data_utils.shards import Manifest, disk_full_errors, make_shard, map_in_processes
from data_utils.tokenizers import build_tokenizer
from data_utils.tokenizers.base import PART_CHARACTERS, Tokenizer, split_text


@dataclass(frozen=True)
class PreprocessingJob:
    """The options of `preprocess`. Raises ValueError, which names the flag, for a wrong option.

    tokenizer: arguments of `build_tokenizer`.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    keys: tuple[str, ...]
    tokenizer: tuple[tuple[str, Any], ...]
    append_eod: bool = False
    workers: int = 1
    max_bad_fraction: float = MAX_BAD_FRACTION

    def __post_init__(self) -> None:
        if not self.keys or len(set(self.keys)) < len(self.keys) or any("/" in key for key in self.keys):
            raise ValueError(f"--json-keys {' '.join(self.keys)}: name each field once, without a slash")
        output = Path(self.output_prefix).resolve()
        for name in self.inputs:
            if os.path.isdir(name) and output.is_relative_to(Path(name).resolve()):
                raise ValueError(f"--output-prefix {self.output_prefix} is inside the input folder {name}")

    def output(self, key: str) -> str:
        """Return the prefix of a key's pair of files, which has the form of Megatron's prefixes."""
        return f"{self.output_prefix}_{key}_document"

    @property
    def folder(self) -> Path:
        """The folder of the shards."""
        return Path(f"{self.output_prefix}.shards")

    def merged(self, key: str) -> str:
        """Return the prefix of the temporary files into which the shards of `key` are merged."""
        return f"{self.folder}/merged_{key}"

    def recipe(self) -> str:
        """Return a hash of everything that decides the tokens of a text."""
        entries = json.dumps([self.keys, self.append_eod])
        return fingerprint_of(str(PREPROCESSING_SHARD_VERSION), entries, tokenizer_of(self).fingerprint)


@functools.lru_cache(1)  # cached, because a worker makes many shards
def tokenizer_of(job: PreprocessingJob) -> Tokenizer:
    """Build the tokenizer of a job once in each process."""
    return build_tokenizer(**dict(job.tokenizer))


def preprocess(job: PreprocessingJob, *, log: Log) -> dict[str, Manifest]:
    """Make the pairs, unless they exist and were made from the same input in the same way. Return each key's manifest.

    Raises ValueError or OSError if the input, a flag or the disk is wrong. Finished shards are kept after an error.
    """
    tokenizer = tokenizer_of(job)
    if job.append_eod and not tokenizer.has_eod:
        raise ValueError(f"--append-eod: the tokenizer {tokenizer.kind} has no end-of-document token")
    files = expand_paths(job.inputs, "--input", list_input_files)
    shards, folder = cut_into_shards([whole_file(path, job.keys) for path in files]), job.folder
    manifests = _existing_manifests(job, shards)
    if manifests is not None:
        log(f"{', '.join(map(job.output, job.keys))}: already made from this input, nothing to do")
        shutil.rmtree(folder, ignore_errors=True)
        return manifests

    def refuse() -> None:
        raise ValueError(f"another process is writing into {folder}: wait for it, or choose another --output-prefix")

    with disk_full_errors(job.output_prefix):
        make_folder(folder)
        with file_lock(folder / "lock", refuse):
            shard_manifests = _make_shards(job, shards)
            _check_bad_lines(job, shard_manifests, log)
            manifests = {key: _merge_shards(job, key, shard_manifests) for key in job.keys}
            for key in job.keys:  # All pairs are complete before the first pair is renamed.
                _rename_pair(job.merged(key), job.output(key))
    shutil.rmtree(folder)
    return manifests


def _existing_manifests(job: PreprocessingJob, shards: Sequence[Shard]) -> dict[str, Manifest] | None:
    """Return the manifests if all outputs exist and have the input and settings of `job`. Raises ValueError if a pair
    was made from other input or with other settings."""
    existing = [key for key in job.keys if os.path.exists(f"{job.output(key)}.idx")]
    if not existing:
        return None
    pieces = [[part.path, part.size, content_hash(*part[:3])] for shard in shards for part in shard]
    found = {}
    for key in existing:
        found[key] = manifest = read_manifest(job.output(key)) or {"inputs": []}
        made_of = [[entry["file"], *part] for entry in manifest["inputs"] for part in entry["parts"]]
        if manifest.get("recipe") != job.recipe() or made_of != pieces:
            raise ValueError(
                f"{job.output(key)}.idx exists and was made from different input or in a different way: remove it, or "
                "choose another --output-prefix"
            )
    return found if len(existing) == len(job.keys) else None


# --- a shard


def _make_shards(job: PreprocessingJob, shards: Sequence[Shard]) -> list[Manifest]:
    """Return the manifests of all shards. Raises OSError if a worker dies."""

    def size(shard: Shard) -> int:
        return sum(part.size for part in shard)

    with progress_bar(total=sum(map(size, shards)), unit="B", unit_scale=True, desc="tokenising") as bar:
        return map_in_processes(
            functools.partial(_make_shard, job),
            list(enumerate(shards)),
            workers=job.workers,
            finished=lambda number, shard: bar.update(size(shard)),
            start="spawn",  # A fork would break the threads that the tokenizers' libraries start.
        )


def _make_shard(job: PreprocessingJob, number: int, shard: Shard) -> Manifest:
    """Make a shard, unless it exists, and return its manifest.

    Raises ValueError if nothing of the input is usable or the input changes meanwhile, and OSError if the disk fails.
    """
    pieces = [[*part, content_hash(*part[:3])] for part in shard]
    write = functools.partial(_write_shard, job, f"{number:05d}", shard)
    return make_shard(job.folder / f"{number:05d}.json", job.folder, {"recipe": job.recipe(), "pieces": pieces}, write)


def _write_shard(job: PreprocessingJob, stem: str, shard: Shard) -> Manifest:
    """Write the pairs of a shard. Return the counts, unusable lines and hashes for its manifest."""
    before = [os.stat(part.path).st_mtime_ns for part in shard]
    tokenizer = tokenizer_of(job)
    dtype, eod = token_dtype(tokenizer.vocab_size), tokenizer.eod if job.append_eod else None
    counts = {key: {"empty": 0, "text_bytes": 0} for key in job.keys}
    lines, usable, bad = [], 0, list[dict[str, Any]]()
    with contextlib.ExitStack() as stack:
        pairs = {
            key: stack.enter_context(IndexedDatasetBuilder(job.folder / f"{stem}_{key}", dtype)) for key in job.keys
        }
        for part in shard:
            number, bad_before = 0, len(bad)
            for number, record in records(part, job.keys):
                if isinstance(record, bytes) and not record.strip():
                    continue
                try:
                    texts = _parse_texts(record, job.keys)
                except ValueError as error:
                    content = record.decode("utf-8", "backslashreplace") if isinstance(record, bytes) else repr(record)
                    reason = {"reason": str(error), "content": content.rstrip("\n")}
                    bad.append({"file": part.path, "line": number, **reason})
                    if len(bad) == MAX_LEADING_BAD_LINES and not usable:  # An early error saves hours of reading.
                        raise ValueError(
                            f"{part.path}: {error}; none of {MAX_LEADING_BAD_LINES} lines is usable: "
                            "name the text fields with --json-keys"
                        ) from None
                    continue
                usable += 1
                for (key, pair), text in zip(pairs.items(), texts, strict=True):
                    counts[key]["empty"] += not text
                    counts[key]["text_bytes"] += len(text)
                    if text:
                        _add_document(pair, text, tokenizer, eod)
            lines.append(number)
            # A plain text file is one document, but the share of bad lines needs the number of its usable lines.
            if part.kind == "text":
                usable += number - 1 - (len(bad) - bad_before)
        if [os.stat(part.path).st_mtime_ns for part in shard] != before:
            raise ValueError(f"{shard[0].path} changed while it was read: start again")
    outputs = {f"{stem}_{key}{suffix}": chunks for key, pair in pairs.items() for suffix, chunks in pair.hashes.items()}
    return {"lines": lines, "records": usable, "bad": bad, "keys": counts, "outputs": outputs}


def _add_document(pair: IndexedDatasetBuilder, text: bytes, tokenizer: Tokenizer, eod: int | None) -> None:
    """Append a document. A very long document is encoded in parts, because its ids need much memory."""
    parts = [text] if len(text) <= PART_CHARACTERS else map(str.encode, split_text(text.decode()))
    for part in parts:
        pair.add(tokenizer.encode_utf8(part))
    pair.end_document(eod)


def _parse_texts(record: Record, keys: tuple[str, ...]) -> list[bytes]:
    """Return the texts of a document in UTF-8. Raises ValueError if the document is unusable."""
    try:
        item = json_parser()(record)
        return [item[key].encode() for key in keys]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # Try the slow parser.
        item = json_object(record)
        return [get_text(item, key).encode() for key in keys]


@functools.lru_cache(1)
def json_parser() -> Callable[[bytes], Any]:
    """Return orjson's parser if it is installed, which is two to three times faster than json's, otherwise json's. If
    the parser refuses a line, the caller must parse the line with json."""
    try:
        import orjson
    except ImportError:
        return json.loads
    loads: Callable[[bytes], Any] = orjson.loads
    return loads


# --- shards to pairs


def _check_bad_lines(job: PreprocessingJob, shard_manifests: Sequence[Manifest], log: Log) -> None:
    """Collect the unusable lines of all shards. Raises ValueError if too many lines are unusable."""
    bad = sum(len(shard["bad"]) for shard in shard_manifests)
    usable = sum(shard["records"] for shard in shard_manifests)
    path, first = Path(f"{job.output_prefix}.bad.jsonl"), ""
    path.unlink(missing_ok=True)
    if bad:
        lines_before: Counter[str] = Counter()  # number of lines of each file in earlier shards
        with atomic_write(path, job.folder / "bad_lines") as out:
            for shard in shard_manifests:
                for entry in shard["bad"]:
                    entry["line"] += lines_before[entry["file"]]
                    first = first or f"{entry['file']}:{entry['line']}: {entry['reason']}"
                    out.write(json.dumps(entry).encode() + b"\n")
                for (name, *_), lines in zip(shard["pieces"], shard["lines"], strict=True):
                    lines_before[name] += lines
    advice = f"see {path}, or name the text fields with --json-keys"
    check_bad_lines(bad, bad + usable, job.max_bad_fraction, first, advice)
    if bad:
        log(f"{bad:,} of {bad + usable:,} lines are unusable and left out: see {path}")


def _merge_shards(job: PreprocessingJob, key: str, shard_manifests: Sequence[Manifest]) -> Manifest:
    """Merge the shards of a key into a pair in the shards' folder. Return its manifest. Raises ValueError if the key
    has no text in any document."""
    tokenizer, inputs = tokenizer_of(job), list[dict[str, Any]]()
    with IndexedDatasetBuilder(job.merged(key), token_dtype(tokenizer.vocab_size)) as builder:
        for number, shard in enumerate(shard_manifests):
            name = f"{number:05d}_{key}"
            builder.add_file(IndexedDataset(job.folder / name), shard["outputs"][f"{name}.bin"])
            for (path, start, stop, _, hashed), lines in zip(shard["pieces"], shard["lines"], strict=True):
                if start == 0:
                    inputs.append({"file": path, "bytes": 0, "lines": 0, "parts": []})
                inputs[-1]["bytes"] = stop
                inputs[-1]["lines"] += lines
                inputs[-1]["parts"].append([stop - start, hashed])
        if not len(builder):
            raise ValueError(f"--input {' '.join(job.inputs)} holds no text under the key {key!r}")
    entries = {
        "key": key,
        "append_eod": job.append_eod,
        "recipe": job.recipe(),
        "tokenizer": {name: getattr(tokenizer, name) for name in ("kind", "fingerprint", "vocab_size", "eod")},
        "text_bytes": sum(shard["keys"][key]["text_bytes"] for shard in shard_manifests),
        "empty_documents": sum(shard["keys"][key]["empty"] for shard in shard_manifests),
        "bad_lines": sum(len(shard["bad"]) for shard in shard_manifests),
        "inputs": inputs,
    }
    return builder.write_manifest(entries)


def _rename_pair(temporary: str, prefix: str) -> None:
    """Rename a complete pair and its manifest. Readers look for the `.idx` file, so this file is renamed last."""
    for suffix in (".bin", ".json", ".idx"):
        os.replace(f"{temporary}{suffix}", f"{prefix}{suffix}")
        fsync_path(Path(prefix).parent)


def merge_datasets(sources: Sequence[str], output_prefix: str, eod: int) -> Manifest:
    """Merge the documents of all `sources`, in order, into the pair at `output_prefix`. Return its manifest.

    eod: the end-of-document id in files of nanoGPT and llm.c.

    Raises ValueError or FileNotFoundError if the sources cannot be merged.
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
    make_folder(Path(output_prefix).parent)
    temporary = f"{output_prefix}.{os.getpid()}.tmp"
    with IndexedDatasetBuilder(temporary, files[0].dtype) as builder:
        for file, manifest in zip(files, manifests, strict=True):
            builder.add_file(file, manifest[".bin"] if manifest else ())
    inputs = [{"file": name, "bytes": file.tokens.nbytes} for name, file in zip(sources, files, strict=True)]
    made_by = tokenizers[0] if len(tokenizers) == len(sources) else None
    merged = builder.write_manifest({"tokenizer": made_by, "inputs": inputs})
    _rename_pair(temporary, output_prefix)
    return merged
