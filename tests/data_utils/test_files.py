"""Files that several processes write, or that a crash may meet; the versions of what stands on disk."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest

from data_utils import IndexedDatasetBuilder, files
from data_utils.indexed_dataset import token_dtype, write_manifest


def test_a_text_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "facts.json"
    files.replace_text(path, "é\ud800\n")
    assert path.read_bytes() == "é?\n".encode()

    def full(descriptor: int) -> None:
        [other] = {*tmp_path.iterdir()} - {path}
        assert f"{os.getpid()}" in other.name, "no other process writes into it"
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        files.replace_text(path, "new")
    assert path.read_bytes() == "é?\n".encode() and [*tmp_path.iterdir()] == [path]


def test_the_versions_on_disk_are_those_of_the_table(tmp_path: Path) -> None:
    """The table has a row for each version, in the order of the constants."""
    builder = IndexedDatasetBuilder(tmp_path / "pair", token_dtype(256))
    builder.add([1, 2])
    builder.end_document()
    builder.finish()
    (version,) = struct.unpack_from("<Q", (tmp_path / "pair.idx").read_bytes(), 9)
    assert version == files.INDEX_VERSION == 1  # Megatron's, and not ours to raise
    assert write_manifest(tmp_path / "pair", {})["format"] == files.PAIR_MANIFEST_VERSION
    assert files.__doc__ is not None
    rows = [line.strip("| ").split(" | ") for line in files.__doc__.splitlines() if line.startswith("| ")][1:]
    versions = {name: value for name, value in vars(files).items() if re.fullmatch(r"[A-Z_]+_VERSION", name)}
    oldest = versions.pop("OLDEST_CHECKPOINT_VERSION")
    assert [int(row[2]) for row in rows] == [*versions.values()]
    assert rows[0][3] == f"{oldest} is read" and oldest < versions["CHECKPOINT_VERSION"]
