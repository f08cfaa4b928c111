from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest

from data_utils import IndexedDataset, IndexedDatasetBuilder
from data_utils.indexed_dataset import token_dtype

DOCUMENTS = [[1, 2, 3], [], [40_000], list(range(7))]


def write(prefix: Path, vocab_size: int = 50_257) -> None:
    builder = IndexedDatasetBuilder(prefix, token_dtype(vocab_size))
    for document in DOCUMENTS:
        builder.add(document[:2])
        builder.add(np.asarray(document[2:], dtype=np.int64))
        builder.end_document()
    builder.finish()


@pytest.mark.parametrize("vocab_size", [50_257, 65_500])
def test_what_is_written_is_read(tmp_path: Path, vocab_size: int) -> None:
    write(tmp_path / "a", vocab_size)
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.dtype == (np.uint16 if vocab_size < 65_500 else np.int32)
    assert [list(dataset[index]) for index in range(len(dataset))] == DOCUMENTS
    assert list(dataset.tokens) == sum(DOCUMENTS, [])
    assert list(dataset.document_starts) == [0, 3, 3, 4, 11]


def test_the_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    write(tmp_path / "a")
    expected = (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 8, 4, 5)
        + struct.pack("<4i", 3, 0, 1, 7)
        + struct.pack("<4q", 0, 6, 6, 8)
        + struct.pack("<5q", 0, 1, 2, 3, 4)
    )
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<11H", *sum(DOCUMENTS, []))


def test_several_sequences_a_document_and_modes(tmp_path: Path) -> None:
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 3, 3)
    arrays = struct.pack("<3i", 1, 2, 1) + struct.pack("<3q", 0, 4, 12) + struct.pack("<3q", 0, 2, 3) + b"\0\1\0"
    (tmp_path / "a.idx").write_bytes(header + arrays)
    (tmp_path / "a.bin").write_bytes(struct.pack("<4i", 5, 6, 7, 8))
    dataset = IndexedDataset(tmp_path / "a")
    assert [list(dataset[index]) for index in range(len(dataset))] == [[5, 6, 7], [8]]


def test_an_empty_pair(tmp_path: Path) -> None:
    IndexedDatasetBuilder(tmp_path / "a", token_dtype(300)).finish()
    assert len(IndexedDataset(tmp_path / "a")) == 0


def test_missing_files(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(FileNotFoundError, match="a.bin"):
        IndexedDataset(tmp_path / "a")


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_every_truncation_and_any_byte_too_many_is_refused(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "a")
    whole = (tmp_path / f"a{suffix}").read_bytes()
    for content in [whole[:size] for size in range(len(whole))] + [whole + b"\0"]:
        (tmp_path / f"a{suffix}").write_bytes(content)
        with pytest.raises(ValueError, match="is damaged"):
            IndexedDataset(tmp_path / "a")


def test_changed_bytes_of_the_index_are_refused_or_harmless(tmp_path: Path) -> None:
    """A changed byte may still be a valid index (a document's border may move); then it must read in bounds."""
    write(tmp_path / "a")
    whole = (tmp_path / "a.idx").read_bytes()
    draw = random.Random(5)
    refused = 0
    for position in range(len(whole)):
        for value in draw.sample([byte for byte in range(256) if byte != whole[position]], 6):
            (tmp_path / "a.idx").write_bytes(whole[:position] + bytes([value]) + whole[position + 1 :])
            try:
                dataset = IndexedDataset(tmp_path / "a")
            except ValueError as error:
                assert "\n" not in str(error) and "a.idx" in str(error)
                refused += 1
            else:
                assert sum(len(dataset[index]) for index in range(len(dataset))) == len(dataset.tokens)
    assert refused >= 6 * len(whole) * 0.95


def test_huge_counts_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    write(tmp_path / "a")
    whole = (tmp_path / "a.idx").read_bytes()
    for sequences, documents in ((2**63, 5), (4, 2**63), (2**61, 2**61), (2**64 - 1, 2**64 - 1)):
        (tmp_path / "a.idx").write_bytes(whole[:18] + struct.pack("<QQ", sequences, documents) + whole[34:])
        with pytest.raises(ValueError, match="is damaged"):
            IndexedDataset(tmp_path / "a")
