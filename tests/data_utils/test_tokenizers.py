"""Test tokenizers of every kind: round trips, saving and loading, missing and damaged files. gigatoken and tiktoken
return the same ids."""

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
from data_utils.corpora.builtin import builtin_documents
from data_utils.tokenizers import GPT2_FILES, find_gpt2_files, gpt2
from data_utils.tokenizers.base import METADATA_FILE, NO_EOD, OLD_METADATA_FILE, CharacterTokenizer, split_text
from data_utils.tokenizers.gpt2 import MAX_WHITESPACE_RUN, BytePairTokenizer
from tests.conftest import ROOT
from tests.data_utils.data_files import write

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
# Pieces of text for each class of GPT-2's pattern (contractions, whitespace, numbers, letters of all planes), and names
# of special tokens.
PIECES = [*" \n\t\u00a0\u3000\u2028'’é\u0301漢😀\U00018d89\U000325ee\ua7d2\u200d\x00\u2581", "'s", "'ll", "the", " 20"]
PIECES += ["  ", "<|endoftext|>", "</s>", "<0xE2>"]


def random_texts(count: int) -> list[str]:
    """Return runs of random characters of all planes, without lone surrogates."""
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
    model = tmp_path_factory.mktemp("model") / "sp.model"
    if request.param == "SentencePieceTokenizer":
        train_sentencepiece(list(builtin_documents())[:60], model, 600)
    return build_tokenizer(request.param, model_file=str(model))


def test_round_trip_of_any_text_without_eod(tokenizer: Tokenizer) -> None:
    for text in EXAMPLES + random_texts(300):
        ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eod not in ids
        assert int(tokenizer.byte_lengths[ids].sum()) == len(text.encode())
    assert len(tokenizer.byte_lengths) == tokenizer.vocab_size
    assert tokenizer.bos == tokenizer.eod and tokenizer.decode([tokenizer.eod]) == ""
    with pytest.raises(ValueError, match="do not fit a vocabulary"):
        tokenizer.decode([tokenizer.vocab_size])
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("a\udfffb")


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    again, path, old = load_tokenizer(tmp_path), tmp_path / METADATA_FILE, tmp_path / OLD_METADATA_FILE
    assert (again.kind, again.vocab_size, again.eod) == (tokenizer.kind, tokenizer.vocab_size, tokenizer.eod)
    assert list(again.encode("some text")) == list(tokenizer.encode("some text"))
    path.rename(old)  # Older versions of this project used this file name.
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    write(path, old.read_text().replace(tokenizer.fingerprint, "0" * 64))
    with pytest.raises(ValueError, match="not those that were sav"):
        load_tokenizer(tmp_path)


def test_large_files_and_devices_are_refused(tmp_path: Path) -> None:
    CharacterTokenizer("abc").save(tmp_path)
    file = tmp_path / "characters.json"
    os.truncate(file, 1 << 40)
    with pytest.raises(ValueError, match="characters.json.* larger than 268,435,456 bytes"):
        load_tokenizer(tmp_path)
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="characters.json"):
        load_tokenizer(tmp_path)


def test_split_text_keeps_the_ids(tokenizer: Tokenizer) -> None:
    text = "\n".join(builtin_documents()[:60])
    parts = list(split_text(text, 1000))
    assert "".join(parts) == text and max(map(len, parts)) <= 2000 and len(parts) > 20
    assert [id for part in parts for id in tokenizer.encode(part)] == list(tokenizer.encode(text))
    # This text has no single space at which it could be split.
    assert [len(part) for part in split_text(" " * 95, 10)] == [20] * 4 + [15]
    assert list(split_text("")) == [""]


# --- GPT-2's files


def test_find_gpt2_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="scripts/download_gpt2_vocab.sh"):
        build_tokenizer("GPT2BPETokenizer", cache_dir=str(tmp_path))
    (cache := tmp_path / "gpt2-model-parallel").mkdir()
    for folder, pair in ((cache, GPT2_FILES[0]), *((tmp_path, names) for names in reversed(GPT2_FILES))):
        for name in pair:
            (folder / name).touch()
        assert find_gpt2_files(None, None, str(tmp_path)) == (folder / pair[0], folder / pair[1])
    for merges, said in (("missing", "--merge-file: no"), (None, "--vocab-file needs --merge-file")):
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            find_gpt2_files(f"{tmp_path}/vocab.json", merges, None)


@pytest.mark.skipif(not shutil.which("curl"), reason="file: addresses need curl")
def test_the_vocabulary_is_downloaded_checked_and_kept(
    test_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def download(source: Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.setenv("GPT2_VOCAB_URL", source.resolve().as_uri())
        words = ["bash", str(ROOT / "scripts" / "download_gpt2_vocab.sh")]
        return subprocess.run(words, capture_output=True, text=True, timeout=240)

    (wrong := tmp_path / "wrong").mkdir()
    write(wrong / "encoder.json", "{}")
    for source, said in ((tmp_path / "nowhere", "cannot be downloaded"), (wrong, "sha256 differs")):
        done = download(source)
        assert done.returncode == 2 and said in done.stderr
        assert list((tmp_path / "gpt2-model-parallel").iterdir()) == []
    assert download(test_data / "gpt2").returncode == 0
    assert build_tokenizer("GPT2BPETokenizer").vocab_size == 50257
    assert "is there" in download(wrong).stdout  # The files are complete, so nothing is downloaded.


# --- SentencePiece


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    for kind, flag, name, said in (
        ("SentencePieceTokenizer", "model_file", None, "needs --tokenizer-model"),
        ("SentencePieceTokenizer", "model_file", "none", "--tokenizer-model: no such file"),
        ("SentencePieceTokenizer", "model_file", write(tmp_path / "bad", "no model"), "not a SentencePiece model"),
        ("characters", "vocab_file", None, "--tokenizer-type characters needs --vocab-file"),
        ("characters", "vocab_file", "none.pkl", "--vocab-file: no such file"),
        ("characters", "vocab_file", write(tmp_path / "a.json", '{"a": 1}'), "one character for each id"),
        ("characters", "vocab_file", write(tmp_path / "a.pkl", pickle.dumps([1])), "a.pkl: .*lacks itos"),
        ("characters", "vocab_file", write(tmp_path / "b.pkl", pickle.dumps({"itos": {0: "a", 1: "a"}})), "two ids"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            build_tokenizer(kind, **{flag: name})
    with pytest.raises(ValueError, match="--tokenizer-vocab-size 20: "):
        train_sentencepiece(["some text"], tmp_path / "new", 20)
    assert not (tmp_path / "new").exists()
    for text, said in (("abé", r"'é' \(U\+00E9\)"), ("a\0", r"'\\x00' \(U\+0000\)")):
        with pytest.raises(ValueError, match=f"the text holds {said}, which is not one of the 3 characters"):
            CharacterTokenizer("abc").encode(text)


def test_a_missing_sentencepiece_model_is_trained_once(tmp_path: Path) -> None:
    model, said = str(tmp_path / "sp.model"), list[str]()
    text = write(tmp_path / "a.txt", " ".join(builtin_documents()[:40]))
    for _ in range(2):
        data_utils.ensure_sentencepiece_model(model, train_data=[text], text_key=None, vocab_size=500, log=said.append)
    assert len(said) == 1 and "500 pieces" in said[0]
    assert build_tokenizer("SentencePieceTokenizer", model_file=model).vocab_size == 500


# --- characters


@pytest.mark.parametrize("protocol", [2, 5])
def test_nanogpt_meta(tmp_path: Path, protocol: int) -> None:
    """Write meta.pkl like nanoGPT's data/shakespeare_char/prepare.py."""
    text = "O, that this too too solid flesh would melt\nÄ 中 🙂"
    characters = sorted(set(text))
    ids = {character: number for number, character in enumerate(characters)}
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": ids}
    path = write(tmp_path / "meta.pkl", pickle.dumps(meta, protocol))
    tokenizer = build_tokenizer("characters", vocab_file=path)
    assert list(tokenizer.encode(text)) == [ids[character] for character in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eod, tokenizer.has_eod, tokenizer.bos) == (NO_EOD, False, ids["\n"])
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


# --- libraries


def test_missing_libraries_are_named_and_bytes_need_none(tmp_path: Path) -> None:
    code = """
import sys
for name in ("tiktoken", "sentencepiece", "tqdm"):
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


# --- gigatoken, tiktoken and the merges file: on real text, on random text and for every character

# Only every tenth case is tested by default.
EVERY = pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.wide)])


class Engines:
    """GPT-2's BPE in three implementations: this project with gigatoken, tiktoken, and Hugging Face's tokenizers."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import ByteLevelBPETokenizer

        ours: Any = build_tokenizer("GPT2BPETokenizer", cache_dir=str(folder))
        self.ours = ours
        assert ours._faster is not None, f"the installed gigatoken is not {gpt2.GIGATOKEN_RELEASE}x"
        # Hugging Face's tokenizers applies the merges file. tiktoken and this project merge by rank.
        self.reference = ByteLevelBPETokenizer(str(folder / "encoder.json"), str(folder / "vocab.bpe"))

    def check(self, texts: list[str]) -> None:
        for text in texts:
            ids = list(self.ours.encode(text))
            assert ids == self.ours._ranks_of(text) == self.reference.encode(text).ids
            assert self.ours.decode(ids) == text


@pytest.fixture(scope="module")
def engines(test_data: Path) -> Engines:
    pytest.importorskip("gigatoken")
    return Engines(test_data / "gpt2")


@EVERY
def test_engines_agree_on_real_and_random_text(engines: Engines, test_data: Path, every: int) -> None:
    engines.check((test_data / "wikitext-2/test.txt").read_bytes().decode().split("\n \n")[::every])
    lambada = (test_data / "lambada" / "lambada_test.jsonl").read_text(encoding="utf-8").splitlines()
    engines.check([json.loads(line)["text"] for line in lambada[::every]])
    shakespeare = (test_data / "tinyshakespeare/input.txt").read_bytes().decode()
    engines.check([shakespeare[: len(shakespeare) // every]])
    engines.check(random_texts(10_000 // every))
    assert list(engines.ours.encode("Hello world")) == [15496, 995] and engines.ours.eod == 50256


@EVERY
def test_engines_agree_on_the_class_of_every_character(every: int) -> None:
    """Compare where gigatoken and tiktoken split text. The vocabulary merges the last byte of a character with its
    neighbour, so different splits give different ids."""
    pytest.importorskip("gigatoken")
    pairs = [bytes([last, after]) for last in range(0xC0) for after in b"a1!\t"]
    spaced = [bytes([32, first]) for first in range(0xC2, 0xF5)]
    ranked = list(dict.fromkeys([*(bytes([value]) for value in range(256)), *pairs, *spaced]))
    tokenizer: Any = BytePairTokenizer("builtin", ranked, range(len(ranked)), len(ranked) + 1, len(ranked), {})
    # All characters after U+33FFF have the same class.
    blocks = (*range(0, 0x34000, 32), *range(0x34000, 0x110000, 0x400))
    for start in blocks[::every]:
        characters = [chr(code) for code in range(start, start + 32) if not 0xD800 <= code < 0xE000]
        text = "".join(f"{c}a{c}1{c}!{c}\t {c}'s" for c in characters)
        assert list(tokenizer.encode(text)) == tokenizer._ranks_of(text), hex(start)
    assert tokenizer._faster("plain text, “quotes”, naïve, 漢字, 😀".encode()) is not None


def test_long_words_and_whitespace(engines: Engines) -> None:
    engines.check(["ab" * 1500 + "\n" * 3000])
    text = "x" + " \n" * 1_000_000 + "y"
    assert engines.ours.decode(engines.ours.encode(text)) == text
    for character in " \n":
        for length in (more + 2 * MAX_WHITESPACE_RUN for more in (-1, 0, 1, MAX_WHITESPACE_RUN)):
            text = "x" + character * length + "y z"
            assert list(engines.ours.encode(text)) == engines.ours._ranks_of(text)


def test_ids_without_gigatoken_or_with_a_different_release(
    engines: Engines, test_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "it's naïve, <|endoftext|>\n\n 漢字 123" + " " * 70_000 + "."
    for is_installed in (True, False):
        if is_installed:
            monkeypatch.setattr(gpt2, "GIGATOKEN_RELEASE", "99.")
        else:
            monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)
        other: Any = build_tokenizer("GPT2BPETokenizer", cache_dir=str(test_data / "gpt2"))
        assert other._faster is None and list(other.encode(text)) == list(engines.ours.encode(text))
        monkeypatch.undo()


def test_a_token_without_merges_is_left_to_tiktoken() -> None:
    pytest.importorskip("gigatoken")
    ranked = [*(bytes([value]) for value in range(256)), b"abc"]
    tokenizer: Any = BytePairTokenizer("builtin", ranked, range(257), 258, 257, {})
    assert tokenizer._faster is None
    assert list(tokenizer.encode("abc")) == [256]  # Only the word "abc" has the id of the token b"abc".
    assert list(tokenizer.encode("abcd abc")) == list(b"abcd abc")
