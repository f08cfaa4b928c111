"""What a tokenizer is; each kind has a file of its own, and tokenizers/build.py makes and loads them.

Every tokenizer is lossless (`decode(encode(text)) == text`) and no text can make it emit its end-of-document id.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

FACTS_FILE = "tokenizer_facts.json"
OLD_FACTS_FILE = "tokenizer.json"  # until a library's own file of another content was found to have this name


class Tokenizer(ABC):
    """Text to ids and back.

    `token_bytes` holds the bytes of text that each id stands for, nothing for the end-of-document id `eod`.
    `byte_lengths` are their lengths, int64 [vocab_size]. `fingerprint` is a sha256 over everything that decides ids.
    `files` are the file names and contents that make this tokenizer again. `engine` is the library that runs it where
    several can.
    """

    engine = ""

    def __init__(self, kind: str, token_bytes: Sequence[bytes], eod: int, fingerprint: str,
                 files: Mapping[str, bytes]) -> None:
        self.kind = kind
        self.token_bytes = token_bytes
        self.vocab_size = len(token_bytes)
        self.eod = eod
        self.fingerprint = fingerprint
        self.files = files
        self.byte_lengths = np.fromiter(map(len, token_bytes), dtype=np.int64, count=len(token_bytes))

    @abstractmethod
    def encode(self, text: str) -> np.ndarray | list[int]:
        """The ids of `text`, never `eod`. ValueError where `text` holds a lone surrogate."""

    def encode_utf8(self, data: bytes) -> np.ndarray | list[int]:
        """The ids of a text, given as valid UTF-8."""
        return self.encode(data.decode("utf-8"))

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The bytes that `ids` stand for; ValueError for an id outside the vocabulary."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(f"token ids {ids.min()} to {ids.max()} do not fit a vocabulary of {self.vocab_size}")
        return b"".join(map(self.token_bytes.__getitem__, ids.tolist()))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text; bytes that do not form UTF-8, as a model may generate, become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def save(self, directory: str | Path) -> None:
        """Write all that `load_tokenizer` needs into `directory`."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        facts = {"kind": self.kind, "fingerprint": self.fingerprint, "vocab_size": self.vocab_size,
                 "files": sorted(self.files)}
        (directory / FACTS_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
