"""Hashes of files, of their parts and of values: sha256, and a faster one for input."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

PART_BYTES = 1 << 30
BLOCK = 1 << 20  # hashed while it still lies in the processor's cache
MAPPED = 16 << 20  # of a file that is hashed, at once
POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which Python has no name for

Part = dict[str, Any]  # bytes, sha256


def fingerprint_of(*parts: bytes | str) -> str:
    """sha256 in hex over the parts, each with its length so that their borders count."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def hash_file(path: str | Path) -> str:
    """The sha256 of a file, in hexadecimal. OSError where the disk does not give it."""
    digest = hashlib.sha256()
    add_file(digest, path)
    return digest.hexdigest()


def add_file(digest: hashlib._Hash, path: str | Path) -> None:
    """Update `digest` with the bytes of a file. OSError where the disk does not give them."""
    with open(path, "rb", buffering=0) as stream:
        for part in _parts(stream):
            digest.update(part)


def _parts(stream: FileIO) -> Iterator[memoryview]:
    """The bytes of a file, mapped where the system can: copied into a buffer they take a core a fifth longer to hash.

    Pages are asked for before they are touched, since one that the disk does not give would end the process then.
    """
    try:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(POPULATE_READ, 0, min(MAPPED, len(mapped)))
    except (OSError, ValueError):  # an older system, a filesystem without maps, an empty file
        buffer = memoryview(bytearray(BLOCK))
        while size := stream.readinto(buffer):
            yield buffer[:size]
        return
    with mapped, memoryview(mapped) as view:
        for start in range(0, len(view), MAPPED):
            mapped.madvise(POPULATE_READ, start, min(MAPPED, len(view) - start))
            with view[start : start + MAPPED] as part:
                yield part


class ContentHash:
    """A hash of input, with its name: xxh3_128, ten times faster, where the package xxhash is installed, else sha256.
    It shows a change; it is no protection against forgery."""

    def __init__(self) -> None:
        try:
            import xxhash

            digest: Any = xxhash.xxh3_128()
        except ImportError:
            digest = hashlib.sha256()
        self._digest, self.update = digest, digest.update

    def __str__(self) -> str:
        return f"{self._digest.name.lower()}:{self._digest.hexdigest()}"


def content_hash(path: str, start: int, stop: int) -> str:
    """The ContentHash of a file's bytes from `start` to `stop`, as text."""
    digest = ContentHash()
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < stop and (block := file.read(min(BLOCK // 8, stop - start))):
            digest.update(block)
            start += len(block)
    return str(digest)


def hash_parts(path: str | Path, sizes: Sequence[int] | None = None) -> list[Part]:
    """sha256 of consecutive parts of a file, of `sizes` bytes or PART_BYTES each."""
    left = os.path.getsize(path)
    sizes = [PART_BYTES] * -(-left // PART_BYTES) if sizes is None else sizes
    parts = []
    with open(path, "rb", buffering=0) as file:
        for size in sizes:
            digest, count = hashlib.sha256(), 0
            while count < size and (block := file.read(min(BLOCK, size - count))):
                digest.update(block)
                count += len(block)
            parts.append({"bytes": count, "sha256": digest.hexdigest()})
    return parts


def damaged_parts(path: str | Path, parts: Sequence[Part]) -> list[str]:
    """What differs between a file and its `parts`, one line each; every byte is read."""
    found = []
    size, expected = os.path.getsize(path), sum(part["bytes"] for part in parts)
    if size != expected:
        found.append(f"{path}: {size} bytes, not the {expected} that were written")
    start = 0
    for part, read in zip(parts, hash_parts(path, [part["bytes"] for part in parts]), strict=True):
        if part != read:
            found.append(f"{path}: bytes {start} to {start + part['bytes'] - 1} are not as they were written")
        start += part["bytes"]
    return found
