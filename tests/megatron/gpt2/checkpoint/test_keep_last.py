"""--keep-last: which older checkpoints a save removes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.checkpoint.folder import TRACKER
from megatron.gpt2.checkpoint.manifest import MANIFEST
from megatron.gpt2.checkpoint.writer import write_checkpoint
from tests.megatron.gpt2.checkpoint.saved_states import (
    find,
    full_state,
    rank_files,
    save,
)


def iterations(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("iter_").lstrip("0") for path in folder.glob("iter_*"))


def test_keep_last(tmp_path: Path) -> None:
    for iteration in (100, 200, 300):
        save(tmp_path, iteration, keep_last=5)
    assert iterations(tmp_path) == ["100", "200", "300"]
    save(tmp_path, 400, keep_last=2)
    assert iterations(tmp_path) == ["300", "400"]
    # Back to 300: what is newer, or was renamed aside, is another course of the run and not touched.
    (tmp_path / TRACKER).write_text("300")
    shutil.rmtree(tmp_path / "iter_0000300" / "mp_rank_01")
    assert "now" in "".join(save(tmp_path, 300, keep_last=1, seed=5))
    assert iterations(tmp_path) == ["300", "300.old-1", "400"]
    assert (tmp_path / TRACKER).read_text() == "300\n"
    save(tmp_path, 350, keep_last=1)
    assert iterations(tmp_path) == ["300.old-1", "350", "400"]
    iteration, said = find(tmp_path)
    assert iteration == 350
    assert "iter_0000400 is newer" in said


def test_a_save_that_fails_removes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 100)
    with pytest.raises(TimeoutError):
        write_checkpoint(
            tmp_path,
            200,
            facts={},
            files=rank_files(full_state(200), 0, 2),
            rank=0,
            world_size=2,
            attempt="b",
            timeout_s=0.1,
            keep_last=1,
        )
    assert find(tmp_path) == (100, "")


def test_a_crash_or_an_error_while_older_ones_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for iteration in (100, 200, 300):
        save(tmp_path, iteration)

    def crash(path: Path, **options: Any) -> None:
        (path / MANIFEST).unlink()
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(shutil, "rmtree", crash)
    said = save(tmp_path, 400, keep_last=1)
    assert [line for line in said if "WARNING: --keep-last 1: " in line and "iter_0000100" in line]
    monkeypatch.undo()
    assert iterations(tmp_path) == ["100.tmp-removed", "200", "300", "400"]
    assert find(tmp_path) == (400, "")
    save(tmp_path, 500, keep_last=1)
    assert iterations(tmp_path) == ["500"]
