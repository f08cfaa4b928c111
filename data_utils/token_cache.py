"""Text files to one .bin/.idx pair, once: a folder of pairs keyed by the text's content and the tokenizer.

    <folder>/<key>.bin, .idx     tokens of a list of files; the key is a hash of contents, fields and tokenizer
    <folder>/hashes/<name>.json  sha256 of a file's content and its default field, with the size and mtime of then
    <folder>/locks/<name>        held while a list is hashed and tokenised; the lock dies with its holder

A pair is renamed into place, the .idx last, when it is whole and on disk. Content is hashed only where the path, the
size or the mtime is new. Processes that want the same list wait on its lock, without any collective.
"""

import contextlib
import hashlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_utils.command_line import progress_bar
from data_utils.corpora.documents import BUILTIN, MOST_BAD_LINES, Log, default_key, documents, is_json
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
Content = tuple[str, str | None]  # sha256, and the field that is read where no text key is given


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

    def find() -> tuple[IndexedDataset, str] | None:
        contents = [content for path in paths if (content := _recorded(folder, path))]
        if len(contents) < len(paths):
            return None
        key = _key(paths, contents, text_key, tokenizer, max_bad_fraction)
        try:
            return IndexedDataset(folder / key), key
        except FileNotFoundError:
            return None
        except ValueError as error:
            log(f"{error}: the text is tokenised again")
            return None

    if found := find():
        return found
    name = fingerprint_of(json.dumps([_identity(path)[0] for path in paths]), tokenizer.fingerprint)[:32]
    with contextlib.ExitStack() as stack:
        with _cache_errors(folder):
            (folder / "hashes").mkdir(parents=True, exist_ok=True)
            stack.enter_context(
                file_lock(
                    folder / "locks" / name, lambda: log("another rank or run is tokenising this data: waiting for it")
                )
            )
        if found := find():  # another process may have done it meanwhile
            return found
        begun = time.time_ns()
        before = [_identity(path) for path in paths]
        contents = [(_hash(path), default_key(path)) for path in paths]
        key = _key(paths, contents, text_key, tokenizer, max_bad_fraction)
        try:
            dataset = IndexedDataset(folder / key)  # the same content under another path or mtime
        except (FileNotFoundError, ValueError):
            _write(folder, key, name, paths, before, text_key, max_bad_fraction, tokenizer, log)
            dataset = IndexedDataset(folder / key)
        with _cache_errors(folder):
            for identity, (sha256, field) in zip(before, contents, strict=True):
                # A file just written may have changed within one tick of its clock: it is hashed again next time.
                if identity[0] == BUILTIN or begun - int(identity[2]) > YOUNG_NS:
                    replace_text(
                        _record(folder, identity),
                        json.dumps({"identity": identity, "sha256": sha256, "default_key": field}),
                    )
        return dataset, key


def _write(
    folder: Path,
    key: str,
    name: str,
    paths: Sequence[str],
    hashed: Sequence[Identity],
    text_key: str | None,
    max_bad_fraction: float,
    tokenizer: Tokenizer,
    log: Log,
) -> None:
    """Tokenise into `<name>.tmp`, then rename. ValueError where the files are no longer as they were `hashed`. A
    process that was killed may have left a file of that name: it is overwritten."""
    started = time.monotonic()
    log(f"tokenising {', '.join(paths)} into {folder / key}.bin")
    with _cache_errors(folder):
        builder = IndexedDatasetBuilder(folder / f"{name}.tmp", token_dtype(tokenizer.vocab_size))
    size = 0
    try:
        # The bar counts characters, and its end is the number of bytes, which is a little more.
        total = 0 if BUILTIN in paths else sum(os.path.getsize(path) for path in paths)
        with progress_bar(seen=total > 0, total=total, unit="B", unit_scale=True, desc="tokenising") as bar:
            for path in paths:
                for text in documents(path, text_key, log, max_bad_fraction):
                    for part in split_text(text):
                        tokens = tokenizer.encode(part)
                        size += len(part)
                        bar.update(len(part))
                        with _cache_errors(folder):
                            builder.add(tokens)
                    with _cache_errors(folder):
                        builder.end_document(tokenizer.eod if tokenizer.has_eod else None)
            bar.update(max(0, total - size))
        if [_identity(path) for path in paths] != hashed:
            raise ValueError(f"{', '.join(paths)} changed while it was read: start again")
        with _cache_errors(folder):
            builder.finish()
            for suffix in (".bin", ".idx"):
                os.replace(folder / f"{name}.tmp{suffix}", folder / f"{key}{suffix}")
            sync_folder(folder)
    except BaseException:
        builder.abandon()
        raise
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


def _hash(path: str) -> str:
    if path != BUILTIN:
        return hash_file(path)
    digest = hashlib.sha256()
    for text in documents(path, None, lambda line: None):
        digest.update(fingerprint_of(text).encode())
    return digest.hexdigest()


def _key(
    paths: Sequence[str],
    contents: Sequence[Content],
    text_key: str | None,
    tokenizer: Tokenizer,
    max_bad_fraction: float,
) -> str:
    """The name of a pair in the cache. Of each file the field that is read counts, however it was chosen, or False for
    plain text. A higher `max_bad_fraction` than the default counts as well: text that passed only under it is not used
    where it would be refused."""
    fields = [
        (field if text_key is None else text_key) if is_json(path) else False
        for path, (_, field) in zip(paths, contents, strict=True)
    ]
    hashes = [sha256 for sha256, _ in contents]
    # Empty as a rule, as in the keys that caches and checkpoints have.
    lenient = str(max_bad_fraction) if max_bad_fraction > MOST_BAD_LINES else ""
    return fingerprint_of(str(TOKEN_CACHE_VERSION), json.dumps([fields, hashes]), lenient, tokenizer.fingerprint)[:32]


@contextlib.contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    """Errors of the file system inside mean the cache folder: one line that names the flag."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--data-cache-path: tokenised data cannot be written to {folder} ({error.strerror}): "
            "name a folder with room that can be written"
        ) from None
