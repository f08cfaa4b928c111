"""Every kind of tokenizer: round trips, saving and loading, files that are missing or damaged; and byte-level BPE, whose
ids are the same by gigatoken, tiktoken and HF tokenizers."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import data_utils
from data_utils import Tokenizer, build_tokenizer, load_tokenizer, train_sentencepiece
from data_utils.corpora import builtin_documents
from data_utils.tokenizers import find_gpt2_files, gpt2
from data_utils.tokenizers.base import (
    FACTS_FILE,
    NO_EOD,
    OLD_FACTS_FILE,
    ByteTokenizer,
    CharacterTokenizer,
    read_characters,
    split_text,
)
from data_utils.tokenizers.gpt2 import WHITE_RUN, BytePairTokenizer, _hf_tokenizers, byte_alphabet
from tests.conftest import ROOT
from tests.data_utils.made import write

EXAMPLES = [
    "",
    " ",
    "  a\n\n b\t\r\n",
    "it's 3,14 isn't\u00a0it",
    "\u2581a \u2581\u2581b",
    "<|endoftext|>",
    "</s><s><unk><0x41>",
    "\x00\x1c\x85",
    "é漢🙂\u0301",
    "a" * 5000,
    "\n \n" * 3000,
]
# By which GPT-2's pattern cuts: contractions, white space, numbers, letters of all planes; and names of special tokens.
PIECES = [*" \n\t\u00a0\u3000\u2028'’é\u0301漢😀\U00018d89\U000325ee\ua7d2\u200d\x00\u2581", "'s", "'ll", "the", " 20"]
PIECES += ["  ", "<|endoftext|>", "</s>", "<0xE2>"]


def random_texts(count: int) -> list[str]:
    """Runs of characters of all sorts, lone surrogates excepted."""
    draw = random.Random(count)

    def piece() -> str:
        code = draw.choice((128, 0x3000, 0x110000))
        character = chr(draw.randrange(code)).encode("utf-8", "ignore").decode()
        return draw.choice([draw.choice(PIECES), character]) * draw.choice((1, 1, 1, 2, 9))

    return ["".join(piece() for _ in range(draw.randrange(12))) for _ in range(count)]


@pytest.fixture(scope="module", params=["bytes", "builtin", "GPT2BPETokenizer", "SentencePieceTokenizer"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "GPT2BPETokenizer":
        return build_tokenizer(request.param, cache_dir=str(request.getfixturevalue("test_data") / "gpt2"))
    model = tmp_path_factory.mktemp("model") / "new folder" / "sp.model"
    if request.param == "SentencePieceTokenizer":
        train_sentencepiece(list(builtin_documents())[:60], model, 600)
    return build_tokenizer(request.param, model_file=str(model))


def test_any_text_comes_back_and_none_makes_an_eod(tokenizer: Tokenizer) -> None:
    for text in EXAMPLES + random_texts(300):
        ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eod not in ids
        assert int(tokenizer.byte_lengths[ids].sum()) == len(text.encode())


def test_what_the_ids_mean_is_whole(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.byte_lengths) == tokenizer.vocab_size
    assert 0 <= tokenizer.eod < tokenizer.vocab_size and tokenizer.has_eod and tokenizer.start == tokenizer.eod
    assert tokenizer.byte_lengths[tokenizer.eod] == 0 and tokenizer.decode([tokenizer.eod]) == ""
    for ids in ([tokenizer.vocab_size], [-1]):
        with pytest.raises(ValueError, match="do not fit a vocabulary"):
            tokenizer.decode(ids)
    for text in ("\ud800", "a\udfffb"):
        with pytest.raises(ValueError, match="lone surrogate"):
            tokenizer.encode(text)
    assert "\ufffd" in tokenizer.decode(np.asarray(tokenizer.encode("é"))[:1]) or len(tokenizer.encode("é")) == 1


def test_a_saved_tokenizer_is_the_same_and_a_changed_one_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    again, facts_file = load_tokenizer(tmp_path), tmp_path / FACTS_FILE
    for name in ("kind", "fingerprint", "vocab_size", "eod"):
        assert getattr(again, name) == getattr(tokenizer, name)
    assert list(again.encode("some text")) == list(tokenizer.encode("some text"))
    facts_file.rename(tmp_path / OLD_FACTS_FILE)  # as it was called once
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    facts = json.loads((tmp_path / OLD_FACTS_FILE).read_text())
    for content, said in (
        (json.dumps({**facts, "fingerprint": "0" * 64}), "not those that were sav"),
        ("{", "damaged"),
    ):
        write(facts_file, content)
        with pytest.raises(ValueError, match=said):
            load_tokenizer(tmp_path)


def test_parts_of_a_long_text_have_the_ids_of_the_whole(tokenizer: Tokenizer) -> None:
    text = "\n".join(builtin_documents()[:20])
    parts = list(split_text(text, 1000))
    assert "".join(parts) == text and max(map(len, parts)) <= 2000 and len(parts) > 20
    assert [id for part in parts for id in tokenizer.encode(part)] == list(tokenizer.encode(text))
    assert [len(part) for part in split_text(" " * 95, 10)] == [20] * 4 + [15]  # no place to cut
    assert list(split_text("")) == [""]


# --- GPT-2's files


def test_a_vocabulary_with_other_ids(tmp_path: Path) -> None:
    tokens = ["<|endoftext|>", "<pad>", "he", *reversed(byte_alphabet()), "hel", "\u0120h"]
    write(tmp_path / "vocab.json", json.dumps({token: number for number, token in enumerate(tokens)}))
    write(tmp_path / "merges.txt", "#version: 0.2\nh e\nhe l\n\u0120 h\n")
    made = build_tokenizer("GPT2BPETokenizer", cache_dir=str(tmp_path))
    assert made.eod == 0
    assert [tokens[id] for id in made.encode("hello h")] == ["hel", "l", "o", "\u0120h"]
    assert made.decode(made.encode("hello h\u00e9")) == "hello h\u00e9"


@pytest.mark.parametrize(
    ("vocabulary", "merges", "named"),
    [
        ("[]", "h e", "--vocab-file"),
        ("{", "h e", "--vocab-file"),
        ('{"a": 0}', "", "endoftext"),
        ('{"<|endoftext|>": 1}', "", "gap"),
        ('{"<|endoftext|>": 0}', "h e l", "two tokens"),
        ('{"<|endoftext|>": 0}', "h e", "lacks the token"),
    ],
)
def test_bad_vocabularies(tmp_path: Path, vocabulary: str, merges: str, named: str) -> None:
    files = {"vocab_file": write(tmp_path / "v", vocabulary), "merge_file": write(tmp_path / "m", merges)}
    with pytest.raises(ValueError, match=named):
        build_tokenizer("GPT2BPETokenizer", **files)


def test_where_the_gpt2_vocabulary_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="scripts/download_gpt2_vocab.sh"):
        build_tokenizer("GPT2BPETokenizer", cache_dir=str(tmp_path))
    user = tmp_path / "cache" / "gpt2-model-parallel"
    user.mkdir(parents=True)
    for folder, pair in (
        (user, ("encoder.json", "vocab.bpe")),
        (tmp_path, ("vocab.json", "merges.txt")),
        (tmp_path, ("gpt2-vocab.json", "gpt2-merges.txt")),
        (tmp_path, ("encoder.json", "vocab.bpe")),
    ):
        for name in pair:
            (folder / name).touch()
        assert find_gpt2_files(None, None, str(tmp_path)) == (folder / pair[0], folder / pair[1])
    with pytest.raises(FileNotFoundError, match="--merge-file"):
        find_gpt2_files(str(tmp_path / "vocab.json"), str(tmp_path / "missing"), None)
    with pytest.raises(ValueError, match="--vocab-file needs --merge-file"):
        find_gpt2_files(str(tmp_path / "vocab.json"), None, None)


@pytest.mark.skipif(not shutil.which("curl"), reason="file: addresses need curl")
def test_the_vocabulary_is_downloaded_checked_and_kept(
    test_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(source: Path, cache: Path) -> subprocess.CompletedProcess[str]:
        given = {"XDG_CACHE_HOME": str(cache), "GPT2_VOCAB_URL": source.resolve().as_uri(), "PATH": "/usr/bin:/bin"}
        words = ["bash", str(ROOT / "scripts" / "download_gpt2_vocab.sh")]
        return subprocess.run(words, capture_output=True, text=True, timeout=240, env=given)

    (tmp_path / "wrong").mkdir()
    write(tmp_path / "wrong" / "encoder.json", "{}")
    for source, said in (("nowhere", "cannot be downloaded"), ("wrong", "sha256 differs")):
        done = download(tmp_path / source, tmp_path / "cache")
        assert done.returncode == 2 and said in done.stderr
        assert list((tmp_path / "cache" / "gpt2-model-parallel").iterdir()) == []
    assert download(test_data / "gpt2", tmp_path).returncode == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build_tokenizer("GPT2BPETokenizer").vocab_size == 50257
    again = download(tmp_path / "nowhere", tmp_path)  # the files are right: nothing is fetched
    assert again.returncode == 0 and "is there" in again.stdout


# --- SentencePiece


def test_sentencepiece_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs --tokenizer-model"):
        build_tokenizer("SentencePieceTokenizer")
    with pytest.raises(FileNotFoundError, match="--tokenizer-model"):
        build_tokenizer("SentencePieceTokenizer", model_file=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        build_tokenizer("SentencePieceTokenizer", model_file=write(tmp_path / "bad", "no model"))
    for texts, size, said in ((["some text"], 20, "--tokenizer-vocab-size 20 "), ([], 600, "no text")):
        with pytest.raises(ValueError, match=said):
            train_sentencepiece(texts, tmp_path / "new", size)
    assert not (tmp_path / "new").exists()


def test_a_missing_sentencepiece_model_is_trained_once(tmp_path: Path) -> None:
    model, said = str(tmp_path / "sp.model"), list[str]()
    text = write(tmp_path / "a.txt", " ".join(builtin_documents()[:40]))
    given: dict[str, Any] = {"train_data": [text], "text_key": None, "vocab_size": 500, "log": said.append}
    for _ in range(2):
        data_utils.ensure_sentencepiece_model(model, **given)
    assert len(said) == 1 and "500 pieces" in said[0]
    assert build_tokenizer("SentencePieceTokenizer", model_file=model).vocab_size == 500
    with pytest.raises(ValueError, match="--tokenizer-model .* cannot be written"):
        data_utils.ensure_sentencepiece_model("/proc/sp.model", **given)


# --- characters


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_nanogpt_meta(tmp_path: Path, protocol: int) -> None:
    """As nanoGPT's data/shakespeare_char/prepare.py makes it."""
    text = "O, that this too too solid flesh would melt\nÄ 中 🙂"
    characters = sorted(set(text))
    ids = {character: number for number, character in enumerate(characters)}
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": ids}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta, protocol))
    tokenizer = build_tokenizer("characters", vocab_file=f"{tmp_path}/meta.pkl")
    assert list(tokenizer.encode(text)) == [ids[character] for character in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.vocab_size == len(characters)
    assert (tokenizer.eod, tokenizer.has_eod, tokenizer.start) == (NO_EOD, False, ids["\n"])
    tokenizer.save(tmp_path / "kept")
    assert load_tokenizer(tmp_path / "kept").fingerprint == tokenizer.fingerprint != ByteTokenizer().fingerprint


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


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        (Caller(), "nothing was executed"),
        ({"itos": Caller()}, "nothing was executed"),
        ([1], "no itos"),
        ("text", "no itos"),
        ({"stoi": {}}, "no itos"),
        ({"itos": {0: "a", 2: "b"}}, "0, 1, 2"),
        ({"itos": {0: "ab"}}, "one character for each id"),
        ({"itos": {0: "a", 1: "a"}}, "two ids"),
        ({"itos": {}}, "one character"),
        ({"itos": {0: 7}}, "one character"),
    ],
    ids=range(10),
)
def test_what_is_no_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str], meta: object, said: str) -> None:
    with pytest.raises(ValueError, match=rf"meta.pkl: .*{said}"):
        read_characters(write(tmp_path / "meta.pkl", pickle.dumps(meta)))
    assert capsys.readouterr().out == ""


def test_characters_without_their_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one character for each id"):
        read_characters(write(tmp_path / "a.json", '{"a": 1}'))
    with pytest.raises(FileNotFoundError, match="--vocab-file: no such file"):
        read_characters(tmp_path / "nothing.pkl")
    with pytest.raises(ValueError, match="--tokenizer-type characters needs --vocab-file"):
        build_tokenizer("characters")


# --- libraries


def test_the_shipped_bpe_is_small_and_fits_its_corpus() -> None:
    tokenizer = build_tokenizer("builtin")
    assert tokenizer.vocab_size == 4096 and tokenizer.eod == 4095
    text = "".join(builtin_documents()[:50])
    assert len(text.encode()) / len(tokenizer.encode(text)) > 3.0


def test_absent_libraries_are_named_and_bytes_need_none(tmp_path: Path) -> None:
    code = """
import sys
for name in ("tiktoken", "sentencepiece", "tokenizers", "tqdm"):
    sys.modules[name] = None
import data_utils
assert data_utils.default_tokenizer_kind() == "bytes"
for kind in ("builtin", "SentencePieceTokenizer"):
    try:
        data_utils.build_tokenizer(kind, model_file=sys.argv[1])
        raise SystemExit("no error")
    except ValueError as error:
        assert "pip install" in str(error), error
splits = data_utils.build_splits(train_data=[sys.argv[1]], split="90,10", tokenizer=data_utils.build_tokenizer("bytes"),
                                 seq_length=8, cache_path=sys.argv[2], log=print)
assert "torch" not in sys.modules and len(splits.train)
"""
    words = [sys.executable, "-c", code, write(tmp_path / "a.txt", "some text " * 10), str(tmp_path / "cache")]
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=given, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


# --- gigatoken, tiktoken and HF tokenizers: on real text, on random text and for every character

# Only every so many cases are a tenth of the time.
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
    pytest.importorskip("gigatoken")
    return Engines(test_data / "gpt2")


@EVERY
def test_real_text(engines: Engines, test_data: Path, every: int) -> None:
    valid, test, shakespeare = (
        (test_data / name).read_bytes().decode()
        for name in ("wikitext-2/valid.txt", "wikitext-2/test.txt", "tinyshakespeare/input.txt")
    )
    lambada = (test_data / "lambada" / "lambada_test.jsonl").read_text(encoding="utf-8").splitlines()
    engines.check([part for text in (valid, test) for part in text.split("\n \n")][::every])
    engines.check([json.loads(line)["text"] for line in lambada[::every]])
    engines.check([shakespeare[: len(shakespeare) // every]])  # one of a megabyte, as a whole
    assert list(engines.ours.encode("Hello world")) == [15496, 995] and engines.ours.eod == 50256


@EVERY
def test_ten_thousand_random_strings(engines: Engines, every: int) -> None:
    engines.check(random_texts(10_000 // every))


@EVERY
def test_every_character_is_of_the_same_class(every: int) -> None:
    """A vocabulary in which ids tell where text was cut: each byte is joined with what stands after or before it."""
    pytest.importorskip("gigatoken")
    single = [bytes([value]) for value in range(256)]
    pairs = [bytes([last, after]) for last in range(0xC0) for after in b"a1!\t"]
    ranked = list(dict.fromkeys([*single, *pairs, *(bytes([32, first]) for first in range(0xC2, 0xF5))]))
    tokenizer: Any = BytePairTokenizer("builtin", ranked, range(len(ranked)), len(ranked) + 1, len(ranked), {})
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


def test_without_a_library_or_with_another_release_the_ids_are_the_same(
    engines: Engines, test_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "it's naïve, <|endoftext|>\n\n 漢字 123" + " " * 70_000 + "."
    with monkeypatch.context() as patch:
        patch.setattr(gpt2, "GIGATOKEN_RELEASE", "99.")
        other: Any = build_tokenizer("GPT2BPETokenizer", cache_dir=str(test_data / "gpt2"))
        assert other._faster is None and list(other.encode(text)) == list(engines.ours.encode(text))
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)
    assert data_utils.default_tokenizer_kind() == "builtin"
    plain = build_tokenizer("GPT2BPETokenizer", cache_dir=str(test_data / "gpt2"))
    assert (plain.engine, engines.ours.engine) == ("tokenizers", "tiktoken")
    assert plain.fingerprint == engines.ours.fingerprint
    ids = plain.encode(text)
    assert np.array_equal(ids, engines.ours.encode(text)) and plain.eod not in ids and plain.decode(ids) == text


def test_a_token_that_no_merges_make_is_left_to_tiktoken() -> None:
    pytest.importorskip("gigatoken")
    ranked = [*(bytes([value]) for value in range(256)), b"abc"]
    assert gpt2.gigatoken(ranked) is None
    texts = ("abc", "abcd abc", "aabc")  # only a word that is the token has its id
    tokenizer: Any = BytePairTokenizer("builtin", ranked, range(257), 258, 257, {})
    assert [list(tokenizer.encode(text)) for text in texts] == [_hf_tokenizers(ranked)(text) for text in texts]
