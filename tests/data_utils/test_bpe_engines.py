"""gigatoken, tiktoken and HF tokenizers give the same ids: on real text, on random text and for every character."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_utils import build_tokenizer, default_tokenizer_kind
from data_utils.tokenizers import gpt2
from data_utils.tokenizers.gpt2 import WHITE_RUN, BytePairTokenizer, _hf_tokenizers

pytest.importorskip("gigatoken")
# Every so many cases alone are a tenth of the time.
EVERY = pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.wide)])


class Engines:
    """Ours, which uses gigatoken, and the others by themselves."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import ByteLevelBPETokenizer

        ours: Any = build_tokenizer("GPT2BPETokenizer", cache_dir=str(folder))
        self.ours = ours
        assert self.ours._faster is not None, f"the installed gigatoken is not {gpt2.GIGATOKEN_RELEASE}x"
        self.tiktoken = self.ours._ranks_of
        self.fallback = _hf_tokenizers(self.ours._ranked)  # from ranks; the reference is from the merges' file
        self.reference = ByteLevelBPETokenizer(str(folder / "encoder.json"), str(folder / "vocab.bpe"))

    def check(self, texts: list[str]) -> None:
        for text in texts:
            ids = list(self.ours.encode(text))
            assert ids == self.tiktoken(text) == self.reference.encode(text).ids == self.fallback(text)
            assert self.ours.decode(ids) == text


@pytest.fixture(scope="module")
def engines(test_data: Path) -> Engines:
    return Engines(test_data / "gpt2")


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
    assert list(engines.ours.encode("Hello world")) == [15496, 995] and engines.ours.eod == 50256


# What GPT-2's pattern cuts by: contractions, white space, numbers, letters of all planes.
PIECES = [*" \n\t\u00a0\u3000\u2028'’é\u0301漢😀\U00018d89\U000325ee\ua7d2\u200d\x00", "'s", "'ll", "the", " 20", "  "]


@EVERY
def test_ten_thousand_random_strings(engines: Engines, every: int) -> None:
    draw = random.Random(1)

    def piece() -> str:
        code = draw.choice((128, 0x3000, 0x110000))
        return draw.choice(
            [draw.choice(PIECES), "<|endoftext|>", chr(draw.randrange(code)).encode("utf-8", "ignore").decode()]
        )

    engines.check(["".join(piece() for _ in range(draw.randrange(12))) for _ in range(10_000 // every)])


@EVERY
def test_every_character_is_of_the_same_class(every: int) -> None:
    """A vocabulary in which ids tell where text was cut: each byte is joined with what stands after or before it."""
    single = [bytes([value]) for value in range(256)]
    pairs = [bytes([last, after]) for last in range(0xC0) for after in b"a1!\t"]
    ranked = list(dict.fromkeys([*single, *pairs, *(bytes([32, first]) for first in range(0xC2, 0xF5))]))
    tokenizer: Any = BytePairTokenizer("builtin", ranked, range(len(ranked)), [*ranked, b""], len(ranked), {})
    fallback, skipped = _hf_tokenizers(ranked), 0
    blocks = (*range(0, 0x34000, 32), *range(0x34000, 0x110000, 0x400))  # beyond, all are alike
    for first in blocks[::every]:
        characters = [chr(code) for code in range(first, first + 32) if not 0xD800 <= code < 0xE000]
        text = "".join(f"{one}a{one}1{one}!{one}\t {one}'s" for one in characters)
        assert list(tokenizer.encode(text)) == tokenizer._ranks_of(text) == fallback(text), hex(first)
        skipped += first < 0x20000 and tokenizer._faster(text.encode()) is None
    assert 5 < skipped * every < 0x10000 / 32  # of the two planes in which text stands mostly; emoji are not skipped
    assert tokenizer._faster("plain text, “quotes”, naïve, 漢字, 😀".encode()) is not None


def test_endless_words_and_white_space_neither_fail_nor_change_ids(engines: Engines) -> None:
    engines.check(["a" * 3000, "ab" * 1500 + "\n" * 3000])
    for character in (" ", "\n", " \n"):
        text = "x" + character * 1_000_000 + "y"
        assert engines.ours.decode(engines.ours.encode(text)) == text
    for character in " \n":
        for length in (2 * WHITE_RUN - 1, 2 * WHITE_RUN, 2 * WHITE_RUN + 1, 3 * WHITE_RUN, 3 * WHITE_RUN + 1):
            text = "x" + character * length + "y z"
            assert list(engines.ours.encode(text)) == engines.tiktoken(text)


def test_words_that_gigatoken_remembers_are_forgotten_in_time(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engines.ours._faster._encode
    monkeypatch.setattr(engines.ours._faster, "_left", 10)
    engines.check(["Hello world, again"])
    assert engines.ours._faster._encode is not before


def test_without_tiktoken_hf_tokenizers_gives_the_same_ids(
    engines: Engines, test_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)
    assert default_tokenizer_kind() == "builtin"
    plain = build_tokenizer("GPT2BPETokenizer", cache_dir=str(test_data / "gpt2"))
    assert (plain.engine, engines.ours.engine) == ("tokenizers", "tiktoken")
    assert plain.fingerprint == engines.ours.fingerprint
    text = "it's naïve, <|endoftext|>\n\n 漢字 123" + " " * 70_000 + "."
    ids = plain.encode(text)
    assert np.array_equal(ids, engines.ours.encode(text)) and plain.eod not in ids and plain.decode(ids) == text


def test_without_gigatoken_or_with_another_release_the_ids_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = build_tokenizer("builtin").encode("one, two\n\nthree")
    monkeypatch.setattr(gpt2, "GIGATOKEN_RELEASE", "99.")
    plain: Any = build_tokenizer("builtin")
    assert plain._faster is None and np.array_equal(plain.encode("one, two\n\nthree"), ids)


def test_a_token_that_no_merges_make_is_left_to_tiktoken() -> None:
    ranked = [*(bytes([value]) for value in range(256)), b"abc"]
    assert gpt2.gigatoken(ranked) is None
    texts = ("abc", "abcd abc", "aabc")  # only a word that is the token has its id
    tokenizer: Any = BytePairTokenizer("builtin", ranked, range(257), [*ranked, b""], 257, {})
    assert [list(tokenizer.encode(text)) for text in texts] == [_hf_tokenizers(ranked)(text) for text in texts]
