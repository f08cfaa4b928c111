"""The manifest beside a .bin/.idx pair: what it was made from, and a hash for every byte of it.

`PREFIX.json` holds `inputs` (each file's name, bytes, lines and hashes), `tokenizer`, counts, and of `.bin` and `.idx`
the sha256 of consecutive parts: the parts of a large `.bin` were hashed by many workers, and a damaged one says where.
Its last entry is the sha256 of everything before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_utils.files.format_versions import PAIR_MANIFEST_VERSION
from data_utils.files.hashing import Part, hash_parts
from data_utils.files.sealed_json import read_sealed
from data_utils.indexed_dataset import read_index


def read_manifest(prefix: str | Path) -> dict[str, Any] | None:
    """The manifest of a pair; None where it has none. ValueError where it is damaged."""
    return read_sealed(Path(f"{prefix}.json"))


def describe(prefix: str | Path, facts: dict[str, Any], bin_parts: Sequence[Part] | None = None) -> dict[str, Any]:
    """The manifest of the pair at `prefix`: `facts`, and what its files show, counts, dtype and hashes. bin_parts: the
    hashes of `.bin`, where they are known already."""
    index = read_index(prefix)
    return {"format": PAIR_MANIFEST_VERSION, **facts,
            "documents": len(index.firsts) - 1, "tokens": int(index.starts[-1]), "dtype": index.dtype.name,
            ".bin": list(bin_parts or hash_parts(f"{prefix}.bin")), ".idx": hash_parts(f"{prefix}.idx")}
