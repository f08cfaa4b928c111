"""Files that a crash leaves whole and that show damage: replaced atomically, locked, sealed, hashed.

After a crash, or when the machine stops, there is the old file or the new one. The system frees the lock of a process
that dies. A sealed JSON object ends in the sha256 of its own bytes. Two layouts are on disk: the manifests of token
files and of their shards are indented, and the hash covers all before the comma of its entry; a checkpoint's manifest
has a line for each entry, and the hash covers all up to its own value.

The versions of all that this project writes to disk and reads again:

| what | where | version | older ones | one of another version |
|---|---|---|---|---|
| a checkpoint | iter_0000300/manifest.json, "version" | 2 | 1 is read | is an error that says to update |
| a run's settings | config.json of a save folder, "version" | 1 | none | is an error of --config |
| a pair's index | PREFIX.idx, after its magic; Megatron's format | 1 | none | is an error |
| a pair's manifest | PREFIX.json, "format" | 1 | none | the version is for readers to come |
| a shard of a pair | PREFIX.shards/, within "recipe" | 1 | none | the shard is made again |
| tokenised text | the cache folder, within a pair's name | 1 | none | the text is tokenised again |
| a stage's manifest | OUTPUT/manifests/NAME.json, "format" | 1 | none | the shard is made again |

A tokenizer's folder has no version: its facts name its kind and hash, and a kind's files keep their form. Folders from
before these facts were called tokenizer_facts.json have them as tokenizer.json, which is read as well. A change of a
format that older programs cannot read raises its version here, and the table says what becomes of the older ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

CHECKPOINT_VERSION = 2
OLDEST_CHECKPOINT_VERSION = 1  # the oldest that is still read
RUN_SETTINGS_VERSION = 1
INDEX_VERSION = 1
PAIR_MANIFEST_VERSION = 1
PREPROCESSING_SHARD_VERSION = 1
TOKEN_CACHE_VERSION = 1
STAGE_MANIFEST_VERSION = 1

INDENTED_SEAL = ',\n "sha256": "'
END = b'"}\n'  # of the other layout
PART_BYTES = 1 << 30
BLOCK = 1 << 18  # is hashed while it lies in the processor's cache
SAFETENSORS_ALIGNMENT = 8

Part = dict[str, Any]  # bytes, sha256


# --- replaced and locked


def flush_to_disk(file: IO[Any]) -> None:
    """Flush and fsync an open file."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: str | Path) -> None:
    """Put the names in `folder` on the disk: without it a rename may be lost when the machine stops."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: str | Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """A new file, open for bytes, that takes the name `path` when the block ends without an error: written next to it,
    fsynced, renamed, and the folder fsynced. An error in the block removes it and leaves `path` as it was.

    temporary: its name until then (default: one that only this process uses). A fixed name is for a path that one
    process at a time writes: what a killed one left is then overwritten.
    """
    path = Path(path)
    new = temporary or path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with new.open("wb") as file:
            yield file
            flush_to_disk(file)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def replace_text(path: str | Path, text: str) -> None:
    """Replace `path` by `text` in UTF-8, atomically. A lone surrogate, which UTF-8 cannot hold, is written as "?"."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", errors="replace"))


def take_lock(file: IO[Any]) -> bool:
    """Lock the open `file` until it is closed. False if another process has it; OSError if its file system has no
    locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def file_lock(path: Path, waiting: Callable[[], object]) -> Iterator[None]:
    """Hold `path`, calling `waiting` once if another process has it. The system frees it when its holder dies.

    The file stays: removing it would let two processes hold two locks of one name. OSError if it can't be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        if not take_lock(file):
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- sealed and checked JSON


def write_sealed(path: Path, entries: Mapping[str, Any]) -> None:
    """Replace `path`, atomically, by `entries` in the indented layout."""
    text = json.dumps(entries, indent=1, ensure_ascii=False).removesuffix("\n}")
    replace_text(path, f'{text}{INDENTED_SEAL}{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n')


def read_sealed(path: Path) -> dict[str, Any] | None:
    """The entries that `write_sealed` wrote; None if there is no file. ValueError if it is not as it was written."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    body, _, end = data.rpartition(INDENTED_SEAL.encode())
    if not body or end != hashlib.sha256(body).hexdigest().encode() + b'"\n}\n':
        raise ValueError(f"{path} is damaged, or was not written by these tools")
    with errors_of(path):
        entries = parse_object(data)
        json.dumps(entries, ensure_ascii=False).encode()  # "\\ud800" is JSON, but not a text that could be printed
    del entries["sha256"]
    return entries


def sealed_lines(entries: Mapping[str, Any]) -> bytes:
    """`entries`, a line each, sealed."""
    lines = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in entries.items())
    return sealed_body(f'{{{lines}"sha256": "'.encode())


def sealed_body(body: bytes) -> bytes:
    """`body`, which ends with the opening quote of the hash, completed."""
    return body + hashlib.sha256(body).hexdigest().encode() + END


def check_seal(data: bytes) -> str:
    """The hash at the end of what `sealed_lines` made. ValueError if the bytes before it have another."""
    body = data[: -len(sealed_body(b""))]
    if sealed_body(body) != data:
        raise ValueError("damaged: it does not end in the sha256 of its own bytes")
    return data[len(body) : len(data) - len(END)].decode()


def parse_json(data: bytes | str) -> Any:
    """The value that `data` holds. ValueError if it is not JSON or if an object has a key twice, of which Python's
    parser would take the last in silence; RecursionError if it is nested too deeply."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a key occurs twice")
        return made

    return json.loads(data, object_pairs_hook=unique)


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object that `data` holds. ValueError, one line, for anything else."""
    try:
        value = parse_json(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"holds no JSON as it should: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("holds no JSON object")
    return value


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object in the file `path`, of at most `max_bytes` bytes. ValueError, which names the file, for anything
    else."""
    with errors_of(path):
        if path.stat().st_size > max_bytes:
            raise ValueError(f"larger than {max_bytes:,} bytes")
        return parse_object(path.read_bytes())


@contextlib.contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Turns what goes wrong inside with the content of the file `path` into a ValueError, one line that names it."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path}: has no {one_line(error)}, or an unknown one") from error
    except RecursionError as error:
        raise ValueError(f"{path}: nested too deeply") from error
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{path}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """An error's text, in one line and cut to a length that can be read: a name in a file can be anything."""
    return " ".join(str(error)[:300].split())


def safetensors_header(entries: Mapping[str, Any]) -> bytes:
    """The header of a safetensors file: 8 bytes, the length of the rest, little-endian; then a JSON object,

        {"__metadata__": {...}, tensor: {"dtype": "F32", "shape": [...], "data_offsets": [first byte, one past it]}}

    in the order of `entries`. Offsets count from the end of the header. https://huggingface.co/docs/safetensors
    """
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % SAFETENSORS_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_safetensors_header(stream: BinaryIO, max_bytes: int) -> dict[str, Any]:
    """The entries of the file that `stream` is at the beginning of. ValueError if its header is larger than `max_bytes`
    or is not a JSON object, or if a key occurs twice."""
    length = int.from_bytes(stream.read(8), "little")
    if length > max_bytes:
        raise ValueError(f"its header of {length:,} bytes is larger than {max_bytes:,}")
    return parse_object(stream.read(length))


# --- hashed


def fingerprint_of(*parts: bytes | str) -> str:
    """sha256 in hex over the parts, each with its length so that their borders count."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def add_file(digest: Any, path: str | Path, start: int = 0, stop: int = sys.maxsize) -> int:
    """Update `digest` with the bytes of a file from `start` to `stop`, or to its end; returns how many there were.
    OSError if the disk does not give them."""
    buffer, position = memoryview(bytearray(BLOCK)), start
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while size := file.readinto(buffer[: stop - position]):
            digest.update(buffer[:size])
            position += size
    return position - start


def hash_file(path: str | Path) -> str:
    """The sha256 of a file, in hexadecimal. OSError if the disk does not give it."""
    digest = hashlib.sha256()
    add_file(digest, path)
    return digest.hexdigest()


def content_hash(path: str, start: int, stop: int) -> str:
    """A hash of a file's bytes from `start` to `stop`, with its name: xxh3_128, ten times faster, if the package xxhash
    is installed, else sha256. It shows a change; it does not protect against forgery."""
    try:
        import xxhash

        digest: Any = xxhash.xxh3_128()
    except ImportError:
        digest = hashlib.sha256()
    add_file(digest, path, start, stop)
    return f"{digest.name.lower()}:{digest.hexdigest()}"


def hash_parts(path: str | Path, sizes: Sequence[int] | None = None) -> list[Part]:
    """sha256 of consecutive parts of a file, of `sizes` bytes or PART_BYTES each."""
    if sizes is None:
        sizes = [PART_BYTES] * -(-os.path.getsize(path) // PART_BYTES)
    parts: list[Part] = []
    start = 0
    for size in sizes:
        digest = hashlib.sha256()
        read = add_file(digest, path, start, start + size)
        parts.append({"bytes": read, "sha256": digest.hexdigest()})
        start += read
    return parts


def damaged_parts(path: str | Path, parts: Sequence[Part]) -> list[str]:
    """Each difference between a file and its `parts`, one line; every byte is read."""
    found = []
    sizes = [part["bytes"] for part in parts]
    if (size := os.path.getsize(path)) != sum(sizes):
        found.append(f"{path}: {size} bytes, not the {sum(sizes)} that were written")
    stop = 0
    for part, read in zip(parts, hash_parts(path, sizes), strict=True):
        start, stop = stop, stop + part["bytes"]
        if part != read:
            found.append(f"{path}: bytes {start} to {stop - 1} are not as they were written")
    return found


# --- the machine


def machine_memory(entry: str) -> int | None:
    """An entry of Linux's /proc/meminfo in bytes: "MemTotal", or "MemAvailable", which is what a program can have
    without swapping. None if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{entry}:")), None)


def user_cache() -> Path:
    """$XDG_CACHE_HOME/gpt2-model-parallel, else the same under ~/.cache; it need not exist."""
    home = os.path.expanduser("~")
    if home == "~":  # a user without a home, as in some containers
        home = os.path.join(tempfile.gettempdir(), f"user-{os.getuid()}")
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "gpt2-model-parallel")
