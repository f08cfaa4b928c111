"""Atomic writes, locks, checksummed JSON, hashes of files, and threads that read or write several files.

After a crash of the process or the machine, a file has its old or its new content, never a mixture. The system frees
the lock of a process that dies. A checksummed JSON object ends with the sha256 of all bytes before this hash.
Checksummed JSON has two layouts on disk. In the manifests of token files and their shards, the JSON is indented, and
the hash covers all bytes before the comma that precedes its entry. In a checkpoint's manifest, each entry is a line,
and the hash covers all bytes before its value.

The versions of all formats that this project writes to disk and reads again:

| file | where | version | older versions | unknown version |
|---|---|---|---|---|
| a checkpoint | iter_0000300/manifest.json, "version" | 3 | 1 and 2 are read | an error that says to update |
| a run's settings | config.json of a save folder, "version" | 1 | none | an error of --config |
| a pair's index | PREFIX.idx, after its magic; Megatron's format | 1 | none | an error |
| a pair's manifest | PREFIX.json, "format" | 1 | none | not checked yet |
| a shard of a pair | PREFIX.shards/, within "recipe" | 1 | none | the shard is made again |
| tokenised text | the cache folder, within a pair's name | 1 | none | the text is tokenised again |
| a web-text manifest | OUTPUT/manifests/NAME.json, "format" | 2 | 1: the step runs again | the step runs again |

A tokenizer's folder has no version, because the files of each kind of tokenizer keep their format. The metadata is in
tokenizer_facts.json; in older folders the file is called tokenizer.json, which is still read. Raise a version when
older programs cannot read the new format, and describe in the table what happens to older files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

INDEX_VERSION = 1
PAIR_MANIFEST_VERSION = 1
PREPROCESSING_SHARD_VERSION = 1
TOKEN_CACHE_VERSION = 1
STEP_MANIFEST_VERSION = 2

CHECKSUM_ENTRY = ',\n "sha256": "'
END = b'"}\n'  # the last bytes of a manifest that has one line per entry
MAX_CONFIG_BYTES = 2 << 20  # Larger config.json files are refused. The file usually takes some KB.
# Larger manifests are refused. A manifest takes about 100 bytes for each GB of tokens and each input file.
MAX_MANIFEST_BYTES = 1 << 30
HASH_BYTES = 1 << 18  # A block of HASH_BYTES fits into the processor's cache.
SAFETENSORS_ALIGNMENT = 8
IO_THREADS = 4

ChunkHash = dict[str, Any]  # keys: bytes, sha256
T = TypeVar("T")
R = TypeVar("R")


# --- atomic writes and locks


def flush_to_disk(file: IO[Any]) -> None:
    """Flush and fsync an open file."""
    file.flush()
    os.fsync(file.fileno())


def fsync_path(path: str | Path) -> None:
    """Fsync a file, or a folder, in which a crash of the machine could otherwise undo a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def add_path(error: BaseException, path: str | Path) -> None:
    """Add the file name `path` to an OSError that has no file name, as after a failed write, fsync or lock. Add the
    free space to the error of a full disk."""
    if isinstance(error, OSError) and error.errno:
        error.filename = error.filename or str(path)
        if error.errno == errno.ENOSPC and not str(error.strerror).endswith(")"):
            error.strerror = f"{error.strerror} ({free_space(path)})"


def free_space(path: str | Path) -> str:
    """Describe the free space on the disk of the file `path`."""
    disk = os.statvfs(next(folder for folder in Path(path).absolute().parents if folder.exists()))
    if disk.f_files and not disk.f_favail:
        return "no inodes are free there: remove files, however small"
    return f"{disk.f_bavail * disk.f_frsize:,} bytes are free there"


@contextlib.contextmanager
def atomic_write(path: str | Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """Open a temporary binary file next to `path`, and rename it to `path` when the block ends.

    The file and the folder are fsynced. If the block raises an error, the temporary file is removed and `path` keeps
    its content.

    temporary: the temporary name (default: a name for this process). Give a fixed name if only one process at a time
        writes `path`: a new process then overwrites the file of a killed process.
    """
    path = Path(path)
    new = temporary or path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        new.unlink(missing_ok=True)
        with new.open("xb") as file:  # Mode "x" refuses a path that exists, also a symbolic link.
            yield file
            flush_to_disk(file)
        os.replace(new, path)
    except BaseException as error:
        new.unlink(missing_ok=True)
        add_path(error, path)
        raise
    fsync_path(path.parent)


def make_folder(folder: Path) -> None:
    """Make `folder` and its parents, and fsync each parent, so that the new folders survive a crash. A parent that
    cannot be read, because it belongs to someone else, is skipped."""
    folder.mkdir(parents=True, exist_ok=True)
    for parent in folder.resolve().parents:
        with contextlib.suppress(OSError):
            fsync_path(parent)


def atomic_write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, atomically. A lone surrogate, which UTF-8 cannot encode, is written as "?"."""
    with atomic_write(path) as file:
        file.write(text.encode("utf-8", errors="replace"))


def rename_old(path: Path) -> Path:
    """Rename a file or folder to `NAME.old-N` with the first free N. Return the new path."""
    aside = next(new for n in itertools.count(1) if not (new := path.with_name(f"{path.name}.old-{n}")).exists())
    os.replace(path, aside)
    return aside


def append_line(path: str | Path, line: str) -> None:
    """Append `line` to a file of lines, in one write, so that no reader sees half a line. If a crash has cut off the
    last line, the new line still begins on a separate line. Raises OSError if `path` is a symbolic link."""
    with open(path, "a+b", buffering=0, opener=no_follow) as file:
        size = file.seek(0, os.SEEK_END)
        is_cut = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
        file.write(b"\n" * is_cut + line.encode() + b"\n")


def no_follow(path: str, flags: int) -> int:
    """Open a file, as an `opener` for `open`, but refuse symbolic links. A link in someone else's folder could lead to
    other files of this user."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def try_lock(file: IO[Any]) -> bool:
    """Lock the open `file` until it is closed. Return False if another process holds the lock. Raises OSError if the
    file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        add_path(error, file.name)
        raise
    return True


@contextlib.contextmanager
def file_lock(path: Path, waiting: Callable[[], object]) -> Iterator[None]:
    """Lock the file `path` during the block. If another process holds the lock, call `waiting` once, and wait.

    The lock file stays: if it were removed, two processes could lock two different files of this name. Raises OSError
    if the file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", opener=no_follow) as file:
        if not try_lock(file):
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- checksummed and checked JSON


def write_checksummed_json(path: Path, entries: Mapping[str, Any]) -> None:
    """Write `entries` to `path`, atomically, as indented JSON."""
    text = json.dumps(entries, indent=1, ensure_ascii=False).removesuffix("\n}")
    atomic_write_text(path, f'{text}{CHECKSUM_ENTRY}{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n')


def read_checksummed_json(path: Path) -> dict[str, Any] | None:
    """Return the entries that `write_checksummed_json` wrote to `path`, or None if the file is missing. Raises
    ValueError if the file was changed."""
    with wrap_errors(path):
        if not path.exists():
            return None
        data = read_file(path, MAX_MANIFEST_BYTES)
        body, _, end = data.rpartition(CHECKSUM_ENTRY.encode())
        if not body or end != hashlib.sha256(body).hexdigest().encode() + b'"\n}\n':
            raise ValueError("is damaged, or was not written by these tools")
        entries = parse_json_object(data)
        # The encoding fails for "\\ud800", which is valid JSON but not valid text.
        json.dumps(entries, ensure_ascii=False).encode()
        del entries["sha256"]
        return entries


def checksummed_lines(entries: Mapping[str, Any]) -> bytes:
    """Return `entries` as checksummed JSON that has one line per entry."""
    lines = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in entries.items())
    return append_checksum(f'{{{lines}"sha256": "'.encode())


def append_checksum(body: bytes) -> bytes:
    """Append the hash to `body`, which ends with the hash's opening quote, and close the object."""
    return body + hashlib.sha256(body).hexdigest().encode() + END


def verify_checksum(data: bytes) -> str:
    """Return the hash at the end of the output of `checksummed_lines`. Raises ValueError if the hash is wrong."""
    body = data[: -len(append_checksum(b""))]
    if append_checksum(body) != data:
        raise ValueError("damaged: it does not end with the sha256 of its content")
    return data[len(body) : len(data) - len(END)].decode()


def parse_json(data: bytes | str) -> Any:
    """Parse JSON. Raises ValueError if the data is not JSON or if an object has a key twice (Python's parser would
    silently take the last value), and RecursionError if objects are nested too deeply."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a key occurs twice")
        return made

    return json.loads(data, object_pairs_hook=unique)


def parse_json_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError if `data` is not a JSON object."""
    try:
        value = parse_json(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"does not hold JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("does not hold a JSON object")
    return value


def read_file(path: Path, max_bytes: int) -> bytes:
    """Read a file. Raises ValueError if the file is larger than `max_bytes`, or is a pipe or a device, which may have
    no end."""
    if not path.is_file() and path.exists():
        raise ValueError("is not a file")
    if path.stat().st_size > max_bytes:
        raise ValueError(f"larger than {max_bytes:,} bytes")
    return path.read_bytes()


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Read the JSON object in the file `path`, of at most `max_bytes` bytes. Raises ValueError, which names the file,
    for other content."""
    with wrap_errors(path):
        return parse_json_object(read_file(path, max_bytes))


@contextlib.contextmanager
def wrap_errors(path: str | Path) -> Iterator[None]:
    """Turn errors in the block, such as KeyError and TypeError, into a ValueError of one line that names `path`, which
    may be a flag."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path}: has no {one_line(error)}, or an unknown one") from error
    except RecursionError as error:
        raise ValueError(f"{path}: nested too deeply") from error
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{path}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Return the error's text as one line of at most 300 characters. A damaged file may contain a very long name."""
    return " ".join(str(error)[:300].split())


def safetensors_header(entries: Mapping[str, Any]) -> bytes:
    """Return the header of a safetensors file: 8 bytes with the length of the rest, little-endian, and a JSON object,

        {"__metadata__": {...}, tensor: {"dtype": "F32", "shape": [...], "data_offsets": [first byte, one past it]}}

    in the order of `entries`. Offsets count from the end of the header. https://huggingface.co/docs/safetensors
    """
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % SAFETENSORS_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_safetensors_header(stream: BinaryIO, max_bytes: int) -> dict[str, Any]:
    """Read a safetensors header from `stream`, which is at its first byte. Raises ValueError if the header is larger
    than `max_bytes`, is not a JSON object, or has a key twice."""
    length = int.from_bytes(stream.read(8), "little")
    if length > max_bytes:
        raise ValueError(f"its header of {length:,} bytes is larger than {max_bytes:,}")
    return parse_json_object(stream.read(length))


# --- hashes


class HashingWriter:
    """Writes to a binary file and hashes the bytes, so that the file need not be read again. `chunk` writes the last
    block, so call `chunk` before the file is closed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sha256, self._block, self._written = file, hashlib.sha256(), bytearray(), 0

    def write(self, data: bytes | memoryview) -> None:
        """Append the bytes of `data`. Small pieces are collected into a block."""
        if len(data) >= HASH_BYTES:
            self._flush(data)
            return
        self._block += data
        if len(self._block) >= HASH_BYTES:
            self._flush()

    def _flush(self, more: bytes | memoryview = b"") -> None:
        for part in (self._block, more):
            self._written += self._file.write(part)
            self._sha256.update(part)
        self._block.clear()

    def chunk(self) -> ChunkHash:
        """Return the size and the sha256 of everything that was written."""
        self._flush()
        return {"bytes": self._written, "sha256": self._sha256.hexdigest()}


def fingerprint_of(*parts: bytes | str) -> str:
    """Return the sha256 of the parts, in hexadecimal. The length of each part is hashed, too."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def update_hash(digest: Any, path: str | Path, start: int = 0, stop: int = sys.maxsize) -> None:
    """Update `digest` with the bytes of a file from `start` to `stop` or its end."""
    buffer = memoryview(bytearray(HASH_BYTES))
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while size := file.readinto(buffer[: stop - start]):
            digest.update(buffer[:size])
            start += size


def hash_file(path: str | Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    update_hash(digest, path)
    return digest.hexdigest()


def content_hash(path: str, start: int, stop: int) -> str:
    """Return "NAME:HASH" of a file's bytes from `start` to `stop`: xxh3_128 if the package xxhash is installed, which
    is ten times faster, otherwise sha256. The hash detects changes, but not forgery."""
    try:
        import xxhash

        digest: Any = xxhash.xxh3_128()
    except ImportError:
        digest = hashlib.sha256()
    update_hash(digest, path, start, stop)
    return f"{digest.name.lower()}:{digest.hexdigest()}"


def find_damaged_chunks(path: str | Path, chunks: Sequence[ChunkHash]) -> list[str]:
    """Compare every byte of a file with the hashes of its consecutive chunks. Return a line for each difference."""
    found, start = [], 0
    size, expected = os.path.getsize(path), sum(chunk["bytes"] for chunk in chunks)
    if size != expected:
        found.append(f"{path}: {size} bytes, not the {expected} that were written")
    for chunk in chunks:
        digest, stop = hashlib.sha256(), start + chunk["bytes"]
        update_hash(digest, path, start, stop)
        if digest.hexdigest() != chunk["sha256"]:
            found.append(f"{path}: bytes {start} to {stop - 1} are not as they were written")
        start = stop
    return found


# --- the machine


def in_threads(work: Callable[[T], R], items: Iterable[T], threads: int = IO_THREADS) -> list[R]:
    """Call `work` for each item in several threads. Hashing and copying release Python's global interpreter lock. The
    first error, in the order of the items, is raised after all threads have ended. The threads are daemons, so
    the process can exit while storage is blocked."""
    jobs = [(item, Future[R]()) for item in items]
    queue = iter(jobs)

    def run() -> None:
        for item, result in queue:
            run_future(result, work, item)

    # multiprocessing's ThreadPool is not used, because it writes to /dev/shm.
    workers = [threading.Thread(target=run, daemon=True) for _ in range(min(threads, len(jobs)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [result.result() for _, result in jobs]


def run_future(result: Future[R], work: Callable[..., R], *args: Any) -> None:
    """Call `work`. Set `result` to the return value or the error of the call."""
    try:
        result.set_result(work(*args))
    except BaseException as error:
        result.set_exception(error)


def machine_memory(entry: str) -> int | None:
    """Return an entry of Linux's /proc/meminfo in bytes, or None on other systems. The entry "MemAvailable" is the
    memory that a program can get without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{entry}:")), None)


def user_cache_dir() -> Path:
    """Return $XDG_CACHE_HOME/gpt2-model-parallel, or ~/.cache/gpt2-model-parallel. The function does not
    create this folder.

    If the home does not exist or is not this user's, as in some containers, the folder is in a temporary folder that
    only this user can enter. Raises ValueError if another user has made or can change the folder.
    """
    user, cache = os.getuid(), os.environ.get("XDG_CACHE_HOME")
    home = Path(os.path.expanduser("~"))
    if not cache and not (home.is_dir() and home.stat().st_uid == user):
        home = Path(tempfile.gettempdir(), f"user-{user}")
        with contextlib.suppress(FileExistsError):
            home.mkdir(0o700)
        status = home.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != user or status.st_mode & 0o077:
            raise ValueError(
                f"{home}, the cache of a user without a home, must be a folder of user {user} with mode 0700, "
                "because other users could change it: remove it, or set XDG_CACHE_HOME to another folder"
            )
    return Path(cache or home / ".cache", "gpt2-model-parallel")
