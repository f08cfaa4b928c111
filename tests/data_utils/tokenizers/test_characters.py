"""Characters as tokens: nanoGPT's meta.pkl, and what is none."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path

import numpy as np
import pytest

from data_utils import build_tokenizer, load_tokenizer
from data_utils.files.plain_pickle import load_plain_pickle
from data_utils.tokenizers.base import NO_EOD, ByteTokenizer
from data_utils.tokenizers.characters import CharacterTokenizer, read_characters

TEXT = "O, that this too too solid flesh would melt\nÄ 中 🙂"


def meta_of(text: str) -> dict[str, object]:
    """As nanoGPT's data/shakespeare_char/prepare.py makes it."""
    characters = sorted(set(text))
    return {
        "vocab_size": len(characters),
        "itos": dict(enumerate(characters)),
        "stoi": {character: number for number, character in enumerate(characters)},
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_nanogpt_meta(tmp_path: Path, protocol: int) -> None:
    meta = meta_of(TEXT)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta, protocol))
    tokenizer = build_tokenizer("characters", vocab_file=f"{tmp_path}/meta.pkl")
    stoi = meta["stoi"]
    assert isinstance(stoi, dict)
    assert tokenizer.encode(TEXT).tolist() == [stoi[c] for c in TEXT]  # type: ignore[union-attr]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT and tokenizer.vocab_size == meta["vocab_size"]
    assert (tokenizer.eod, tokenizer.has_eod, tokenizer.start) == (NO_EOD, False, stoi["\n"])
    tokenizer.save(tmp_path / "kept")
    assert load_tokenizer(tmp_path / "kept").fingerprint == tokenizer.fingerprint
    assert ByteTokenizer().has_eod and ByteTokenizer().start == 256


def test_a_character_that_it_lacks() -> None:
    tokenizer = CharacterTokenizer("abc")
    assert tokenizer.start == 0 and tokenizer.encode("").tolist() == []
    for text, said in (("abé", r"'é' \(U\+00E9\)"), ("a\0", r"'\\x00' \(U\+0000\)"), ("ab🙂c", r"'🙂' \(U\+1F642\)")):
        with pytest.raises(ValueError, match=f"the text holds {said}, which is none of the 3 characters"):
            tokenizer.encode(text)
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("a\ud800")


class Caller:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("called",)


def test_what_is_no_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "meta.pkl"
    for meta, said in (
        (Caller(), "more than strings and numbers"),
        ({"itos": Caller()}, "more than strings and numb"),
        ([1], "more than strings"),
        ({"stoi": {}}, "no itos"),
        ({"itos": {0: "a", 2: "b"}}, "0, 1, 2"),
        ({"itos": {0: "ab"}}, "one character for each id"),
        ({"itos": {0: "a", 1: "a"}}, "two ids"),
        ({"itos": {}}, "one character"),
        ({"itos": {0: 7}}, "one character"),
        ("text", "no itos"),
    ):
        path.write_bytes(pickle.dumps(meta))
        with pytest.raises(ValueError, match=rf"meta.pkl: .*{said}"):
            read_characters(path)
    path.with_suffix(".json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ValueError, match="one character for each id"):
        read_characters(path.with_suffix(".json"))
    with pytest.raises(FileNotFoundError, match="--vocab-file: no such file"):
        read_characters(tmp_path / "nothing.pkl")
    with pytest.raises(ValueError, match="--tokenizer-type characters needs --vocab-file"):
        build_tokenizer("characters")
    assert capsys.readouterr().out == ""


def test_damaged_pickles_are_refused_at_once() -> None:
    """Cut, changed, and with instructions that claim gigabytes."""
    whole, chance = pickle.dumps(meta_of(TEXT), 4), np.random.default_rng(1)
    claims = [
        b"\x80\x04\x96" + b"\xff\xff\xff\x7f" + bytes(4) + b".",
        b"\x80\x04}" + b"r\xff\xff\xff\x7f.",
        b"\x80\x04\x8d" + b"\xff" * 8 + b".",
        b"\x80\x04" + b"(" * 1000 + b".",
        b"\x80\x04" + b"}" * 99_999 + b".",
    ]
    cut = [whole[:size] for size in range(0, len(whole), 7)]
    changed = []
    for _ in range(300):
        copy = bytearray(whole)
        copy[chance.integers(len(copy))] = chance.integers(256)
        changed.append(bytes(copy))
    began = time.process_time()
    for data in claims + cut + changed:
        try:
            load_plain_pickle(data)
        except ValueError as error:
            assert len(str(error)) < 120 and "\n" not in str(error)
    assert time.process_time() - began < 10
    with pytest.raises(ValueError, match="more than the"):
        load_plain_pickle(bytes(5 << 20))
