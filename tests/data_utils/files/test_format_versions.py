"""The versions that stand on disk are those of the one table, and the table names every one of them."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from data_utils import IndexedDatasetBuilder
from data_utils.files import format_versions
from data_utils.indexed_dataset import token_dtype
from data_utils.token_files import describe


def test_what_is_written_has_the_version_of_the_table(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "pair", token_dtype(256))
    builder.add([1, 2])
    builder.end_document()
    builder.finish()
    (version,) = struct.unpack_from("<Q", (tmp_path / "pair.idx").read_bytes(), 9)
    assert version == format_versions.INDEX_VERSION == 1  # Megatron's, and not ours to raise
    assert describe(tmp_path / "pair", {})["format"] == format_versions.PAIR_MANIFEST_VERSION


def test_the_table_has_a_row_for_each_version() -> None:
    """In the order of the constants, with their numbers."""
    assert format_versions.__doc__ is not None
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in format_versions.__doc__.splitlines()
        if line.startswith("| ")
    ][1:]
    versions = {name: value for name, value in vars(format_versions).items() if re.fullmatch(r"[A-Z_]+_VERSION", name)}
    oldest = versions.pop("OLDEST_CHECKPOINT_VERSION")
    assert [int(row[2]) for row in rows] == [*versions.values()]
    assert rows[0][3] == f"{oldest} is read" and oldest < versions["CHECKPOINT_VERSION"]
