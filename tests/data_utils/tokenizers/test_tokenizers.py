from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import data_utils
from data_utils import Tokenizer, build_tokenizer, load_tokenizer, train_sentencepiece
from data_utils.corpora.builtin import builtin_documents
from data_utils.tokenizers.base import FACTS_FILE, OLD_FACTS_FILE, split_text
from data_utils.tokenizers.build import find_gpt2_files
from data_utils.tokenizers.gpt2 import WHITE_RUN, byte_alphabet

ROOT = Path(__file__).resolve().parents[3]
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


@pytest.fixture(scope="module")
def gpt2(test_data: Path) -> Tokenizer:
    return build_tokenizer("GPT2BPETokenizer", cache_dir=str(test_data / "gpt2"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    model = tmp_path_factory.mktemp("model") / "new folder" / "sp.model"
    train_sentencepiece(list(builtin_documents())[:60], model, 600)
    return build_tokenizer("SentencePieceTokenizer", model_file=str(model))


@pytest.fixture(scope="module", params=["bytes", "builtin", "GPT2BPETokenizer", "SentencePieceTokenizer"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    named = {"GPT2BPETokenizer": "gpt2", "SentencePieceTokenizer": "sentencepiece"}
    if request.param in named:
        found: Tokenizer = request.getfixturevalue(named[request.param])
        return found
    return build_tokenizer(request.param)


def test_any_text_comes_back_and_none_makes_an_eod(tokenizer: Tokenizer) -> None:
    draw = random.Random(tokenizer.kind)
    for text in EXAMPLES + [random_text(draw) for _ in range(300)]:
        ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eod not in ids
        assert int(tokenizer.byte_lengths[ids].sum()) == len(text.encode())


def test_what_the_ids_mean_is_whole(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.byte_lengths) == tokenizer.vocab_size
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.byte_lengths[tokenizer.eod] == 0 and tokenizer.decode([tokenizer.eod]) == ""
    for ids in ([tokenizer.vocab_size], [-1]):
        with pytest.raises(ValueError, match="do not fit a vocabulary"):
            tokenizer.decode(ids)
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("a\ud800b")
    assert "\ufffd" in tokenizer.decode(np.asarray(tokenizer.encode("é"))[:1]) or len(tokenizer.encode("é")) == 1


def test_a_saved_tokenizer_is_the_same_and_a_changed_one_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    again = load_tokenizer(tmp_path / "tokenizer")
    assert (again.kind, again.fingerprint, again.vocab_size, again.eod) == (
        tokenizer.kind,
        tokenizer.fingerprint,
        tokenizer.vocab_size,
        tokenizer.eod,
    )
    assert list(again.encode("some text")) == list(tokenizer.encode("some text"))
    facts_file = tmp_path / "tokenizer" / FACTS_FILE
    facts_file.rename(tmp_path / "tokenizer" / OLD_FACTS_FILE)  # as it was called once
    assert load_tokenizer(tmp_path / "tokenizer").fingerprint == tokenizer.fingerprint
    (tmp_path / "tokenizer" / OLD_FACTS_FILE).rename(facts_file)
    facts = json.loads(facts_file.read_text())
    facts_file.write_text(json.dumps({**facts, "fingerprint": "0" * 64}))
    with pytest.raises(ValueError, match="not those that were saved"):
        load_tokenizer(tmp_path / "tokenizer")
    facts_file.write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        load_tokenizer(tmp_path / "tokenizer")


def test_kinds_have_different_fingerprints(gpt2: Tokenizer, sentencepiece: Tokenizer) -> None:
    prints = {
        build_tokenizer("bytes").fingerprint,
        build_tokenizer("builtin").fingerprint,
        gpt2.fingerprint,
        sentencepiece.fingerprint,
    }
    assert len(prints) == 4


def test_parts_of_a_long_text_have_the_ids_of_the_whole(tokenizer: Tokenizer) -> None:
    text = "\n".join(builtin_documents()[:20])
    parts = list(split_text(text, 1000))
    assert "".join(parts) == text and max(map(len, parts)) <= 2000 and len(parts) > 20
    assert [id for part in parts for id in tokenizer.encode(part)] == list(tokenizer.encode(text))


def test_split_text_without_a_place_to_cut() -> None:
    assert [len(part) for part in split_text(" " * 95, 10)] == [20] * 4 + [15]
    assert list(split_text("")) == [""]


def test_gpt2_ids_are_those_of_the_reference(gpt2: Tokenizer, test_data: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, copy in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        (tmp_path / copy).write_bytes((test_data / "gpt2" / name).read_bytes())
    reference = transformers.GPT2TokenizerFast(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    draw = random.Random(3)
    texts = EXAMPLES + [random_text(draw) for _ in range(200)]
    texts.append((test_data / "wikitext-2" / "valid.txt").read_text(encoding="utf-8")[:200_000])
    for text in texts:
        if "<|endoftext|>" not in text:  # which the reference turns into an EOD
            assert list(gpt2.encode(text)) == reference(text)["input_ids"]
    assert gpt2.vocab_size == 50257 and gpt2.eod == 50256
    assert list(gpt2.encode("Hello world")) == [15496, 995]


def test_endless_white_space_neither_fails_nor_changes_ids(gpt2: Tokenizer) -> None:
    for character in (" ", "\n", " \n"):
        text = "x" + character * 1_000_000 + "y"
        assert gpt2.decode(gpt2.encode(text)) == text
    for character in (" ", "\n"):
        for length in (2 * WHITE_RUN - 1, 2 * WHITE_RUN, 2 * WHITE_RUN + 1, 3 * WHITE_RUN, 3 * WHITE_RUN + 1):
            text = "x" + character * length + "y z"
            whole = gpt2._encoding.encode_ordinary(text)  # type: ignore[attr-defined]
            assert list(gpt2.encode(text)) == whole


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
    for name in ("encoder.json", "vocab.bpe"):
        (user / name).touch()
    assert find_gpt2_files(None, None, str(tmp_path)) == (user / "encoder.json", user / "vocab.bpe")
    for pair in (("vocab.json", "merges.txt"), ("gpt2-vocab.json", "gpt2-merges.txt"), ("encoder.json", "vocab.bpe")):
        for name in pair:
            (tmp_path / name).touch()
        assert find_gpt2_files(None, None, str(tmp_path)) == (tmp_path / pair[0], tmp_path / pair[1])
    with pytest.raises(FileNotFoundError, match="--merge-file"):
        find_gpt2_files(str(tmp_path / "vocab.json"), str(tmp_path / "missing"), None)
    with pytest.raises(ValueError, match="--vocab-file needs --merge-file"):
        find_gpt2_files(str(tmp_path / "vocab.json"), None, None)


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


def test_the_shipped_bpe_is_small_and_fits_its_corpus() -> None:
    tokenizer = build_tokenizer("builtin")
    assert tokenizer.vocab_size == 4096 and tokenizer.eod == 4095
    text = "".join(builtin_documents()[:50])
    assert len(text.encode()) / len(tokenizer.encode(text)) > 3.0


def test_absent_libraries_are_named_and_bytes_need_none(tmp_path: Path) -> None:
    code = """
import sys
for name in ("tiktoken", "regex", "sentencepiece", "tokenizers", "tqdm"):
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
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
