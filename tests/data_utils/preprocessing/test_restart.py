"""A run that was stopped goes on; a finished one is not repeated; a small disk is found out before the work."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from data_utils.preprocessing import preprocess, shards
from data_utils.preprocessing.inputs import cut, whole_file
from tests.data_utils.preprocessing.jobs import run, some_texts, texts_of, write


def test_finished_shards_are_taken_up_and_damaged_or_stale_ones_made_again(
    tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = some_texts(400)
    path = write(tmp_path / "a.jsonl", texts)
    expected = run(path, tmp_path / "expected")
    count = len(cut([whole_file(path, ("text",))]))
    taken: list[int] = []
    stop = 4
    original = shards._Writer.take

    def take(self: Any, number: int, span: Any, progress: Any) -> Any:
        taken.append(span.start)
        if len(taken) == stop:
            raise KeyboardInterrupt
        return original(self, number, span, progress)

    monkeypatch.setattr(shards._Writer, "take", take)
    with pytest.raises(KeyboardInterrupt):
        run(path, tmp_path / "out")
    assert not list(tmp_path.glob("out.shards/*.tmp*")) and not list(tmp_path.glob("out_*"))
    left = tmp_path / "out.shards"
    damaged = bytearray((left / "00000_text.bin").read_bytes())
    damaged[7] ^= 1
    (left / "00000_text.bin").write_bytes(damaged)
    (left / "00001.json").write_text((left / "00001.json").read_text().replace("1", "2", 1))
    (left / "00002.5.tmp_text.bin").write_bytes(b"half")  # of a process that was killed
    del taken[:]
    stop = -1
    found = run(path, tmp_path / "out")
    assert len(taken) == count - 1  # shard 2 alone was whole
    assert found == expected and texts_of(tmp_path / "out") == texts
    assert (tmp_path / "out_text_document.idx").read_bytes() == (tmp_path / "expected_text_document.idx").read_bytes()


def test_a_changed_input_makes_its_shards_again(
    tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"text {number:04d}" for number in range(2000)]
    path = write(tmp_path / "a.jsonl", texts)
    with monkeypatch.context() as patch:
        patch.setattr(preprocess, "_publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(path, tmp_path / "out")
    texts[1000] = "TEXT 1000"
    write(tmp_path / "a.jsonl", texts)
    run(path, tmp_path / "out")
    assert texts_of(tmp_path / "out") == texts


def test_done_is_done_and_another_recipe_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", some_texts(20))
    first = run(path, tmp_path / "out")
    said: list[str] = []
    before = (tmp_path / "out_text_document.bin").stat()
    assert run(path, tmp_path / "out", said=said) == first and "nothing to do" in said[0]
    assert (tmp_path / "out_text_document.bin").stat().st_mtime_ns == before.st_mtime_ns
    for change in ({"append_eod": False}, {"kind": "builtin"}, {"inputs": (path, path)}):
        with pytest.raises(ValueError, match="exists and was made of other input or in another way"):
            run(change.pop("inputs", path), tmp_path / "out", **change)
    write(tmp_path / "a.jsonl", some_texts(21))
    with pytest.raises(ValueError, match="exists and was made of other input"):
        run(path, tmp_path / "out")


def test_too_small_a_disk_is_said_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", some_texts(2000))
    free = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    with pytest.raises(OSError, match="about 0.00 GB are needed.*free on that disk"):
        run(path, tmp_path / "out")
