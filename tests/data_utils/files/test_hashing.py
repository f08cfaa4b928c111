"""The sha256 of a file, mapped or read."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from data_utils.files import hashing


@pytest.mark.parametrize("advice", [hashing.POPULATE_READ, 9999])  # what Linux 5.14 knows, and what no system does
def test_equals_hashlib(tmp_path: Path, advice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "POPULATE_READ", advice)
    monkeypatch.setattr(hashing, "MAPPED", 1 << 16)
    for size in (0, 1, 1 << 16, (1 << 17) + 5):
        path = tmp_path / str(size)
        path.write_bytes(os.urandom(size))
        assert hashing.hash_file(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_the_disk_does_not_give_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that becomes shorter while it is hashed, the one such error that can be had without a broken disk."""
    monkeypatch.setattr(hashing, "MAPPED", 1 << 16)
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 18))
    with open(path, "rb", buffering=0) as stream:
        parts = hashing._parts(stream)
        assert next(parts) == bytes(1 << 16)
        os.truncate(path, 1 << 16)
        with pytest.raises(OSError, match="Bad address"):
            next(parts)
