"""Test the tokens of each split, the baselines in bits per byte, and the cache of tokenised text."""

from __future__ import annotations

import lzma
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_utils import (
    build_splits,
    build_tokenizer,
    files,
    token_cache,
    unigram_bits_per_byte,
    xz_bits_per_byte,
)
from data_utils.corpora.builtin import builtin_documents
from data_utils.splits import parse_split, split_borders
from data_utils.token_cache import tokenise
from data_utils.tokenizers.base import ByteTokenizer, Tokenizer
from tests.conftest import error_line
from tests.data_utils.data_files import BYTES, write, write_pair


def splits(folder: Path, *files: str, **more: Any) -> Any:
    given = {"train_data": files, "split": "90,10", "tokenizer": BYTES, "seq_length": 8, "log": lambda line: None}
    return build_splits(**{**given, "cache_path": str(folder / "cache"), **more})


def texts(made: Any) -> list[Any]:
    return [part and part.text() for part in (made.train, made.valid, made.test)]


def shares_of(split: str) -> list[Fraction]:
    parts = parse_split(split)
    return [part / sum(parts) for part in parts]


def test_parse_split() -> None:
    assert [int(part) for split in ("969,30,1", "100") for part in parse_split(split)] == [969, 30, 1, 100, 0, 0]
    assert shares_of("90,10") == shares_of("90,10,0") == shares_of("0.9, .1") == [Fraction(9, 10), Fraction(1, 10), 0]
    for bad in ("", "a,b", "1,2,3,4", "0,1,1", "1,-1", "nan,1", "1/0"):
        with pytest.raises(ValueError, match="--split"):
            parse_split(bad)


@pytest.mark.parametrize(
    "lengths, split, closed, borders",
    [
        # The splits end between documents.
        ([7, 9] * 125, "969,30,1", True, [0, 1936, 1991, 2000]),
        ([7, 9] * 125, "1,0,1000", True, [0, 7, 7, 2000]),
        ([1, 5, 1, 5, 1], "1", True, [0, 13, 13, 13]),
        # Each split differs from its share by at most 10 % of the share.
        ([81, 10, 9], "8,1,1", True, [0, 81, 91, 100]),
        # Each split differs from its share by at most 1 % of all tokens.
        ([810, 170, 20], "80,17,3", True, [0, 810, 980, 1000]),
        # The splits are cut by position.
        ([160_000, 160_000, 80_001], "969,30,1", True, [0, 387_600, 399_600, 400_001]),
        ([810, 160, 30], "80,19,1", False, [0, 800, 990, 1000]),
        # Splits that were cut by position would have fewer than two tokens.
        ([3, 3, 3], "969,30,1", True, [0, 3, 6, 9]),
    ],
)
def test_borders_follow_documents_or_shares(lengths: list[int], split: str, closed: bool, borders: list[int]) -> None:
    assert split_borders(np.cumsum([0, *lengths]), shares_of(split), closed) == borders


def test_separate_validation_files(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.txt", "x" * 1000), write(tmp_path / "b.txt", "held out")
    made = splits(tmp_path, a, valid_data=[b], split="80,100,20")
    assert texts(made) == [b"x" * 800, b"held out", b"x" * 200]
    assert texts(splits(tmp_path, a, valid_data=[b], test_data=[b])) == [b"x" * 1000, b"held out", b"held out"]
    with pytest.raises(FileNotFoundError, match="--test-data: no such file: nowhere"):
        splits(tmp_path / "unused", a, test_data=["nowhere"])
    assert not (tmp_path / "unused").exists()  # The error is raised before a text is tokenised.


def test_an_empty_split_is_an_error(tmp_path: Path) -> None:
    tiny = write(tmp_path / "a.txt", "0123456789")
    with pytest.raises(ValueError, match=r"--split 969,30,1: .*a\.txt has only 0 tokens for the valid split"):
        splits(tmp_path, tiny, split="969,30,1")
    assert texts(splits(tmp_path, tiny, split="969,30,1", need_valid=False, need_test=False))[1:] == [None, None]


def test_fingerprint_depends_on_the_training_data(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.txt", "x" * 1000), write(tmp_path / "b.txt", "y" * 1000)
    lines = write(tmp_path / "a.jsonl", '{"text": "a long one", "sentence": "another"}\n' * 9)

    def print_of(*files: str, **more: Any) -> str:
        return str(splits(tmp_path, *files, **more).fingerprint)

    assert print_of(a) == print_of(a, need_valid=False) == print_of(a, text_key="body")
    assert print_of(lines) == print_of(lines, text_key="text")  # "text" is also the default field.
    prints = {print_of(a), print_of(a, split="8,2"), print_of(b), print_of(lines), print_of(lines, text_key="sentence")}
    values = np.zeros(1 << 21, np.uint16)
    for index in (0, 0, -1):  # The fingerprint covers the first and the last token.
        prints.add(print_of(data_path=[write_pair(tmp_path / "pair", [values])]))
        values[index] += 1
    assert len(prints) == 5 + 3


def test_prepared_pairs_and_their_tokenizers(tmp_path: Path) -> None:
    """All ids of the file are in the vocabulary of bytes, so only the manifest shows that another tokenizer made the
    file."""
    made_by = {"kind": "GPT2BPETokenizer", "vocab_size": 50257, "fingerprint": BYTES.fingerprint}
    prefix = write_pair(tmp_path / "pair", [range(100)], made_by=made_by)
    assert splits(tmp_path, data_path=[f"{prefix}.bin"], split="1").train.text() == bytes(range(100))
    assert not (tmp_path / "cache").exists()
    for wrong, said in ((write_pair(tmp_path / "foreign", [[1, 300]]), "--tokenizer-type"), ("none", "--data-path")):
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            splits(tmp_path, data_path=[wrong])
    write_pair(prefix, [range(100)], made_by={**made_by, "fingerprint": "another"})
    with pytest.raises(ValueError, match="--data-path: .*pair was made by another tokenizer, GPT2BPETok.* 50,257"):
        splits(tmp_path, data_path=[prefix])


def test_unigram_entropy() -> None:
    train, valid = np.array([0] * 7 + [1] * 3), np.array([0, 1, 2], dtype=np.uint16)
    # With 1 added to each count, the frequencies are 8, 4 and 1 of 13.
    expected = -np.log2(np.array([8, 4, 1]) / 13).sum() / (1 + 2 + 0)
    assert unigram_bits_per_byte(train, valid, np.array([1, 2, 0]), 3) == pytest.approx(expected)


def test_xz_equals_the_command_and_uses_the_training_text() -> None:
    train, held = ("".join(part).encode() for part in (builtin_documents()[:60], builtin_documents()[60:70]))
    added = len(lzma.compress(train + held, preset=9)) - len(lzma.compress(train, preset=9))
    assert xz_bits_per_byte(train, held) == pytest.approx(added * 8 / len(held), rel=0.01)


OLD = time.time_ns() - 10**12


class Cache:
    """Text files, and a cache of their tokens.

    said: the lines of the log.
    times: the number of times that text was tokenised.
    """

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
        *[("a.txt", "first text", OLD, 1, 1)] * 2,
        ("a.txt", "first text", OLD + 5, 1, 2),  # a new mtime: the file is hashed again, but not tokenised
        ("a.txt", "other text", OLD + 6, 2, 3),
        ("copy.txt", "other text", OLD, 2, 4),  # a new path: the file is hashed, and found by its content
        ("b.txt", "text one", time.time_ns(), 3, 5),
    ):
        assert cache.read(cache.write(name, text, mtime)) == text
        assert (cache.times, len(hashed)) == (tokenised, hashes)
    young = cache.write("b.txt", "text two", os.stat(cache.texts / "b.txt").st_mtime_ns)
    assert cache.read(young) == "text two"  # Very new files are always hashed, whatever their size and mtime.


def test_key_depends_on_files_order_and_field(cache: Cache) -> None:
    a, b = cache.write("a.txt", "A"), cache.write("b.jsonl", '{"sentence": "B", "title": "T"}\n' * 2)
    c = cache.write("c.jsonl", '{"text": "C", "sentence": "c"}')
    for paths, key, text, times in (
        ([a], None, "A", 1),
        ([b], None, "BB", 2),
        ([b], "title", "TT", 3),
        ([b, a], None, "BBA", 4),
        ([a, b], None, "ABB", 5),
        ([b, c], None, "BBC", 6),  # The files have different default fields.
        ([b, c], "sentence", "BBc", 7),
        ([a], "title", "A", 7),  # --text-key does not apply to plain text.
        ([b], "sentence", "BB", 7),
    ):
        assert cache.read(*paths, text_key=key) == text and cache.times == times
    assert cache.read(a, tokenizer=build_tokenizer("builtin")) == "A" and cache.times == 8


def test_a_damaged_entry_is_made_again(cache: Cache) -> None:
    path = cache.write("a.txt", "some text")
    cache.read(path)
    for times, pattern in enumerate(("hashes/*.json", "*.idx", "*.sha256", "*.bin"), 1):
        (found,) = cache.folder.glob(pattern)
        found.write_bytes(found.read_bytes()[:-1])
        # If only the recorded hash is damaged, the text is hashed again, but not tokenised.
        assert cache.read(path) == "some text" and cache.times == times
    found.write_bytes(found.read_bytes()[::-1])  # The damage does not change the size of the file.
    assert cache.read(path) == "some text" and ".bin is not as it was written" in " ".join(cache.said)
    os.utime(found)  # After a new mtime, the file is hashed again, but the text is not tokenised.
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
    assert "--data-cache-path" in error_line(lambda: cache.read(path, cache_path=f"{path}/cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.texts))
    cache.read(path, cache_path=None)
    assert list((cache.texts / "gpt2-model-parallel" / "data").glob("*.idx"))


@pytest.mark.parametrize("home", ["~", "/nowhere"])
def test_the_cache_of_a_user_without_a_home(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"user-{os.getuid()}"
    for _ in range(2):
        assert files.user_cache_dir() == folder / ".cache" / "gpt2-model-parallel"
        assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(ValueError, match=f"{folder}, .* mode 0700.*: remove it, or set XDG_CACHE_HOME"):
        files.user_cache_dir()


def test_one_of_several_readers_tokenises(cache: Cache) -> None:
    """Threads stand for processes here: each thread opens the lock file itself."""

    class Waiting(ByteTokenizer):
        def encode_utf8(self, data: bytes) -> np.ndarray:
            while sum("waiting for it" in line for line in cache.said) < 3:
                time.sleep(0.01)
            return super().encode_utf8(data)

    path = cache.write("a.txt", "some text")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: cache.read(path, tokenizer=Waiting()), range(4)))
    assert found == ["some text"] * 4 and cache.times == 1
