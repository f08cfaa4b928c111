"""Write text files, token files and vocabularies for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from data_utils import IndexedDatasetBuilder, build_tokenizer
from data_utils.tokenizers.gpt2 import END_OF_TEXT, bytes_to_unicode

BYTES = build_tokenizer("bytes")
BAD_LINES = [
    b'{"text": "half',
    b'{"id": 1}',
    b'{"text": 5}',
    b'["text"]',
    b'{"text": "\\ud800"}',
    b'{"text": "\xff"}',
    b"[" * 100_000,
    b'{"text": "a", "n": ' + b"9" * 10_000 + b"}",
    b'{"text": null}',
    b"null",
    b'"text"',
    b'{"text": "a"} {"text": "b"}',
]


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def write_lines(path: Path, texts: Iterable[str], key: str = "text") -> str:
    """Write JSON lines. A text of odd length is written in ASCII, with escapes for all other characters."""
    lines = [json.dumps({"id": 1, key: text}, ensure_ascii=bool(len(text) % 2)) for text in texts]
    return write(path, "".join(f"{line}\n" for line in lines))


def write_pair(prefix: str | Path, documents: Iterable[Any], dtype: Any = "<u2", made_by: Any = None) -> str:
    """Write a .bin/.idx pair. If `made_by`, the manifest's entry for the tokenizer, is given, write a manifest."""
    with IndexedDatasetBuilder(prefix, np.dtype(dtype)) as builder:
        for document in documents:
            builder.add(document)
            builder.end_document()
    if made_by:
        builder.write_manifest({"inputs": [], "tokenizer": made_by})
    return str(prefix)


def write_byte_vocabulary(vocab: Path, merges: Path) -> None:
    """Write GPT-2's two files for a vocabulary of the 256 bytes and an end of document, without merges."""
    vocab.write_text(json.dumps({token: number for number, token in enumerate([*bytes_to_unicode(), END_OF_TEXT])}))
    merges.write_text("#version: 0.2\n")
