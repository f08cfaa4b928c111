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
from dataclasses import dataclass
from pathlib import Path

from data_utils.command_line import progress_bar
from data_utils.corpora.builtin import builtin_documents
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
    wanted = _Wanted(paths, text_key, tokenizer, folder, log, max_bad_fraction)
    if found := wanted.find():
        return found
    name = fingerprint_of(json.dumps([_identity(path)[0] for path in paths]), tokenizer.fingerprint)[:32]

    def waiting() -> None:
        log("another rank or run is tokenising this data: waiting for it")

    with _cache_errors(folder, paths):
        (folder / "hashes").mkdir(parents=True, exist_ok=True)
        with file_lock(folder / "locks" / name, waiting):
            return wanted.find() or wanted.make(name)  # another process may have made it meanwhile


@dataclass(frozen=True)
class _Wanted:
    """The tokens of a list of files, in a cache's folder."""

    paths: Sequence[str]
    text_key: str | None
    tokenizer: Tokenizer
    folder: Path
    log: Log
    max_bad_fraction: float

    def find(self) -> tuple[IndexedDataset, str] | None:
        """They and their key, if each file is as it was when it was hashed, and the pair is there."""
        contents = [content for path in self.paths if (content := _recorded(self.folder, path))]
        if len(contents) < len(self.paths):
            return None
        key = self._key(contents)
        try:
            return IndexedDataset(self.folder / key), key
        except FileNotFoundError:
            return None
        except ValueError as error:
            self.log(f"{error}: the text is tokenised again")
            return None

    def make(self, name: str) -> tuple[IndexedDataset, str]:
        """Hash the files, and tokenise them if their content has no pair under any path or mtime."""
        begun = time.time_ns()
        before = [_identity(path) for path in self.paths]
        contents = [(_hash(path), default_key(path)) for path in self.paths]
        key = self._key(contents)
        try:
            dataset = IndexedDataset(self.folder / key)
        except (FileNotFoundError, ValueError):
            self._write(key, name, before)
            dataset = IndexedDataset(self.folder / key)
        for identity, (sha256, field) in zip(before, contents, strict=True):
            # A file just written may have changed within one tick of its clock: it is hashed again next time.
            if identity[0] == BUILTIN or begun - int(identity[2]) > YOUNG_NS:
                facts = {"identity": identity, "sha256": sha256, "default_key": field}
                replace_text(_record(self.folder, identity), json.dumps(facts))
        return dataset, key

    def _key(self, contents: Sequence[Content]) -> str:
        """The name of the pair. The field that is read of a file counts, however it was chosen, or False for plain
        text. A higher `max_bad_fraction` than the default counts as well: text that passed only under it is not used
        if it would be refused."""
        fields = [
            (field if self.text_key is None else self.text_key) if is_json(path) else False
            for path, (_, field) in zip(self.paths, contents, strict=True)
        ]
        facts = json.dumps([fields, [sha256 for sha256, _ in contents]])
        # Empty as a rule, as in the keys that caches and checkpoints have.
        lenient = str(self.max_bad_fraction) if self.max_bad_fraction > MOST_BAD_LINES else ""
        return fingerprint_of(str(TOKEN_CACHE_VERSION), facts, lenient, self.tokenizer.fingerprint)[:32]

    def _write(self, key: str, name: str, hashed: Sequence[Identity]) -> None:
        """Tokenise into `<name>.tmp`, then rename. ValueError if the files are no longer as they were `hashed`. A
        process that was killed may have left a file of that name: it is overwritten."""
        paths, tokenizer, started, size = self.paths, self.tokenizer, time.monotonic(), 0
        self.log(f"tokenising {', '.join(paths)} into {self.folder / key}.bin")
        builder = IndexedDatasetBuilder(self.folder / f"{name}.tmp", token_dtype(tokenizer.vocab_size))
        try:
            # The bar counts characters, and its end is the number of bytes, which is a little more.
            total = 0 if BUILTIN in paths else sum(os.path.getsize(path) for path in paths)
            with progress_bar(seen=total > 0, total=total, unit="B", unit_scale=True, desc="tokenising") as bar:
                for path in paths:
                    for text in documents(path, self.text_key, self.log, self.max_bad_fraction):
                        for part in split_text(text):
                            builder.add(tokenizer.encode(part))
                            bar.update(len(part))
                        builder.end_document(tokenizer.eod if tokenizer.has_eod else None)
                        size += len(text)
                bar.update(max(0, total - size))
            if [_identity(path) for path in paths] != hashed:
                raise ValueError(f"{', '.join(paths)} changed while it was read: start again")
            builder.finish()
            for suffix in (".bin", ".idx"):
                os.replace(self.folder / f"{name}.tmp{suffix}", self.folder / f"{key}{suffix}")
            sync_folder(self.folder)
        except BaseException:
            builder.abandon()
            raise
        seconds = time.monotonic() - started
        self.log(f"tokenised {size:,} characters in {seconds:.1f} s ({size / 1e6 / max(seconds, 1e-9):.1f} M/s)")


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
    for text in builtin_documents():
        digest.update(fingerprint_of(text).encode())
    return digest.hexdigest()


@contextlib.contextmanager
def _cache_errors(folder: Path, inputs: Sequence[str]) -> Iterator[None]:
    """Errors of the file system inside mean the cache folder, unless they name an input: one line that names the
    flag."""
    try:
        yield
    except OSError as error:
        if error.filename in inputs:
            raise
        raise ValueError(
            f"--data-cache-path: tokenised data cannot be written to {folder} ({error.strerror}): "
            "name a folder with room that can be written"
        ) from None
