from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_utils import build_tokenizer, files, token_cache
from data_utils.token_cache import tokenise
from data_utils.tokenizers.base import ByteTokenizer

BYTES = build_tokenizer("bytes")
OLD = time.time_ns() - 10**12


class Said(list[str]):
    """A log; `times` counts the times that text was tokenised."""

    def __call__(self, line: str) -> None:
        self.append(line)

    @property
    def times(self) -> int:
        return sum(line.startswith("tokenised ") for line in self)


def write(path: Path, text: str, mtime_ns: int = OLD) -> str:
    path.write_text(text)
    os.utime(path, ns=(mtime_ns, mtime_ns))
    return str(path)


def run(paths: list[str], folder: Path, said: Said, **more: Any) -> str:
    given = {"text_key": None, "tokenizer": BYTES, "cache_path": str(folder), "log": said, **more}
    dataset, _ = tokenise(paths, **given)
    found = [dataset[index] for index in range(len(dataset))]
    assert all(document[-1] == BYTES.eod for document in found)
    return "".join(map(BYTES.decode, found))


def test_tokenised_once_and_hashed_only_where_the_file_looks_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    hash_file = files.hash_file

    def counted(path: str) -> str:
        hashed.append(path)
        return hash_file(path)

    monkeypatch.setattr(token_cache, "hash_file", counted)
    said, folder = Said(), tmp_path / "cache"
    path = write(tmp_path / "a.txt", "first text")
    for _ in range(3):
        assert run([path], folder, said) == "first text"
    assert said.times == 1 and len(hashed) == 1
    write(Path(path), "first text", OLD + 5)  # a new mtime: hashed again, the same content
    assert run([path], folder, said) == "first text"
    assert said.times == 1 and len(hashed) == 2
    write(Path(path), "other text", OLD + 6)
    assert run([path], folder, said) == "other text"
    assert said.times == 2 and len(hashed) == 3
    copy = write(tmp_path / "copy.txt", "other text")  # another path: hashed, found by content
    assert run([copy], folder, said) == "other text"
    assert said.times == 2 and len(hashed) == 4


def test_a_file_written_a_moment_ago_is_hashed_again(tmp_path: Path) -> None:
    said, now = Said(), time.time_ns()
    path = write(tmp_path / "a.txt", "text one", now)
    assert run([path], tmp_path / "cache", said) == "text one"
    write(Path(path), "text two", now)  # the same size and mtime
    assert run([path], tmp_path / "cache", said) == "text two"


def test_several_files_keep_their_order_and_the_reader_and_key_count(tmp_path: Path) -> None:
    said, folder = Said(), tmp_path / "cache"
    a = write(tmp_path / "a.txt", "A")
    b = write(tmp_path / "b.jsonl", '{"text": "B", "title": "T"}\n{"text": "b", "title": "t"}')
    assert run([a, b], folder, said) == "ABb"
    assert run([b, a], folder, said) == "BbA"
    assert run([b], folder, said, text_key="title") == "Tt"
    same = write(tmp_path / "b.txt", Path(b).read_text())
    assert run([same], folder, said) == Path(b).read_text()
    assert said.times == 4


def test_the_field_that_is_read_counts_and_not_the_flag(tmp_path: Path) -> None:
    said, folder = Said(), tmp_path / "cache"
    a = write(tmp_path / "a.txt", "A")
    b = write(tmp_path / "b.jsonl", '{"sentence": "B", "title": "T"}')
    c = write(tmp_path / "c.jsonl", '{"text": "C", "sentence": "c"}')
    assert run([a], folder, said) == run([a], folder, said, text_key="title") == "A" and said.times == 1
    assert run([b], folder, said) == run([b], folder, said, text_key="sentence") == "B" and said.times == 2
    assert run([b, c], folder, said) == "BC"  # each file its own field
    assert run([b, c], folder, said, text_key="sentence") == "Bc" and said.times == 4


def test_another_tokenizer_has_another_entry(tmp_path: Path) -> None:
    said, folder, path = Said(), tmp_path / "cache", write(tmp_path / "a.txt", "some text")
    run([path], folder, said)
    builtin = build_tokenizer("builtin")
    dataset, _ = tokenise([path], text_key=None, tokenizer=builtin, cache_path=str(folder), log=said)
    assert builtin.decode(dataset[0]) == "some text" and said.times == 2


def test_a_damaged_entry_is_made_again(tmp_path: Path) -> None:
    said, folder, path = Said(), tmp_path / "cache", write(tmp_path / "a.txt", "some text")
    run([path], folder, said)
    for pattern in ("*.bin", "*.idx", "hashes/*.json"):
        (found,) = folder.glob(pattern)
        found.write_bytes(found.read_bytes()[:-1])
        assert run([path], folder, said) == "some text"
    assert said.times == 3  # a damaged hash costs a hash, not tokens


def test_nothing_is_left_by_a_failure(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n{')
    with pytest.raises(ValueError, match="a.jsonl:2"):
        run([path], tmp_path / "cache", Said())
    assert [found.name for found in (tmp_path / "cache").iterdir() if found.is_file()] == []


def test_a_file_that_changes_while_it_is_read_is_not_kept(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.txt", "some text"))

    class Changing(ByteTokenizer):
        def encode(self, text: str) -> np.ndarray:
            write(path, "other text")
            return super().encode(text)

    with pytest.raises(ValueError, match="changed while it was read"):
        run([str(path)], tmp_path / "cache", Said(), tokenizer=Changing())
    said = Said()
    write(path, "some text")
    assert run([str(path)], tmp_path / "cache", said) == "some text" and said.times == 1


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "some text")
    for folder in (Path(path) / "cache", Path("/proc/cache")):
        with pytest.raises(ValueError, match="--data-cache-path") as error:
            run([path], folder, Said())
        assert "\n" not in str(error.value)


def test_the_users_cache_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokenise([write(tmp_path / "a.txt", "text")], text_key=None, tokenizer=BYTES, cache_path=None, log=Said())
    assert list((tmp_path / "gpt2-model-parallel" / "data").glob("*.idx"))


def _race(path: str, folder: Path, start: Any, results: Any) -> None:
    class Slow(ByteTokenizer):
        def encode(self, text: str) -> np.ndarray:
            time.sleep(0.5)
            return super().encode(text)

    said = Said()
    start.wait()
    results.put((run([path], folder, said, tokenizer=Slow()), said.times))


def test_of_processes_that_race_one_tokenises_and_all_read(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(4), context.Queue()
    path = write(tmp_path / "a.txt", "some text")
    processes = [context.Process(target=_race, args=(path, tmp_path / "cache", start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=240) for _ in processes]
    for process in processes:
        process.join(240)
    assert [text for text, _ in found] == ["some text"] * 4
    assert sum(times for _, times in found) == 1


def _stuck(path: str, folder: Path, begun: Any) -> None:
    class Stuck(ByteTokenizer):
        def encode(self, text: str) -> np.ndarray:
            begun.set()
            time.sleep(60)
            return super().encode(text)

    run([path], folder, Said(), tokenizer=Stuck())


def test_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    begun, folder = context.Event(), tmp_path / "cache"
    path = write(tmp_path / "a.txt", "some text")
    process = context.Process(target=_stuck, args=(path, folder, begun))
    process.start()
    assert begun.wait(240)
    (lock,) = (folder / "locks").iterdir()
    with open(lock) as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(240)
    said = Said()
    assert run([path], folder, said) == "some text" and said.times == 1
    assert not list(folder.glob("*.tmp*"))


def test_bad_lines_that_were_let_through_once_are_refused_again_by_default(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n' * 50 + "{\n")
    given: Any = {"text_key": None, "tokenizer": BYTES, "cache_path": str(tmp_path / "cache"), "log": Said()}
    assert len(tokenise([path], max_bad_fraction=0.1, **given)[0]) == 50
    with pytest.raises(ValueError, match="1 of 51 lines are unusable, more than --max-bad-fraction 0.001"):
        tokenise([path], **given)
