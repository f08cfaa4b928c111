"""gigatoken, tiktoken, regex and HF tokenizers give the same ids, on real text, on random text and for every character;
regex alone, in pure Python, is the reference."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_utils import Tokenizer, build_tokenizer, default_tokenizer_kind
from data_utils.tokenizers.bpe_engines import GIGATOKEN_RELEASE, BytePairEncoding
from data_utils.tokenizers.bpe_engines import gigatoken as engine
from data_utils.tokenizers.gpt2 import PATTERN, BytePairTokenizer

gigatoken = pytest.importorskip("gigatoken")


def reference_of(tokenizer: BytePairTokenizer) -> BytePairEncoding:
    return BytePairEncoding(PATTERN, {token: rank for rank, token in enumerate(tokenizer._ranked)})


class Engines:
    """Ours, which uses gigatoken, and the three others by themselves."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import ByteLevelBPETokenizer

        tokenizer = build_tokenizer("GPT2BPETokenizer", cache_dir=str(folder))
        assert isinstance(tokenizer, BytePairTokenizer)
        assert tokenizer._faster is not None, f"the installed gigatoken is not {GIGATOKEN_RELEASE}x"
        self.ours = tokenizer
        self.reference = reference_of(tokenizer)
        self._hf = ByteLevelBPETokenizer(str(folder / "encoder.json"), str(folder / "vocab.bpe"))

    def check(self, texts: list[str]) -> None:
        for text in texts:
            ids = list(self.ours.encode(text))
            assert ids == self.ours._encoding.encode_ordinary(text)
            assert ids == self._hf.encode(text).ids
            assert ids == self.reference.encode_ordinary(text)
            assert self.ours.decode(ids) == text


@pytest.fixture(scope="module")
def engines(test_data: Path) -> Engines:
    return Engines(test_data / "gpt2")


# Every so many cases alone are a tenth of the time.
EVERY = pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.wide)])


@EVERY
def test_real_text(engines: Engines, test_data: Path, every: int) -> None:
    texts = [
        (test_data / name).read_bytes().decode()
        for name in ("wikitext-2/valid.txt", "wikitext-2/test.txt", "tinyshakespeare/input.txt")
    ]
    lambada = (test_data / "lambada" / "lambada_test.jsonl").read_text(encoding="utf-8").splitlines()
    engines.check([part for text in texts[:2] for part in text.split("\n \n")][::every])
    engines.check([json.loads(line)["text"] for line in lambada[::every]])
    engines.check([texts[2][: len(texts[2]) // every]])  # one of a megabyte, as a whole


# Anything, and what GPT-2's pattern cuts by: contractions, white space, numbers, letters of all planes.
PIECES = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from(
        [
            " ",
            "  ",
            "\n",
            "\t",
            "\u00a0",
            "\u3000",
            "\u2028",
            "'s",
            "'ll",
            "'",
            "’",
            "<|endoftext|>",
            "the",
            " 20",
            "é",
            "\u0301",
            "漢",
            "😀",
            "\U00018d89",
            "\U000325ee",
            "\ua7d2",
            "\u200d",
            "\x00",
        ]
    ),
)


@EVERY
def test_ten_thousand_random_strings(engines: Engines, every: int) -> None:
    @settings(max_examples=200 // every, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.lists(PIECES, max_size=12).map("".join), min_size=50, max_size=50))
    def check(texts: list[str]) -> None:
        engines.check(texts)

    check()


@EVERY
def test_every_character_is_of_the_same_class(every: int) -> None:
    """A vocabulary in which ids tell where text was cut: each byte is joined with what stands after or before it."""
    single = [bytes([value]) for value in range(256)]
    pairs = [bytes([last, after]) for last in range(0xC0) for after in b"a1!\t"] + [
        bytes([32, first]) for first in range(0xC2, 0xF5)
    ]
    ranked = list(dict.fromkeys(single + pairs))
    tokenizer = BytePairTokenizer("builtin", ranked, range(len(ranked)), [*ranked, b""], len(ranked), {})
    reference = reference_of(tokenizer)
    faster: Any = tokenizer._faster
    skipped = 0
    blocks = (*range(0, 0x34000, 32), *range(0x34000, 0x110000, 0x400))  # beyond, all are alike
    for first in blocks[::every]:
        characters = [chr(code) for code in range(first, first + 32) if not 0xD800 <= code < 0xE000]
        text = "".join(f"{one}a{one}1{one}!{one}\t {one}'s" for one in characters)
        assert list(tokenizer.encode(text)) == tokenizer._encoding.encode_ordinary(text), hex(first)
        if first < 0x34000 or not first % 0x1000:
            short = "".join(f"{one}a{one}1" for one in characters[:: 1 if first < 0x20000 else 4])
            assert reference.encode_ordinary(short) == tokenizer._encoding.encode_ordinary(short), hex(first)
        skipped += first < 0x20000 and faster(text.encode()) is None
    assert 5 < skipped * every < 0x10000 / 32  # of the two planes in which text stands mostly; emoji are not skipped
    assert faster("plain text, “quotes”, naïve, 漢字, 😀".encode()) is not None


def test_lone_surrogates_are_refused(engines: Engines) -> None:
    for text in ("\ud800", "a\udfffb"):
        with pytest.raises(ValueError, match="lone surrogate"):
            engines.ours.encode(text)


def test_what_it_remembers_is_forgotten_in_time(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    before = engines.ours._faster._encode
    monkeypatch.setattr(engines.ours._faster, "_left", 10)
    text = "Hello world, again"
    assert list(engines.ours.encode(text)) == engines.ours._encoding.encode_ordinary(text)
    assert engines.ours._faster._encode is not before


def test_endless_words_and_texts_of_special_tokens_in_pure_python(engines: Engines) -> None:
    for text in ("a" * 3000, "ab" * 1500 + "\n" * 3000, "<|endoftext|><|endoftext|>"):
        ids = engines.reference.encode_ordinary(text)
        assert ids == engines.ours._encoding.encode_ordinary(text) and engines.ours.eod not in ids


def test_without_tiktoken_regex_gives_the_same_ids(
    engines: Engines, test_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)
    assert default_tokenizer_kind() == "builtin"
    plain = build_tokenizer("GPT2BPETokenizer", cache_dir=str(test_data / "gpt2"))
    assert (plain.engine, engines.ours.engine) == ("regex", "tiktoken")
    assert plain.fingerprint == engines.ours.fingerprint
    text = "it's naïve, <|endoftext|>\n\n 漢字 123" + " " * 70_000 + "."
    ids = plain.encode(text)
    assert np.array_equal(ids, engines.ours.encode(text)) and plain.eod not in ids and plain.decode(ids) == text
    with pytest.raises(ValueError, match="lone surrogate"):
        plain.encode("\ud800")


def test_without_gigatoken_or_with_another_release_the_ids_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def builtin() -> Tokenizer:
        return build_tokenizer("builtin")

    ids = builtin().encode("one, two\n\nthree")
    monkeypatch.setattr("data_utils.tokenizers.bpe_engines.GIGATOKEN_RELEASE", "99.")
    plain: Any = builtin()
    assert plain._faster is None and np.array_equal(plain.encode("one, two\n\nthree"), ids)


def test_a_token_that_no_merges_make_is_left_to_tiktoken():
    assert engine([*(bytes([value]) for value in range(256)), b"abc"]) is None
