"""A tokenizer that needs no library and no file: ids 0 to 255 are the bytes of UTF-8, 256 ends a document."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_utils.files.hashing import fingerprint_of
from data_utils.tokenizers.base import Tokenizer
from data_utils.tokenizers.text import utf8


class ByteTokenizer(Tokenizer):
    """One id a byte, and the end of a document: 257 ids."""

    def __init__(self) -> None:
        token_bytes = [bytes([value]) for value in range(256)] + [b""]
        super().__init__("bytes", token_bytes, 256, fingerprint_of("bytes"), {})

    def encode(self, text: str) -> np.ndarray:
        """uint8 [bytes of text]."""
        return self.encode_utf8(utf8(text))

    def encode_utf8(self, data: bytes) -> np.ndarray:
        """uint8 [bytes of data]: the bytes themselves."""
        return np.frombuffer(data, dtype=np.uint8)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The bytes of `ids` without the ends of documents; ValueError for an id above 256 or below 0."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= self.eod:
            raise ValueError(f"token ids {ids.min()} to {ids.max()} do not fit a vocabulary of {self.vocab_size}")
        return ids[ids != self.eod].astype(np.uint8).tobytes()
