"""Text, token files and tokenizers."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_utils.corpora import default_key, documents, read_corpora
from data_utils.files import INDENTED_SEAL
from data_utils.indexed_dataset import IndexedDatasetBuilder, TokenFile, open_tokens
from data_utils.preprocessing.inputs import cut, records, whole_file
from data_utils.tokenizers import build_tokenizer, load_tokenizer
from data_utils.tokenizers.base import Tokenizer, read_characters, train_sentencepiece
from data_utils.tokenizers.gpt2 import BUILTIN_FILE, builtin_tokenizer
from megatron.gpt2.commands import inspect_data
from megatron.gpt2.extensions.webtext.shards import Shard, ShardRun
from megatron.gpt2.formats.openai_tokenizer import open_tokenizer, tokenizer_files
from tests.data_utils.made import write_lines
from tests.data_utils.test_preprocessing import run, some_texts
from tests.fuzz.fuzzing import Files, Target

SAMPLE = "Once upon a time,\n there were  12 foxes; éàü \N{SNOWMAN} — don't!\t"
LINES = [
    {"text": "a document"},
    {"text": ""},
    {"text": SAMPLE, "meta": {"pile": [1, 2.5, None, True]}},
    {"url": "https://example.org/é", "text": "\N{PILE OF POO} text\n" * 5},
    {"sentence": "other"},
]


def jsonl(name: str, pack: Callable[[bytes], bytes] = bytes, array: bool = False) -> Callable[[Path], object]:
    content = json.dumps(LINES, indent=1) if array else "".join(f"{json.dumps(line)}\n" for line in LINES * 3)
    return lambda folder: (folder / name).write_bytes(pack(content.encode()))


def zstd(data: bytes) -> bytes:
    import zstandard

    packed: bytes = zstandard.ZstdCompressor().compress(data)
    return packed


def characters(folder: Path) -> None:
    numbers = dict(enumerate(sorted(set(SAMPLE))))
    meta = {"vocab_size": len(numbers), "itos": numbers, "stoi": {one: number for number, one in numbers.items()}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def read_meta(folder: Path) -> None:
    """Every id stands for one character, and every character for its id."""
    tokenizer = read_characters(str(folder / "meta.pkl"))
    ids = list(range(tokenizer.vocab_size))
    assert list(tokenizer.encode(tokenizer.decode(ids))) == ids


def check_text(text: object) -> None:
    assert isinstance(text, str) and text, "no text"
    text.encode("utf-8")  # no lone surrogate


def read_text(folder: Path) -> None:
    """As training reads it, as preprocessing does, and as curation does."""
    path = next(folder.iterdir())
    default_key(str(path))
    for text in documents(str(path), None, lambda line: None, 1.0):
        check_text(text)
    for shard in cut([whole_file(str(path), ("text",))]):
        for span in shard:
            for _, record in records(span, ("text",)):
                assert isinstance(record, (bytes, dict, list, str, int, float, type(None)))
    for document in ShardRun(argparse.Namespace(text_key="text"), Shard("read", (path,))).documents():
        check_text(document["text"])


def pair(folder: Path) -> None:
    builder = IndexedDatasetBuilder(folder / "a", np.dtype("<u2"))
    for number in range(40):
        builder.add(list(range(number % 7)))
        builder.end_document(255)
    builder.finish()


def check_tokens(data: TokenFile) -> None:
    """The documents are the tokens, cut."""
    starts: NDArray[np.int64] = data.document_starts
    assert starts[0] == 0 and starts[-1] == len(data.tokens) and bool((np.diff(starts) >= 0).all())
    assert sum(len(data[number]) for number in range(len(data))) == len(data.tokens) and len(data.tokens) < 1 << 20


def read_pair(folder: Path) -> None:
    check_tokens(open_tokens(folder / "a", 255))


def read_bin(folder: Path) -> None:
    check_tokens(open_tokens(folder / "a.bin", 255))


def llm_c(folder: Path) -> None:
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, 300
    (folder / "a.bin").write_bytes(head.tobytes() + np.arange(300, dtype="<u2").tobytes())


def preprocessed(folder: Path) -> None:
    """A pair with its manifest."""
    run(write_lines(folder / "a.jsonl", some_texts(20)), folder / "a")


def reseal(files: Files) -> None:
    name = next(name for name in files if name.endswith("document.json"))
    text = files[name].decode("utf-8", "surrogateescape")
    body, seal, _ = text.rpartition(INDENTED_SEAL)
    body = body if seal else text
    data = body.encode("utf-8", "surrogateescape")
    files[name] = data + INDENTED_SEAL.encode() + hashlib.sha256(data).hexdigest().encode() + b'"\n}\n'


def inspect(folder: Path) -> None:
    prefix = str(next(folder.glob("*_document.idx")).with_suffix(""))
    for flags in ([], ["--verify"]):
        assert inspect_data.main([prefix, *flags]) in (0, 1)


def check_tokenizer(tokenizer: Tokenizer, *, lossless: bool = True) -> None:
    """Ids are of the vocabulary, none is the end of a document, and they stand for the text."""
    ids = np.asarray(tokenizer.encode(SAMPLE), dtype=np.int64)
    assert len(ids) == 0 or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    text = tokenizer.decode(ids)
    assert not lossless or (text == SAMPLE and tokenizer.eod not in ids)


def small_bpe() -> dict[str, bytes]:
    files, problem = tokenizer_files(build_tokenizer("bytes"), 1024)
    assert not problem
    vocabulary, pairs = json.loads(files["vocab.json"]), ["t h", "th e", "\u0120 t", "\u0120t h", "i n", "e r"]
    for merge in pairs:
        vocabulary[merge.replace(" ", "")] = len(vocabulary)
    return {
        "vocab.json": json.dumps(vocabulary).encode(),
        "merges.txt": "\n".join(["#version: 0.2", *pairs, ""]).encode(),
    }


def gpt2_files(folder: Path) -> None:
    for name, data in small_bpe().items():
        (folder / name).write_bytes(data)


def read_gpt2(folder: Path) -> None:
    check_tokenizer(
        build_tokenizer(
            "GPT2BPETokenizer", vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt")
        )
    )


def huggingface_tokenizer(folder: Path) -> None:
    files = small_bpe()
    vocabulary = json.loads(files["vocab.json"])
    eod = vocabulary.pop("<|endoftext|>")
    model = {
        "type": "BPE",
        "dropout": None,
        "vocab": vocabulary,
        "merges": [line.split() for line in files["merges.txt"].decode().splitlines()[1:]],
    }
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "added_tokens": [{"id": eod, "content": "<|endoftext|>", "special": True}],
                "normalizer": None,
                "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
                "model": model,
            }
        )
    )


def sentencepiece_model(folder: Path) -> None:
    train_sentencepiece(["the cat sat on the mat. " * 20, SAMPLE * 20], folder / "sp.model", 320)


TARGETS = [
    Target("JSONL", jsonl("a.jsonl"), read_text),
    Target("JSON array", jsonl("a.json", array=True), read_text),
    Target("JSONL, gzip", jsonl("a.jsonl.gz", lambda data: gzip.compress(data, mtime=0)), read_text),
    Target("JSONL, zstd", jsonl("a.jsonl.zst", zstd), read_text),
    Target("text", jsonl("a.txt"), read_text),
    Target(
        "named corpora",
        lambda folder: (folder / "corpora.json").write_text(
            '{"small": {"files": ["a.txt", "b.jsonl"], "text_key": "text"}, "other": {"files": ["c"]}}'
        ),
        lambda folder: read_corpora(folder / "corpora.json"),
    ),
    Target(".idx", pair, read_pair, "*.idx"),
    Target(".bin", pair, read_pair, "*.bin"),
    Target(".bin of llm.c", llm_c, read_bin),
    Target("pair's manifest behind its seal", preprocessed, inspect, "*_document.json", reseal),
    Target("vocabulary and merges", gpt2_files, read_gpt2),
    Target(
        "tokenizer.json",
        huggingface_tokenizer,
        lambda folder: check_tokenizer(open_tokenizer({"tokenizer.json": str(folder / "tokenizer.json")})),
    ),
    Target(
        "builtin_bpe.json",
        lambda folder: builtin_tokenizer().save(folder),
        lambda folder: check_tokenizer(builtin_tokenizer(folder / BUILTIN_FILE)),
        BUILTIN_FILE,
    ),
    Target("meta.pkl", characters, read_meta),
    Target(
        "tokenizer of a checkpoint",
        lambda folder: builtin_tokenizer().save(folder),
        lambda folder: check_tokenizer(load_tokenizer(folder)),
    ),
    Target(
        "SentencePiece model",
        sentencepiece_model,
        lambda folder: check_tokenizer(
            build_tokenizer("SentencePieceTokenizer", model_file=str(folder / "sp.model")), lossless=False
        ),
    ),
]
