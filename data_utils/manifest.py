"""The manifest beside a .bin/.idx pair: what it was made from, and a hash for every byte of it.

`PREFIX.json` holds `inputs` (each file's name, bytes, lines and hashes), `tokenizer`, counts, and of `.bin` and `.idx`
the sha256 of consecutive parts: the parts of a large `.bin` were hashed by many workers, and a damaged one says where.
Its last entry is the sha256 of everything before it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_utils.file_lock import replace_text
from data_utils.indexed_dataset import read_index

PART_BYTES = 1 << 30
BLOCK = 1 << 20
SEAL = ',\n "sha256": "'

Part = dict[str, Any]  # bytes, sha256


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
    """That of a file's bytes from `start` to `stop`."""
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


def write_sealed(path: Path, facts: dict[str, Any]) -> None:
    """Replace `path` by `facts` as JSON, its own sha256 at the end."""
    text = json.dumps(facts, indent=1, ensure_ascii=False).removesuffix("\n}")
    replace_text(path, f'{text}{SEAL}{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n')


def read_sealed(path: Path) -> dict[str, Any] | None:
    """What `write_sealed` wrote; None where there is no file. ValueError where it is not as it was written."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        text = ""
    body, seal, end = text.rpartition(SEAL)
    if not seal or end != hashlib.sha256(body.encode()).hexdigest() + '"\n}\n':
        raise ValueError(f"{path} is damaged, or was not written by these tools")
    facts: dict[str, Any] = json.loads(text)
    del facts["sha256"]
    return facts


def read_manifest(prefix: str | Path) -> dict[str, Any] | None:
    """The manifest of a pair; None where it has none. ValueError where it is damaged."""
    return read_sealed(Path(f"{prefix}.json"))


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


def describe(prefix: str | Path, facts: dict[str, Any], bin_parts: Sequence[Part] | None = None) -> dict[str, Any]:
    """`facts` and what the files at `prefix` show: counts, dtype and hashes; those of `.bin` may be known already."""
    index = read_index(prefix)
    return {"format": 1, **facts, "documents": len(index.firsts) - 1, "tokens": int(index.starts[-1]),
            "dtype": index.dtype.name, ".bin": list(bin_parts or hash_parts(f"{prefix}.bin")),
            ".idx": hash_parts(f"{prefix}.idx")}
