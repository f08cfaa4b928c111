"""Files that several processes write, or that a crash may meet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from data_utils.files.atomic import replace_text


def test_a_text_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "facts.json"
    replace_text(path, "é\ud800\n")
    assert path.read_bytes() == "é?\n".encode()

    def full(descriptor: int) -> None:
        [other] = {*tmp_path.iterdir()} - {path}
        assert f"{os.getpid()}" in other.name, "no other process writes into it"
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        replace_text(path, "new")
    assert path.read_bytes() == "é?\n".encode() and [*tmp_path.iterdir()] == [path]
