"""Thirteen words in a row with an evaluation set; and the two ends of the pipeline."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.gpt2.extensions.webtext.decontamination import WORDS, Index, words_of
from megatron.gpt2.extensions.webtext.documents import Shard, as_line
from megatron.gpt2.extensions.webtext.shard_run import Stage, run_shard
from megatron.gpt2.extensions.webtext.splitting import split

WORD_LISTS = st.lists(st.sampled_from("ab"), max_size=40)


@settings(max_examples=300, deadline=None)
@given(st.lists(WORD_LISTS, min_size=1, max_size=3), st.lists(st.sampled_from("abc"), max_size=60))
def test_runs_are_found_and_no_others(evaluation: list[list[str]], words: list[str]):
    runs = {tuple(text[start : start + WORDS]) for text in evaluation for start in range(len(text) - WORDS + 1)}
    if not runs:
        with pytest.raises(ValueError, match="hold no text of 13 words"):
            Index(map(" ".join, evaluation))
        return
    index = Index(map(" ".join, evaluation))
    assert index.too_short == sum(len(text) < WORDS for text in evaluation)
    expected = next(
        (
            " ".join(words[start : start + WORDS])
            for start in range(len(words) - WORDS + 1)
            if tuple(words[start : start + WORDS]) in runs
        ),
        None,
    )
    assert index.match(" ".join(words)) == expected


def test_punctuation_and_case_make_no_difference():
    text = "It was, he said, the best of times -- and the worst of times, too, in 1859."
    assert len(words_of(text)) > WORDS
    assert Index(iter([text])).match("so\n" + text.upper().replace(",", " ;").replace("--", "\n"))


def test_the_split_is_stable_and_near_its_shares(tmp_path: Path):
    texts = [f"document {number}" for number in range(2000)]
    stage = Stage("split", split, {"shares": ["90", "8", "2"], "seed": 7})

    def where(texts: list[str], name: str) -> dict[str, str]:
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(b"".join(as_line({"text": text}) for text in texts))
        run_shard(stage, Shard("split", (path,)), tmp_path / name)
        return {
            json.loads(line)["text"]: part.stem for part in (tmp_path / name).glob("*.jsonl") for line in part.open()
        }

    once = where(texts, "once")
    assert where(["another", *reversed(texts)], "grown") == {**once, "another": where(["another"], "one")["another"]}
    for name, share in (("train", 0.9), ("valid", 0.08), ("test", 0.02)):
        assert abs(sum(part == name for part in once.values()) / 2000 - share) < 0.02
    stage = Stage("split", split, {"shares": [str(Fraction(1, 3)), "0", "0"], "seed": 7})
    assert set(where(texts, "all").values()) == {"train"}
