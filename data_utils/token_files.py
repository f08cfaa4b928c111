"""Token files of every kind: the one way to open them, those without an `.idx`, and the manifest beside a pair.

nanoGPT's `.bin`: uint16 tokens and nothing else. llm.c's: 256 int32 (magic 20240520, version 1, number of tokens), then
uint16 tokens. Only the end-of-document id shows where a document ends.

The manifest says what a .bin/.idx pair was made from, and holds a hash for every byte of it. `PREFIX.json` holds
`inputs` (each file's name, bytes, lines and hashes), `tokenizer`, counts, and of `.bin` and `.idx` the sha256 of
consecutive parts: the parts of a large `.bin` were hashed by many workers, and a damaged one says where. Its last entry
is the sha256 of everything before it.
"""

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.files import PAIR_MANIFEST_VERSION, Part, errors_of, hash_parts, read_sealed
from data_utils.indexed_dataset import IndexedDataset, read_index

LLM_C_MAGIC = 20240520
LLM_C_HEADER = 1024  # bytes
SEARCHED_AT_ONCE = 1 << 24


class ForeignBin:
    """A token file without an index, with the `tokens` and `document_starts` of an IndexedDataset. Each document ends
    with `eod`; what follows the last EOD is one more document.

    ValueError where the file is neither nanoGPT's nor llm.c's.
    """

    def __init__(self, path: str | Path, eod: int) -> None:
        self._eod = eod
        self.dtype = np.dtype("<u2")
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            head = np.frombuffer(file.read(LLM_C_HEADER)[: size // 4 * 4], dtype="<i4")
        offset, self.kind = 0, "nanoGPT"
        if len(head) and head[0] == LLM_C_MAGIC:
            offset, self.kind = LLM_C_HEADER, "llm.c"
            if size < offset or head[1] != 1 or size - offset != 2 * int(head[2]):
                raise ValueError(
                    f"{path} is damaged: it begins as one of llm.c's, but its header does not fit its {size} bytes"
                )
        elif size == 0 or size % 2:
            raise ValueError(f"{path} has no .idx beside it, and its {size} bytes are no uint16 tokens either")
        elif len(head) >= 16 and head.min() >= 0 and head.max() < 1 << 16:
            raise ValueError(f"{path} holds 32-bit tokens, not the uint16 ones of nanoGPT: its .idx is missing")
        self.tokens: np.ndarray = (
            np.zeros(0, self.dtype)
            if size == offset
            else np.asarray(np.memmap(path, dtype=self.dtype, mode="r", offset=offset)).view(np.ndarray)
        )

    @cached_property
    def document_starts(self) -> np.ndarray:
        """int64 [documents + 1], from 0 to `len(tokens)`. All tokens are read for it, once."""
        blocks = [
            np.flatnonzero(self.tokens[first : first + SEARCHED_AT_ONCE] == self._eod) + first + 1
            for first in range(0, len(self.tokens), SEARCHED_AT_ONCE)
        ]
        starts = np.concatenate([[0], *blocks])
        return starts if starts[-1] == len(self.tokens) else np.append(starts, len(self.tokens))

    def __len__(self) -> int:
        return len(self.document_starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """The tokens of one document."""
        return self.tokens[self.document_starts[index] : self.document_starts[index + 1]]


def open_tokens(path: str | Path, eod: int) -> IndexedDataset | ForeignBin:
    """The token file at `path`: a pair, by its prefix or the name of one of its files, or nanoGPT's or llm.c's `.bin`,
    which has no `.idx` beside it. eod: the end-of-document id, for such a file. FileNotFoundError or ValueError, in one
    line."""
    prefix = prefix_of(path)
    if str(path) != prefix and not Path(f"{prefix}.idx").exists() and Path(f"{prefix}.bin").is_file():
        if Path(f"{prefix}.json").exists():
            raise FileNotFoundError(f"no such file: {prefix}.idx, but {prefix}.json says that it was written")
        return ForeignBin(f"{prefix}.bin", eod)
    return IndexedDataset(prefix)


def prefix_of(path: str | Path) -> str:
    """`path` without .bin or .idx at its end."""
    return str(path).removesuffix(".bin").removesuffix(".idx")


def read_manifest(prefix: str | Path) -> dict[str, Any] | None:
    """The manifest of a pair; None where it has none. ValueError where it is damaged or not of its form."""
    path = Path(f"{prefix}.json")
    manifest = read_sealed(path)
    if manifest is None:
        return None
    with errors_of(path):
        for suffix in (".bin", ".idx"):
            if not all(_is_count(part["bytes"]) and isinstance(part["sha256"], str) for part in manifest[suffix]):
                raise ValueError(f"its parts of {suffix} are not of the form bytes and sha256")
        if not all(isinstance(entry["file"], str) for entry in manifest["inputs"]):
            raise ValueError("its inputs are not of the form file and more")
        if (made_by := manifest["tokenizer"]) is not None and not (
            _is_count(made_by["vocab_size"])
            and isinstance(made_by["kind"], str)
            and isinstance(made_by["fingerprint"], str)
        ):
            raise ValueError("its tokenizer is not of the form kind, vocab_size and fingerprint")
        of_text = ("text_bytes", "append_eod", "bad_lines", "empty_documents")  # a merged pair has none of them
        for name in ("documents", "tokens", *of_text * ("text_bytes" in manifest)):
            if not _is_count(manifest[name]):
                raise ValueError(f"its {name} is no number")
    return manifest


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 63


def describe(prefix: str | Path, facts: dict[str, Any], bin_parts: Sequence[Part] | None = None) -> dict[str, Any]:
    """The manifest of the pair at `prefix`: `facts`, and what its files show, counts, dtype and hashes. bin_parts: the
    hashes of `.bin`, where they are known already."""
    index = read_index(prefix)
    return {
        "format": PAIR_MANIFEST_VERSION,
        **facts,
        "documents": len(index.firsts) - 1,
        "tokens": int(index.starts[-1]),
        "dtype": index.dtype.name,
        ".bin": list(bin_parts or hash_parts(f"{prefix}.bin")),
        ".idx": hash_parts(f"{prefix}.idx"),
    }
