"""A cache of tokenised text: a folder of .bin/.idx pairs, with a key made of the text's content and the tokenizer.

    <folder>/<key>.bin, .idx     tokens of a list of files; the key is a hash of contents, fields and tokenizer
    <folder>/<key>.sha256        hashes of both files, with their sizes and mtimes
    <folder>/hashes/<name>.json  sha256 of a file's content and its default field, with the file's size and mtime
    <folder>/locks/<name>        locked while a list is hashed and tokenised

A complete pair is fsynced and renamed, and its hashes are written last. A text file or token file is hashed again only
if its path, size or mtime is new. Each list of files has a lock, for which other processes with the same list wait.
"""

import contextlib
import hashlib
import itertools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from data_utils.command_line import Log, progress_bar
from data_utils.corpora import (
    BUILTIN,
    MAX_BAD_FRACTION,
    default_key,
    is_json,
    read_documents,
)
from data_utils.corpora.builtin import builtin_documents, builtin_versions
from data_utils.files import (
    MAX_MANIFEST_BYTES,
    TOKEN_CACHE_VERSION,
    atomic_write_text,
    file_lock,
    find_damaged_chunks,
    fingerprint_of,
    fsync_path,
    hash_file,
    read_json_object,
    user_cache_dir,
    wrap_errors,
)
from data_utils.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, token_dtype
from data_utils.tokenizers.base import Tokenizer, split_text

MIN_AGE_NS = 2_000_000_000

Identity = list[str | int]
Content = tuple[str, str | None]  # the sha256 of the content, and the default text field


def tokenise(
    paths: Sequence[str],
    *,
    text_key: str | None,
    tokenizer: Tokenizer,
    cache_path: str | None,
    log: Log,
    max_bad_fraction: float = MAX_BAD_FRACTION,
) -> tuple[IndexedDataset, str]:
    """Return the tokens of the documents of `paths`, in order, and the key of the pair. An EOD ends each document.

    The first process tokenises the files into the cache, and all other processes read the cache. Errors name a file or
    --data-cache-path.
    """
    folder = Path(cache_path) if cache_path else user_cache_dir() / "data"

    def key_of(contents: Sequence[Content]) -> str:
        """Return the key of the pair. The key includes the text field of each file (False for plain text), and
        `max_bad_fraction` if it is above the default, so that a stricter run does not use text that it would refuse."""
        fields = [
            (field if text_key is None else text_key) if is_json(path) else False
            for path, (_, field) in zip(paths, contents, strict=True)
        ]
        entries = json.dumps([fields, [sha256 for sha256, _ in contents]])
        # The default limit adds nothing to the key, so that the keys of existing caches and checkpoints stay valid.
        lenient = str(max_bad_fraction) if max_bad_fraction > MAX_BAD_FRACTION else ""
        return fingerprint_of(str(TOKEN_CACHE_VERSION), entries, lenient, tokenizer.fingerprint)[:32]

    def find(contents: Sequence[Content]) -> tuple[IndexedDataset, str] | None:
        """Return the pair with the tokens of `contents` if the pair exists and is not damaged."""
        key = key_of(contents)
        if not (folder / f"{key}.sha256").exists():
            return None
        try:
            _check_pair(folder / key)
            return IndexedDataset(folder / key), key
        except (FileNotFoundError, ValueError) as error:
            log(f"{error}: the text is tokenised again")
            return None

    name = fingerprint_of(json.dumps([_identity(path)[0] for path in paths]), tokenizer.fingerprint)[:32]
    try:
        recorded = [content for path in paths if (content := _recorded_content(folder, path))]
        if len(recorded) == len(paths) and (found := find(recorded)):
            return found
        (folder / "hashes").mkdir(parents=True, exist_ok=True)
        waiting = "another rank or run is tokenising this data: waiting for it"
        with file_lock(folder / "locks" / name, lambda: log(waiting)):
            before = [_identity(path) for path in paths]
            contents = [_recorded_content(folder, path) or _hash_and_record(folder, path) for path in paths]
            if found := find(contents):  # Another process may have made the pair.
                return found
            key = key_of(contents)
            log(f"tokenising {', '.join(paths)} into {folder / key}.bin")
            temporary = folder / f"{name}.tmp"
            with IndexedDatasetBuilder(temporary, token_dtype(tokenizer.vocab_size)) as builder:
                _write_tokens(builder, paths, text_key, tokenizer, log, max_bad_fraction)
                if [_identity(path) for path in paths] != before:
                    raise ValueError(f"{', '.join(paths)} changed while it was read: start again")
            hashes = {}
            for suffix, chunks in builder.hashes.items():
                os.replace(f"{temporary}{suffix}", path := f"{folder / key}{suffix}")
                hashes[suffix] = [_identity(path)[1:], chunks]
            fsync_path(folder)
            atomic_write_text(folder / f"{key}.sha256", json.dumps(hashes))
            return IndexedDataset(folder / key), key
    except OSError as error:
        if error.filename in paths:
            raise
        raise ValueError(
            f"--data-cache-path: tokenised data cannot be kept in {folder} ({error.strerror}): "
            "name a folder with room that can be written"
        ) from None


def _write_tokens(
    builder: IndexedDatasetBuilder,
    paths: Sequence[str],
    text_key: str | None,
    tokenizer: Tokenizer,
    log: Log,
    max_bad_fraction: float,
) -> None:
    started, size = time.monotonic(), 0
    # The progress bar counts characters, but its total is in bytes, which is a slightly larger number.
    total = 0 if BUILTIN in paths else sum(map(os.path.getsize, paths))
    with progress_bar(visible=total > 0, total=total, unit="B", unit_scale=True, desc="tokenising") as bar:
        for text in itertools.chain.from_iterable(
            read_documents(path, text_key, log, max_bad_fraction) for path in paths
        ):
            for part in split_text(text):
                builder.add(tokenizer.encode(part))
                bar.update(len(part))
            builder.end_document(tokenizer.eod if tokenizer.has_eod else None)
            size += len(text)
    seconds = time.monotonic() - started
    log(f"tokenised {size:,} characters in {seconds:.1f} s ({size / 1e6 / max(seconds, 1e-9):.1f} M/s)")


def _check_pair(prefix: Path) -> None:
    """Raise ValueError if a file of the pair is not as it was written. Hashes only a file whose size or mtime is
    new."""
    path = Path(f"{prefix}.sha256")
    with wrap_errors(path):
        for suffix, (identity, chunks) in read_json_object(path, MAX_MANIFEST_BYTES).items():
            name = f"{prefix}{suffix}"
            if _identity(name)[1:] != identity and find_damaged_chunks(name, chunks):
                raise ValueError(f"{suffix} is not as it was written")


def _identity(path: str) -> Identity:
    """Return the path, size in bytes and mtime in ns. A file with the same path, size and mtime is assumed to have the
    same content."""
    if path == BUILTIN:
        return [BUILTIN, *builtin_versions()]
    status = os.stat(path)
    return [os.path.realpath(path), status.st_size, status.st_mtime_ns]


def _record_path(folder: Path, identity: Identity) -> Path:
    name = identity if identity[0] == BUILTIN else identity[:1]
    return folder / "hashes" / f"{fingerprint_of(json.dumps(name))[:32]}.json"


def _recorded_content(folder: Path, path: str) -> Content | None:
    """Return the recorded hash and text field of the file, or None if the file has changed since the record."""
    identity = _identity(path)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(_record_path(folder, identity).read_text(encoding="utf-8"))
        if record["identity"] == identity:
            return str(record["sha256"]), record["default_key"]
    return None


def _hash_and_record(folder: Path, path: str) -> Content:
    """Hash the file and record the hash. A very new file is not recorded, because it might change with the same
    mtime."""
    begun, identity = time.time_ns(), _identity(path)
    if path == BUILTIN:
        sha256 = hashlib.sha256("".join(map(fingerprint_of, builtin_documents())).encode()).hexdigest()
    else:
        sha256 = hash_file(path)
    content = sha256, default_key(path)
    if path == BUILTIN or begun - int(identity[2]) > MIN_AGE_NS:
        entries = {"identity": identity, "sha256": sha256, "default_key": content[1]}
        atomic_write_text(_record_path(folder, identity), json.dumps(entries))
    return content
