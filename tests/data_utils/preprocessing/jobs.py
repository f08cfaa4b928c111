"""Jobs of preprocessing for these tests: their input, the run, and what it wrote."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

from data_utils import IndexedDataset, build_tokenizer
from data_utils.preprocessing.preprocess import Job, preprocess

BYTES = build_tokenizer("bytes")
BUILTIN = build_tokenizer("builtin")


def write(path: Path, texts: list[str]) -> str:
    path.write_bytes(
        b"".join(
            json.dumps({"id": 1, "text": text}, ensure_ascii=bool(len(text) % 2)).encode() + b"\n" for text in texts
        )
    )
    return str(path)


def some_texts(count: int) -> list[str]:
    draw = random.Random(count)
    words = ["one", " two", "\n", "  ", "été", "😀", "<|endoftext|>", "日本", "\t", "'s", '"', "\\"]
    return ["".join(draw.choices(words, k=draw.randrange(1, 60))) for _ in range(count)]


def run(inputs: Any, prefix: Path, kind: str = "bytes", said: list[str] | None = None, **more: Any) -> dict[str, Any]:
    inputs = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    job = Job(
        **{
            "inputs": inputs,
            "output_prefix": str(prefix),
            "keys": ("text",),
            "tokenizer": {"kind": kind},
            "append_eod": True,
            **more,
        }
    )
    return preprocess(
        job,
        log=(said if said is not None else []).append,
        progress=lambda total: contextlib.nullcontext(lambda read, tokens: None),
    )


def texts_of(prefix: Path, key: str = "text", tokenizer: Any = BYTES) -> list[str]:
    data = IndexedDataset(f"{prefix}_{key}_document")
    assert all(len(data[number]) and data[number][-1] == tokenizer.eod for number in range(len(data)))
    return [tokenizer.decode(data[number][:-1]) for number in range(len(data))]
