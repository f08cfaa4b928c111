"""Test the tokens of each split, and the baselines in bits per byte."""

from __future__ import annotations

import lzma
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_utils import MISSING, build_splits, unigram_bits_per_byte, xz_bits_per_byte
from data_utils.corpora.builtin import builtin_documents
from data_utils.indexed_dataset import write_manifest
from data_utils.splits import parse_split, split_borders
from tests.data_utils.data_files import BYTES, write, write_lines, write_pair


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
    "lengths", [[5] * 100, [700, 900] * 125, [1] * 3, [100, 2, 2], [2, 2, 1000], [1, 500, 1, 500, 1], [7] * 4]
)
@pytest.mark.parametrize("split", ["969,30,1", "1,1,1", "90,10", "90,0,10", "1", "1,0,1000"])
def test_borders_follow_documents_or_shares(lengths: list[int], split: str) -> None:
    starts, shares = np.cumsum([0, *lengths]), shares_of(split)
    borders = split_borders(starts, shares, closed=True)
    assert len(borders) == 4 and borders[0] == 0 and borders[-1] == sum(lengths)
    between = set(borders) <= set(starts.tolist())
    for share, start, stop in zip(shares, borders, borders[1:], strict=False):
        assert (stop > start) == (share > 0)
        assert between or abs(stop - start - share * sum(lengths)) <= 2
        assert len(lengths) < 100 or between and abs(stop - start - share * sum(lengths)) <= 2 * max(lengths)


@pytest.mark.parametrize(
    "lengths, split, closed, borders",
    [
        ([160_000, 160_000, 80_001], "969,30,1", True, [0, 387_600, 399_600, 400_001]),
        ([81, 10, 9], "8,1,1", True, [0, 81, 91, 100]),  # The border is within 10 % of the share.
        ([810, 170, 20], "80,17,3", True, [0, 810, 980, 1000]),  # The border is within 1 % of the share.
        ([810, 160, 30], "80,19,1", False, [0, 800, 990, 1000]),
        # The cut is by position, because a split would have fewer than two tokens.
        ([3, 3, 3], "969,30,1", True, [0, 3, 6, 9]),
    ],
)
def test_few_documents_are_split_by_position(lengths: list[int], split: str, closed: bool, borders: list[int]) -> None:
    assert split_borders(np.cumsum([0, *lengths]), shares_of(split), closed) == borders


def test_one_text_file_is_split_by_position(tmp_path: Path) -> None:
    text = "".join(chr(97 + number % 26) for number in range(1234))
    made = splits(tmp_path, write(tmp_path / "a.txt", text))
    assert texts(made) == [text[:1110].encode(), text[1110:].encode(), None] and len(made.train) == 1109 // 8
    # Every byte of the validation split, and the EOD, is the label of exactly one window.
    windows = made.valid.rows(np.arange(len(made.valid)))
    labels = windows[:, 1:].ravel()
    assert BYTES.decode(labels[labels != MISSING]) == text[1110:] and windows[0, 0] == ord(text[1109])
    assert (windows[1:, 0] == windows[:-1, -1]).all()


def test_fewer_documents_than_splits(tmp_path: Path) -> None:
    made = splits(tmp_path, write_lines(tmp_path / "a.jsonl", ["a" * 500, "b" * 499]), split="8,1,1")
    # There are 2 EODs; the last one is not counted.
    assert texts(made) == [b"a" * 500 + b"b" * 299, b"b" * 100, b"b" * 100]
    three = splits(tmp_path, write_lines(tmp_path / "b.jsonl", ["a" * 500, "b" * 61, "c" * 61]), split="8,1,1")
    assert texts(three) == [b"a" * 500, b"b" * 61, b"c" * 61]


def test_separate_validation_files(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.txt", "x" * 1000), write(tmp_path / "b.txt", "held out")
    made = splits(tmp_path, a, valid_data=[b], split="80,100,20")
    assert texts(made) == [b"x" * 800, b"held out", b"x" * 200]
    assert texts(splits(tmp_path, a, valid_data=[b], test_data=[b])) == [b"x" * 1000, b"held out", b"held out"]
    assert splits(tmp_path, a, valid_data=[b], split="100", need_valid=False).valid is None


def test_an_empty_split_is_an_error(tmp_path: Path) -> None:
    tiny = write(tmp_path / "a.txt", "0123456789")
    with pytest.raises(ValueError, match=r"--split 969,30,1: .*a\.txt has only 0 tokens for the valid split"):
        splits(tmp_path, tiny, split="969,30,1")
    assert texts(splits(tmp_path, tiny, split="969,30,1", need_valid=False, need_test=False))[1:] == [None, None]
    assert splits(tmp_path, tiny, split="90,10").valid.text() == b"9"  # The split is one byte and the EOD.


def test_missing_files_are_found_before_tokenising(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--test-data: no such file: nowhere"):
        splits(tmp_path, write(tmp_path / "a.txt", "text"), test_data=["nowhere"])
    assert not (tmp_path / "cache").exists()


def test_fingerprint_depends_on_the_training_data(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.txt", "x" * 1000), write(tmp_path / "b.txt", "y" * 1000)
    lines = write(tmp_path / "a.jsonl", '{"text": "a long one", "sentence": "another"}\n' * 9)

    def print_of(*files: str, **more: Any) -> str:
        return str(splits(tmp_path, *files, **more).fingerprint)

    assert print_of(a) == print_of(a, need_valid=False) == print_of(a, text_key="body")
    assert print_of(lines) == print_of(lines, text_key="text")  # The field is the default or --text-key.
    others = print_of(a), print_of(a, split="8,2"), print_of(b), print_of(lines), print_of(lines, text_key="sentence")
    assert len(set(others)) == 5
    values = np.zeros(1 << 21, np.uint16)
    ends = []
    for place in (0, 0, -1):  # Both ends of the tokens are hashed.
        ends.append(print_of(data_path=[write_pair(tmp_path / "pair", [values])]))
        values[place] += 1
    assert len(set(ends)) == 3


def test_a_prepared_pair(tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "pair", [[value] * 20 for value in range(10)])
    made = splits(tmp_path, data_path=[f"{pair}.bin"])
    assert made.train.text() == bytes(value for value in range(9) for _ in range(20))
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ValueError, match="--tokenizer-type"):
        splits(tmp_path, data_path=[write_pair(tmp_path / "foreign", [[1, 300]])])
    with pytest.raises(FileNotFoundError, match="--data-path"):
        splits(tmp_path, data_path=[str(tmp_path / "none")])


def test_a_prepared_pair_of_a_different_tokenizer(tmp_path: Path) -> None:
    """All ids are within this tokenizer's vocabulary, so only the manifest shows the difference."""
    prefix = write_pair(tmp_path / "pair", [list(range(100))])
    made_by = {"kind": "GPT2BPETokenizer", "vocab_size": 50257, "fingerprint": BYTES.fingerprint}
    write_manifest(prefix, {"inputs": [], "tokenizer": made_by})
    assert len(splits(tmp_path, data_path=[prefix]).train)
    write_manifest(prefix, {"inputs": [], "tokenizer": {**made_by, "fingerprint": "another"}})
    with pytest.raises(ValueError, match="--data-path .*pair was made by another tokenizer, GPT2BPETok.* 50,257"):
        splits(tmp_path, data_path=[prefix])
    write(Path(f"{prefix}.json"), "{}")
    with pytest.raises(ValueError, match="--data-path: .*pair.json is damaged"):
        splits(tmp_path, data_path=[prefix])


def test_unigram_entropy() -> None:
    train = np.array([0] * 7 + [1] * 3 + [2] * 1)  # With 1 added to each count, these are 8, 4, 2, 1 of 15.
    valid = np.array([0, 1, 2, 3], dtype=np.uint16)
    expected = -np.log2(np.array([8, 4, 2, 1]) / 15).sum() / (1 + 2 + 3 + 0)
    assert unigram_bits_per_byte(train, valid, np.array([1, 2, 3, 0]), 4) == pytest.approx(expected)


def test_xz_equals_the_command_and_uses_the_training_text() -> None:
    train, held = ("".join(part).encode() for part in (builtin_documents()[:60], builtin_documents()[60:70]))
    command = len(lzma.compress(train + held, preset=9)) - len(lzma.compress(train, preset=9))
    assert xz_bits_per_byte(train, held) == pytest.approx(command * 8 / len(held), rel=0.01)
    assert xz_bits_per_byte(train, train[:50_000]) < 0.1 < 1 < xz_bits_per_byte(train, held) < 4
    assert xz_bits_per_byte(train, random.Random(1).randbytes(20_000)) == pytest.approx(8, rel=0.03)
