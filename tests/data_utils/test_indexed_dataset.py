"""Test token files: .bin/.idx pairs, which must equal megatron-core's, files of nanoGPT and llm.c, merged files,
damaged files and atomic writes."""

from __future__ import annotations

import os
import random
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_utils import IndexedDataset, files
from data_utils.indexed_dataset import open_token_file, token_dtype
from data_utils.preprocessing import merge_datasets
from tests.data_utils.data_files import write, write_pair

torch = pytest.importorskip("torch")
DOCUMENTS = [[1, 2, 3], [], [40_000], list(range(7))]


def documents_of(data: Any) -> list[list[int]]:
    return [list(data[number]) for number in range(len(data))]


def bytes_of(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


# --- megatron-core


@pytest.fixture(scope="module")
def theirs() -> Any:
    pytest.importorskip("megatron.core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


def some_documents(vocab_size: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(draw.randrange(1, 50))] for _ in range(40)]


def write_theirs(theirs: Any, prefix: Path, documents: list[list[int]], vocab_size: int, sequences: int = 1) -> None:
    builder = theirs.IndexedDatasetBuilder(f"{prefix}.bin", dtype=theirs.DType.optimal_dtype(vocab_size))
    for document in documents:
        lengths = [len(part) for part in np.array_split(document, min(sequences, len(document)))]
        builder.add_document(torch.tensor(document), lengths)
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("vocab_size", [65_499, 65_500])
def test_bytes_equal_megatron_core(theirs: Any, tmp_path: Path, vocab_size: int) -> None:
    documents = some_documents(vocab_size, vocab_size)
    write_theirs(theirs, tmp_path / "theirs", documents, vocab_size)
    write_pair(tmp_path / "ours", documents, token_dtype(vocab_size))
    assert bytes_of(tmp_path / "theirs") == bytes_of(tmp_path / "ours")


def test_merged_bytes_equal_megatron_core(theirs: Any, tmp_path: Path) -> None:
    parts = [some_documents(300, seed) for seed in (1, 2)]
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for number, documents in enumerate(parts):
        write_theirs(theirs, tmp_path / f"part{number}", documents, 300, sequences=3)
        builder.add_index(str(tmp_path / f"part{number}"))
    builder.finalize(str(tmp_path / "theirs.idx"))
    merge_datasets([str(tmp_path / "part0"), str(tmp_path / "part1")], str(tmp_path / "ours"), 0)
    assert bytes_of(tmp_path / "theirs") == bytes_of(tmp_path / "ours")
    assert documents_of(IndexedDataset(tmp_path / "ours")) == parts[0] + parts[1]


# --- damage


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_damaged_and_missing_files_are_refused(tmp_path: Path, suffix: str) -> None:
    """Test files that are cut off, and huge counts in the header. tests/fuzz changes all other bytes of an index."""
    path = Path(write_pair(tmp_path / "a_text_document", DOCUMENTS) + suffix)
    prefix = path.with_suffix("")
    assert documents_of(IndexedDataset(prefix)) == DOCUMENTS
    whole = path.read_bytes()
    # These counts are refused before memory is allocated.
    huge = whole[:18] + struct.pack("<QQ", 2**61, 2**61) + whole[34:]
    for content in [*(whole[:size] for size in range(len(whole))), whole + b"\0", *[huge] * (suffix == ".idx")]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is damaged"):
            IndexedDataset(prefix)
    with pytest.raises(FileNotFoundError, match=r"no such file: .*a\.idx: did you mean .*/a_text_document\?$"):
        IndexedDataset(tmp_path / "a")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"no such file: .*a_text_document{suffix}$"):
        open_token_file(prefix, EOD)  # A path without a suffix names a .bin/.idx pair.


# --- nanoGPT and llm.c

EOD = 50256
ENDED = [[1, 2, 3, EOD], [40_000, EOD], [*range(30), EOD]]
TOKENS = np.array(sum(ENDED, []), dtype="<u2")
NANO = TOKENS.tobytes()


def llm_c(tokens: np.ndarray = TOKENS, version: int = 1, more: int = 0) -> bytes:
    head = np.zeros(256, dtype="<i4")
    head[:3] = 20240520, version, len(tokens) + more
    return head.tobytes() + tokens.tobytes()


def test_nanogpt_and_llm_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_utils.indexed_dataset.EOD_SEARCH_TOKENS", 5)
    for content, kind in ((NANO, "nanoGPT"), (llm_c(), "llm.c")):
        data = open_token_file(write(tmp_path / "a.bin", content), EOD)
        assert data.kind == kind and list(data.tokens) == list(TOKENS) and documents_of(data) == ENDED
    assert list(open_token_file(write(tmp_path / "b.bin", NANO + b"\7\0"), EOD).document_starts) == [0, 4, 6, 37, 38]
    assert len(open_token_file(write(tmp_path / "c.bin", llm_c(TOKENS[:0])), EOD)) == 0
    write(tmp_path / "a.json", "{}")
    with pytest.raises(FileNotFoundError, match=r"a.idx, but .*a.json exists"):
        open_token_file(tmp_path / "a.bin", EOD)


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"abc", "3 bytes are not uint16"),
        (np.arange(40, dtype="<i4").tobytes(), "32-bit tokens.*its .idx is missing"),
        (llm_c()[:500], "does not fit its 500 bytes"),
        (llm_c(more=1), "of llm.c, but its header does not fit"),
        (llm_c(version=2), "of llm.c, but its header does not fit"),
    ],
    ids=range(5),
)
def test_other_bin_files_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        open_token_file(write(tmp_path / "a.bin", content), EOD)


def test_merge_all_formats(tmp_path: Path) -> None:
    pair, output = write_pair(tmp_path / "a", [[5, 6, EOD]]), str(tmp_path / "all")
    sources = [write(tmp_path / "nano.bin", NANO), pair, write(tmp_path / "llm.bin", llm_c())]
    manifest = merge_datasets(sources, output, EOD)
    assert documents_of(open_token_file(f"{output}.idx", EOD)) == [*ENDED, [5, 6, EOD], *ENDED]
    assert manifest["documents"] == 7 and manifest["tokenizer"] is None
    with pytest.raises(ValueError, match="the pair exists"):
        merge_datasets(sources, output, EOD)
    with pytest.raises(ValueError, match="holds int32, but .* uint16: they can't be one file"):
        merge_datasets([pair, write_pair(tmp_path / "wide", [], "<i4")], str(tmp_path / "new"), EOD)


# --- atomic writes


def test_atomic_write_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "facts.json"
    files.atomic_write_text(path, "é\ud800\n")
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.stat("nowhere"))
    with pytest.raises(FileNotFoundError):
        files.atomic_write_text(path, "new")
    with pytest.raises(FileNotFoundError):
        write_pair(tmp_path / "a", DOCUMENTS)
    assert path.read_bytes() == "é?\n".encode() and [*tmp_path.iterdir()] == [path]
