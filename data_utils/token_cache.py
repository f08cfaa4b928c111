"""Text files to one .bin/.idx pair, once: a folder of pairs keyed by the text's content and the tokenizer.

    <folder>/<key>.bin, .idx     tokens of a list of files; the key is a hash of contents, fields and tokenizer
    <folder>/hashes/<name>.json  sha256 of a file's content and its default field, with the size and mtime of then
    <folder>/locks/<name>        held while a list is hashed and tokenised; the lock dies with its holder

A pair is renamed into place, the .idx last, when it is whole and on disk. Content is hashed only if the path, the size
or the mtime is new. Processes that want the same list wait on its lock, without any collective.
"""

import hashlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from data_utils.command_line import progress_bar
from data_utils.corpora import (
    BUILTIN,
    MOST_BAD_LINES,
    Log,
    builtin_documents,
    default_key,
    documents,
    is_json,
)
from data_utils.files import (
    TOKEN_CACHE_VERSION,
    file_lock,
    fingerprint_of,
    hash_file,
    replace_text,
    sync_folder,
    user_cache,
)
from data_utils.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, token_dtype
from data_utils.tokenizers.base import Tokenizer, split_text

YOUNG_NS = 2_000_000_000

Identity = list[str | int]
Content = tuple[str, str | None]  # sha256, and the field that is read if no text key is given


def tokenise(
    paths: Sequence[str],
    *,
    text_key: str | None,
    tokenizer: Tokenizer,
    cache_path: str | None,
    log: Log,
    max_bad_fraction: float = MOST_BAD_LINES,
) -> tuple[IndexedDataset, str]:
    """The documents of `paths` in order, each with an EOD at its end, and the key of their content.

    They come from the cache, or the first process that asks tokenises them into it. `tokenizer` belongs to the key.
    ValueError names a file or --data-cache-path.
    """
    folder = Path(cache_path) if cache_path else user_cache() / "data"

    def key_of(contents: Sequence[Content]) -> str:
        """The name of the pair. The field that is read of a file counts, however it was chosen, or False for plain
        text. A higher `max_bad_fraction` than the default counts as well: text that passed only under it is not used
        if it would be refused."""
        fields = [
            (field if text_key is None else text_key) if is_json(path) else False
            for path, (_, field) in zip(paths, contents, strict=True)
        ]
        facts = json.dumps([fields, [sha256 for sha256, _ in contents]])
        # Empty as a rule, as in the keys that caches and checkpoints have.
        lenient = str(max_bad_fraction) if max_bad_fraction > MOST_BAD_LINES else ""
        return fingerprint_of(str(TOKEN_CACHE_VERSION), facts, lenient, tokenizer.fingerprint)[:32]

    def find(contents: Sequence[Content | None]) -> tuple[IndexedDataset, str] | None:
        """The pair of these contents, if all are known and the pair is there and whole."""
        known = [content for content in contents if content]
        key = key_of(known) if len(known) == len(paths) else ""
        if not (folder / f"{key}.idx").exists():
            return None
        try:
            return IndexedDataset(folder / key), key
        except (FileNotFoundError, ValueError) as error:
            log(f"{error}: the text is tokenised again")
            return None

    if found := find([_recorded(folder, path) for path in paths]):
        return found
    name = fingerprint_of(json.dumps([_identity(path)[0] for path in paths]), tokenizer.fingerprint)[:32]
    try:
        (folder / "hashes").mkdir(parents=True, exist_ok=True)
        waiting = "another rank or run is tokenising this data: waiting for it"
        with file_lock(folder / "locks" / name, lambda: log(waiting)):
            before = [_identity(path) for path in paths]
            contents = [_recorded(folder, path) or _hash(folder, path) for path in paths]
            if found := find(contents):  # another process may have made it meanwhile
                return found
            key = key_of(contents)
            log(f"tokenising {', '.join(paths)} into {folder / key}.bin")
            temporary = folder / f"{name}.tmp"
            with IndexedDatasetBuilder(temporary, token_dtype(tokenizer.vocab_size)) as builder:
                _write(builder, paths, text_key, tokenizer, log, max_bad_fraction)
                if [_identity(path) for path in paths] != before:
                    raise ValueError(f"{', '.join(paths)} changed while it was read: start again")
            for suffix in (".bin", ".idx"):
                os.replace(f"{temporary}{suffix}", folder / f"{key}{suffix}")
            sync_folder(folder)
            return IndexedDataset(folder / key), key
    except OSError as error:
        if error.filename in paths:
            raise
        raise ValueError(
            f"--data-cache-path: tokenised data cannot be written to {folder} ({error.strerror}): "
            "name a folder with room that can be written"
        ) from None


def _write(
    builder: IndexedDatasetBuilder,
    paths: Sequence[str],
    text_key: str | None,
    tokenizer: Tokenizer,
    log: Log,
    max_bad_fraction: float,
) -> None:
    started, size = time.monotonic(), 0
    # The bar counts characters, and its end is the number of bytes, which is a little more.
    total = 0 if BUILTIN in paths else sum(os.path.getsize(path) for path in paths)
    with progress_bar(seen=total > 0, total=total, unit="B", unit_scale=True, desc="tokenising") as bar:
        for path in paths:
            for text in documents(path, text_key, log, max_bad_fraction):
                for part in split_text(text):
                    builder.add(tokenizer.encode(part))
                    bar.update(len(part))
                builder.end_document(tokenizer.eod if tokenizer.has_eod else None)
                size += len(text)
        bar.update(max(0, total - size))
    seconds = time.monotonic() - started
    log(f"tokenised {size:,} characters in {seconds:.1f} s ({size / 1e6 / max(seconds, 1e-9):.1f} M/s)")


def _identity(path: str) -> Identity:
    """Path, size in bytes and mtime in ns: a file with the same three is taken to have the same content."""
    if path == BUILTIN:
        return [BUILTIN, sys.version, str(sysconfig.get_path("stdlib"))]
    status = os.stat(path)
    return [os.path.realpath(path), status.st_size, status.st_mtime_ns]


def _record(folder: Path, identity: Identity) -> Path:
    name = identity if identity[0] == BUILTIN else identity[:1]
    return folder / "hashes" / f"{fingerprint_of(json.dumps(name))[:32]}.json"


def _recorded(folder: Path, path: str) -> Content | None:
    """The record of the file, if the file is still as it was then."""
    identity = _identity(path)
    try:
        record = json.loads(_record(folder, identity).read_text(encoding="utf-8"))
        return (str(record["sha256"]), record["default_key"]) if record["identity"] == identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _hash(folder: Path, path: str) -> Content:
    """The content of the file, which is recorded unless the file is young: within one tick of its clock it may change
    once more."""
    begun, identity = time.time_ns(), _identity(path)
    if path == BUILTIN:
        digest = hashlib.sha256()
        for text in builtin_documents():
            digest.update(fingerprint_of(text).encode())
        sha256 = digest.hexdigest()
    else:
        sha256 = hash_file(path)
    content = sha256, default_key(path)
    if path == BUILTIN or begun - int(identity[2]) > YOUNG_NS:
        facts = {"identity": identity, "sha256": sha256, "default_key": content[1]}
        replace_text(_record(folder, identity), json.dumps(facts))
    return content
