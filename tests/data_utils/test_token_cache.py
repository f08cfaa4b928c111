"""Test that one process tokenises a text once, and again only if the text, its field or the tokenizer changes."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_utils import build_tokenizer, files, token_cache
from data_utils.token_cache import tokenise
from data_utils.tokenizers.base import ByteTokenizer, Tokenizer

BYTES = build_tokenizer("bytes")
OLD = time.time_ns() - 10**12


class Cache:
    """A folder of texts and its cache. said: the log. times: number of times that text was tokenised."""

    def __init__(self, folder: Path) -> None:
        self.texts, self.folder = folder, folder / "cache"
        self.said: list[str] = []

    def write(self, name: str, text: str, mtime_ns: int = OLD) -> str:
        path = self.texts / name
        path.write_text(text)
        os.utime(path, ns=(mtime_ns, mtime_ns))
        return str(path)

    def read(self, *paths: str, tokenizer: Tokenizer = BYTES, **more: Any) -> str:
        given: dict[str, Any] = {"text_key": None, "cache_path": str(self.folder), "log": self.said.append, **more}
        dataset, _ = tokenise(paths, tokenizer=tokenizer, **given)
        found = [dataset[index] for index in range(len(dataset))]
        assert all(document[-1] == tokenizer.eod for document in found)
        return "".join(map(tokenizer.decode, found))

    @property
    def times(self) -> int:
        return sum(line.startswith("tokenised ") for line in self.said)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


def test_text_is_tokenised_once_and_hashed_if_the_file_is_new(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str | Path] = []

    def counted(path: str | Path) -> str:
        hashed.extend([path] * str(path).endswith(".txt"))
        return files.hash_file(path)

    monkeypatch.setattr(token_cache, "hash_file", counted)
    for name, text, mtime, tokenised, hashes in (
        ("a.txt", "first text", OLD, 1, 1),
        ("a.txt", "first text", OLD, 1, 1),
        ("a.txt", "first text", OLD + 5, 1, 2),  # The mtime is new, so the file is hashed again, but not tokenised.
        ("a.txt", "other text", OLD + 6, 2, 3),
        ("copy.txt", "other text", OLD, 2, 4),  # The path is new, so the file is hashed, but found by its content.
        ("b.txt", "text one", time.time_ns(), 3, 5),
    ):
        assert cache.read(cache.write(name, text, mtime)) == text
        assert (cache.times, len(hashed)) == (tokenised, hashes)
    young = cache.write("b.txt", "text two", os.stat(cache.texts / "b.txt").st_mtime_ns)
    assert cache.read(young) == "text two"  # Size and mtime are the same, but a very new file is always hashed.


def test_key_depends_on_files_order_and_field(cache: Cache) -> None:
    a, b = cache.write("a.txt", "A"), cache.write("b.jsonl", '{"sentence": "B", "title": "T"}\n' * 2)
    c = cache.write("c.jsonl", '{"text": "C", "sentence": "c"}')
    for number, (paths, key, text) in enumerate(
        (
            ((a,), None, "A"),
            ((b,), None, "BB"),
            ((b,), "title", "TT"),
            ((a, b), None, "ABB"),
            ((b, a), None, "BBA"),
            ((b, c), None, "BBC"),  # Each file has its default field.
            ((b, c), "sentence", "BBc"),
        ),
        1,
    ):
        assert cache.read(*paths, text_key=key) == text and cache.times == number
    # Files with different text fields count as different.
    assert cache.read(a, text_key="title") == "A" and cache.read(b, text_key="sentence") == "BB"
    assert cache.times == 7
    assert cache.read(a, tokenizer=build_tokenizer("builtin")) == "A" and cache.times == 8


def test_a_damaged_entry_is_made_again(cache: Cache) -> None:
    path = cache.write("a.txt", "some text")
    cache.read(path)
    for pattern in ("*.bin", "*.idx", "*.sha256", "hashes/*.json"):
        (found,) = cache.folder.glob(pattern)
        found.write_bytes(found.read_bytes()[:-1])
        assert cache.read(path) == "some text"
    assert cache.times == 4  # After a damaged record the file is hashed, but not tokenised.
    (found,) = cache.folder.glob("*.bin")
    found.write_bytes(found.read_bytes()[::-1])  # The new content has the same size.
    assert cache.read(path) == "some text" and ".bin is not as it was written" in " ".join(cache.said)
    os.utime(found)  # The mtime is new, so the file is only hashed again.
    assert cache.read(path) == "some text" and cache.times == 5


def test_a_failure_leaves_no_files_and_a_stricter_run_refuses(cache: Cache) -> None:
    path = cache.write("a.jsonl", '{"text": "a"}\n' * 50 + "{\n")
    refused = "a.jsonl:51: .*1 of 51 lines are unusable, more than --max-bad-fraction 0.001"
    with pytest.raises(ValueError, match=refused):
        cache.read(path)
    assert not [found for found in cache.folder.iterdir() if found.is_file()]
    assert cache.read(path, max_bad_fraction=0.1) == "a" * 50
    with pytest.raises(ValueError, match=refused):
        cache.read(path)


def test_a_file_that_changes_while_it_is_read_is_not_kept(cache: Cache) -> None:
    path = cache.write("a.txt", "some text")

    class Changing(ByteTokenizer):
        def encode_utf8(self, data: bytes) -> np.ndarray:
            cache.write("a.txt", "other text")
            return super().encode_utf8(data)

    with pytest.raises(ValueError, match="changed while it was read"):
        cache.read(path, tokenizer=Changing())
    cache.said.clear()
    assert cache.read(cache.write("a.txt", "some text")) == "some text" and cache.times == 1


def test_the_cache_folder(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache.write("a.txt", "some text")
    for folder in (f"{path}/cache", "/proc/cache"):
        with pytest.raises(ValueError, match="--data-cache-path") as error:
            cache.read(path, cache_path=folder)
        assert "\n" not in str(error.value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.texts))
    cache.read(path, cache_path=None)
    assert list((cache.texts / "gpt2-model-parallel" / "data").glob("*.idx"))


@pytest.mark.parametrize("home", ["~", "/nowhere", "/"])
def test_the_cache_of_a_user_without_a_home(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # The root folder is not this user's.
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + (home == "/"))
    folder = tmp_path / f"user-{os.getuid()}"
    if home == "/":
        with pytest.raises(ValueError, match=f"must be a folder of user {os.getuid()} with mode 0700"):
            files.user_cache_dir()  # This user is not really the owner.
        return
    for _ in range(2):
        assert files.user_cache_dir() == folder / ".cache" / "gpt2-model-parallel"
        assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(ValueError, match=f"{folder}, .* mode 0700.*: remove it, or set XDG_CACHE_HOME"):
        files.user_cache_dir()
    folder.rename(tmp_path / "other")
    (tmp_path / "other").chmod(0o700)
    folder.symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match="must be a folder"):
        files.user_cache_dir()


class Slow(ByteTokenizer):
    """A tokenizer that announces its start, and takes `seconds` to encode."""

    def __init__(self, begun: Any, seconds: float) -> None:
        super().__init__()
        self.begun, self.seconds = begun, seconds

    def encode_utf8(self, data: bytes) -> np.ndarray:
        self.begun.set()
        time.sleep(self.seconds)
        return super().encode_utf8(data)


def _read_slowly(cache: Cache, path: str, start: Any, begun: Any, seconds: float, results: Any) -> None:
    start.wait()
    results.put((cache.read(path, tokenizer=Slow(begun, seconds)), cache.times))


def test_one_of_several_processes_tokenises(cache: Cache) -> None:
    context = multiprocessing.get_context("fork")
    path, results = cache.write("a.txt", "some text"), context.Queue()
    given = cache, path, context.Barrier(4), context.Event(), 0.5, results
    processes = [context.Process(target=_read_slowly, args=given) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=240) for _ in processes]
    for process in processes:
        process.join(240)
    assert [text for text, _ in found] == ["some text"] * 4
    assert sum(times for _, times in found) == 1
