"""Every kind of tokenizer: round trips, saving and loading, and files that are missing or damaged."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import data_utils
from data_utils import Tokenizer, build_tokenizer, load_tokenizer, train_sentencepiece
from data_utils.corpora.documents import builtin_documents
from data_utils.tokenizers import find_gpt2_files
from data_utils.tokenizers.base import (
    FACTS_FILE,
    NO_EOD,
    OLD_FACTS_FILE,
    ByteTokenizer,
    CharacterTokenizer,
    read_characters,
    split_text,
)
from data_utils.tokenizers.gpt2 import byte_alphabet
from tests.conftest import ROOT

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
CHARACTERS = "O, that this too too solid flesh would melt\nÄ 中 🙂"


def random_text(draw: random.Random) -> str:
    """Runs of characters of all sorts, lone surrogates excepted."""
    kinds = [
        lambda: chr(draw.randrange(128)),
        lambda: draw.choice(" \n\t\r\u00a0\u2003\u2581'"),
        lambda: chr(draw.randrange(0x80, 0xD800)),
        lambda: chr(draw.randrange(0xE000, 0x110000)),
        lambda: draw.choice(["<|endoftext|>", "</s>", "<0xE2>", "don't", " the", "2019"]),
    ]
    return "".join(draw.choice(kinds)() * draw.choice((1, 1, 1, 2, 9)) for _ in range(draw.randrange(60)))


@pytest.fixture(scope="module", params=["bytes", "builtin", "GPT2BPETokenizer", "SentencePieceTokenizer"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "GPT2BPETokenizer":
        return build_tokenizer(request.param, cache_dir=str(request.getfixturevalue("test_data") / "gpt2"))
    model = tmp_path_factory.mktemp("model") / "new folder" / "sp.model"
    if request.param == "SentencePieceTokenizer":
        train_sentencepiece(list(builtin_documents())[:60], model, 600)
    return build_tokenizer(request.param, model_file=str(model))


def test_any_text_comes_back_and_none_makes_an_eod(tokenizer: Tokenizer) -> None:
    draw = random.Random(tokenizer.kind)
    for text in EXAMPLES + [random_text(draw) for _ in range(300)]:
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
    again = load_tokenizer(tmp_path)
    for name in ("kind", "fingerprint", "vocab_size", "eod"):
        assert getattr(again, name) == getattr(tokenizer, name)
    assert list(again.encode("some text")) == list(tokenizer.encode("some text"))
    facts_file = tmp_path / FACTS_FILE
    facts_file.rename(tmp_path / OLD_FACTS_FILE)  # as it was called once
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    (tmp_path / OLD_FACTS_FILE).rename(facts_file)
    facts = json.loads(facts_file.read_text())
    for content, said in (
        (json.dumps({**facts, "fingerprint": "0" * 64}), "not those that were sav"),
        ("{", "damaged"),
    ):
        facts_file.write_text(content)
        with pytest.raises(ValueError, match=said):
            load_tokenizer(tmp_path)


def test_parts_of_a_long_text_have_the_ids_of_the_whole(tokenizer: Tokenizer) -> None:
    text = "\n".join(builtin_documents()[:20])
    parts = list(split_text(text, 1000))
    assert "".join(parts) == text and max(map(len, parts)) <= 2000 and len(parts) > 20
    assert [id for part in parts for id in tokenizer.encode(part)] == list(tokenizer.encode(text))


def test_split_text_without_a_place_to_cut() -> None:
    assert [len(part) for part in split_text(" " * 95, 10)] == [20] * 4 + [15]
    assert list(split_text("")) == [""]


# --- GPT-2's files


def test_a_vocabulary_with_other_ids(tmp_path: Path) -> None:
    tokens = ["<|endoftext|>", "<pad>", "he", *reversed(byte_alphabet()), "hel", "\u0120h"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nhe l\n\u0120 h\n")
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
    (tmp_path / "v").write_text(vocabulary)
    (tmp_path / "m").write_text(merges)
    with pytest.raises(ValueError, match=named):
        build_tokenizer("GPT2BPETokenizer", vocab_file=str(tmp_path / "v"), merge_file=str(tmp_path / "m"))


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
        return subprocess.run(
            ["bash", str(ROOT / "scripts" / "download_gpt2_vocab.sh")],
            capture_output=True,
            text=True,
            timeout=240,
            env={"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(cache), "GPT2_VOCAB_URL": source.resolve().as_uri()},
        )

    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "encoder.json").write_text("{}")
    for source, words in (("nowhere", "cannot be downloaded"), ("wrong", "sha256 differs")):
        done = download(tmp_path / source, tmp_path / "cache")
        assert done.returncode == 2 and words in done.stderr
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
    (tmp_path / "bad").write_bytes(b"no model")
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        build_tokenizer("SentencePieceTokenizer", model_file=str(tmp_path / "bad"))
    with pytest.raises(ValueError, match="--tokenizer-vocab-size 20 "):
        train_sentencepiece(["some text"], tmp_path / "new", 20)
    with pytest.raises(ValueError, match="no text"):
        train_sentencepiece([], tmp_path / "new", 600)
    assert not (tmp_path / "new").exists()


def test_a_missing_sentencepiece_model_is_trained_once(tmp_path: Path) -> None:
    text, model = tmp_path / "a.txt", tmp_path / "sp.model"
    said: list[str] = []
    text.write_text(" ".join(builtin_documents()[:40]))
    for _ in range(2):
        data_utils.ensure_sentencepiece_model(
            str(model), train_data=[str(text)], text_key=None, vocab_size=500, log=said.append
        )
    assert len(said) == 1 and "500 pieces" in said[0]
    assert build_tokenizer("SentencePieceTokenizer", model_file=str(model)).vocab_size == 500
    with pytest.raises(ValueError, match="--tokenizer-model .* cannot be written"):
        data_utils.ensure_sentencepiece_model(
            "/proc/sp.model", train_data=[str(text)], text_key=None, vocab_size=500, log=print
        )


# --- characters


def meta_of(text: str) -> dict[str, object]:
    """As nanoGPT's data/shakespeare_char/prepare.py makes it."""
    characters = sorted(set(text))
    ids = {character: number for number, character in enumerate(characters)}
    return {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": ids}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_nanogpt_meta(tmp_path: Path, protocol: int) -> None:
    meta = meta_of(CHARACTERS)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta, protocol))
    tokenizer = build_tokenizer("characters", vocab_file=f"{tmp_path}/meta.pkl")
    stoi = meta["stoi"]
    assert isinstance(stoi, dict)
    assert tokenizer.encode(CHARACTERS).tolist() == [stoi[c] for c in CHARACTERS]  # type: ignore[union-attr]
    assert tokenizer.decode(tokenizer.encode(CHARACTERS)) == CHARACTERS and tokenizer.vocab_size == meta["vocab_size"]
    assert (tokenizer.eod, tokenizer.has_eod, tokenizer.start) == (NO_EOD, False, stoi["\n"])
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


def test_what_is_no_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "meta.pkl"
    for meta, said in (
        (Caller(), "nothing was executed"),
        ({"itos": Caller()}, "nothing was executed"),
        ([1], "no itos"),
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
    (tmp_path / "a.txt").write_text("some text " * 10)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.txt"), str(tmp_path / "cache")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
