"""Pairs written by megatron-core are read here, and ours there; both writers give the same bytes."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_utils import IndexedDataset, IndexedDatasetBuilder
from data_utils.indexed_dataset import token_dtype

torch = pytest.importorskip("torch")


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


def write_ours(prefix: Path, documents: list[list[int]], vocab_size: int) -> None:
    builder = IndexedDatasetBuilder(prefix, token_dtype(vocab_size))
    for document in documents:
        builder.add(document)
        builder.end_document()
    builder.finish()


@pytest.mark.parametrize("vocab_size", [50_257, 65_499, 65_500, 100_000])
def test_the_same_bytes_and_both_read_them(theirs: Any, tmp_path: Path, vocab_size: int) -> None:
    documents = some_documents(vocab_size, vocab_size)
    write_theirs(theirs, tmp_path / "theirs", documents, vocab_size)
    write_ours(tmp_path / "ours", documents, vocab_size)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"theirs{suffix}").read_bytes() == (tmp_path / f"ours{suffix}").read_bytes()
    here, there = IndexedDataset(tmp_path / "theirs"), theirs.IndexedDataset(str(tmp_path / "ours"))
    assert [list(here[number]) for number in range(len(here))] == documents
    assert [there[number].tolist() for number in range(len(there))] == documents
    assert there.document_indices.tolist() == list(range(41))


def test_merging_gives_megatrons_bytes_of_several_sequences_a_document_too(theirs: Any, tmp_path: Path) -> None:
    parts = [some_documents(300, seed) for seed in (1, 2)]
    for number, documents in enumerate(parts):
        write_theirs(theirs, tmp_path / f"part{number}", documents, 300, sequences=3)
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for number in (0, 1):
        builder.add_index(str(tmp_path / f"part{number}"))
    builder.finalize(str(tmp_path / "theirs.idx"))
    merger = IndexedDatasetBuilder(tmp_path / "ours", token_dtype(300))
    for number in (0, 1):
        merger.add_index(tmp_path / f"part{number}")
    merger.finish()
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"theirs{suffix}").read_bytes() == (tmp_path / f"ours{suffix}").read_bytes()
    here = IndexedDataset(tmp_path / "ours")
    assert [list(here[number]) for number in range(len(here))] == parts[0] + parts[1]
