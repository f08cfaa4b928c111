"""Tokenizers of Hugging Face's folders, as its two newest major versions write them: read to the same ids."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_utils import Tokenizer, build_tokenizer
from data_utils.tokenizers.gpt2 import END_OF_TEXT
from megatron.gpt2.formats.openai_tokenizer import open_tokenizer, tokenizer_files

TEXTS = ["Hello, world! It's 1,024 o'clock\n\n\tand   naïve café 日本語 🙂🙂 ", " leading\r\n", "a" * 300, "\x00\x7f"]


@pytest.fixture(scope="module")
def builtin() -> Tokenizer:
    return build_tokenizer("builtin")


@pytest.fixture(scope="module")
def written(builtin: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers saves of the shipped tokenizer, with a token for padding, as who fine-tunes adds one."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in tokenizer_files(builtin, 1024)[0].items():
        (folder / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.add_special_tokens({"pad_token": "<pad>"})
    theirs.save_pretrained(folder / "saved")
    return folder / "saved"


def assert_same(tokenizer: Tokenizer, builtin: Tokenizer) -> None:
    for text in [*TEXTS, f"a{END_OF_TEXT}b<pad>"]:
        assert list(map(int, tokenizer.encode(text))) == list(map(int, builtin.encode(text))), text
    assert tokenizer.kind == "GPT2BPETokenizer" and tokenizer.eod == builtin.eod


def test_transformers_5_writes_one_file(written: Path, builtin: Tokenizer) -> None:
    assert not (written / "vocab.json").exists(), "its form of today"
    tokenizer = open_tokenizer({"tokenizer.json": str(written / "tokenizer.json")})
    assert_same(tokenizer, builtin)
    assert tokenizer.vocab_size == builtin.vocab_size + 1 and tokenizer.decode([builtin.vocab_size]) == ""


def test_transformers_4_writes_two(builtin: Tokenizer, tmp_path: Path) -> None:
    files = tokenizer_files(builtin, 1024)[0]
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes(files[name])
    assert_same(open_tokenizer({name: str(tmp_path / name) for name in ("vocab.json", "merges.txt")}), builtin)


def test_merges_as_older_files_have_them(written: Path, builtin: Tokenizer, tmp_path: Path) -> None:
    found = json.loads((written / "tokenizer.json").read_text())
    found["model"]["merges"] = [" ".join(pair) for pair in found["model"]["merges"]]
    for name in ("byte_fallback", "ignore_merges"):
        del found["model"][name]
    del found["pre_tokenizer"]["use_regex"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    assert_same(open_tokenizer({"tokenizer.json": str(tmp_path / "tokenizer.json")}), builtin)


OTHERS: dict[str, Callable[[Any], Any]] = {
    "unigram": lambda t: t["model"].update(type="Unigram"),
    "dropout": lambda t: t["model"].update(dropout=0.1),
    "a suffix": lambda t: t["model"].update(end_of_word_suffix="</w>"),
    "bytes as a way out": lambda t: t["model"].update(byte_fallback=True),
    "whole words first": lambda t: t["model"].update(ignore_merges=True),
    "a normalizer": lambda t: t.update(normalizer={"type": "NFC"}),
    "a space before": lambda t: t["pre_tokenizer"].update(add_prefix_space=True),
    "another pattern": lambda t: t["pre_tokenizer"].update(use_regex=False),
    "a sequence": lambda t: t.update(pre_tokenizer={"type": "Sequence", "pretokenizers": []}),
    "nothing before": lambda t: t.update(pre_tokenizer=None),
    "no model": lambda t: t.pop("model"),
    "an added word": lambda t: t["added_tokens"].append({"id": 4097, "content": "word", "special": False}),
    "an added list": lambda t: t["added_tokens"].append([]),
    "a gap": lambda t: t["added_tokens"].append({"id": 5000, "content": "<x>", "special": True}),
    "no vocabulary": lambda t: t["model"].pop("vocab"),
    "a number for merges": lambda t: t["model"].update(merges=3),
    "merges of three": lambda t: t["model"]["merges"].append(["a", "b", "c"]),
    "merges of numbers": lambda t: t["model"]["merges"].append([1, 2]),
    "another end of text": lambda t: (
        t["model"]["vocab"].update(x=t["model"]["vocab"].pop(END_OF_TEXT)),
        t.update(added_tokens=t["added_tokens"][1:]),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_refused_in_one_line(written: Path, tmp_path: Path, name: str) -> None:
    found = copy.deepcopy(json.loads((written / "tokenizer.json").read_text()))
    OTHERS[name](found)
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=str(tmp_path / "tokenizer.json")) as caught:
        open_tokenizer({"tokenizer.json": str(tmp_path / "tokenizer.json")})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
