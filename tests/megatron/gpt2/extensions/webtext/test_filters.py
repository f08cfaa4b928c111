"""The URL filter, cleanup, decontamination and splits; near-duplicates: sketches estimate the Jaccard index, all pairs
are found, and removal keeps the first document."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.gpt2.extensions.webtext import commands
from megatron.gpt2.extensions.webtext.filters import (
    SUSPECT,
    WORDS,
    duplicate_key,
    evaluation_ngrams,
    fix_text,
    make_url_filter,
    normalize_url,
    split,
    word_ngrams,
)
from megatron.gpt2.extensions.webtext.shards import Shard, WebtextStage, json_line, run_shard
from tests.conftest import needs

pytestmark = needs("tldextract", extra="curate")
PIECES = ["&amp;", "<b>", "\n", "\r\n", "\r", "Ã©", "â€œ", "â€™", "\x1b[31m", "ﬁ", "“", "plain words ", "\u2028", "é"]
TEXT = st.lists(st.one_of(st.text(max_size=20), st.sampled_from(PIECES)), max_size=12).map("".join)


@pytest.mark.parametrize(
    "url, reason",
    [
        ("https://www.bbc.co.uk/news/article-1", None),
        ("http://blog.example.com/2019/01/a-post.html?page=2", None),
        ("https://example.org/café", None),
        ("https://de.wikipedia.org/wiki/C.H._Beck", None),
        ("http://[2001:db8::1]/page", "malformed"),
        ("http://a.b", "malformed"),
        ("http://x.", "malformed"),
        ("https://m.youtube.com/watch?v=1", "site without text"),
        ("https://youtu.be/1", "site without text"),
        ("https://cdn.example.com/a/photo.JPEG?width=3", "file that is no page"),
        ("https://example.com/paper.pdf", "file that is no page"),
        ("ftp://example.com/a", "neither http nor https"),
        ("javascript:alert(1)", "malformed"),
        ("http://example.com:99999/", "malformed"),
        ("http://exa mple.com/", "malformed"),
        ("http://127.0.0.1:8000/", "malformed"),
        ("http://intranet/page", "malformed"),
        ("http://a", "too short"),
        ("http://example.com/" + "a" * 2100, "too long"),
    ],
)
def test_url_filter(url: str, reason: str | None):
    assert make_url_filter()(url) == reason


def test_one_page_with_many_urls():
    assert normalize_url("HTTP://User@Example.COM:80#top") == "http://example.com/"
    assert normalize_url("https://example.com:8443/A?b#c") == "https://example.com:8443/A?b"
    same = ["http://example.com/a", "https://www.example.com/a/", "http://example.com:80/a#b"]
    assert len({duplicate_key(normalize_url(url)) for url in same}) == 1
    other = ["http://example.com/a", "http://example.com/A", "http://example.com/a?b", "http://news.example.com/a"]
    assert len({duplicate_key(normalize_url(url)) for url in other}) == 4


@settings(max_examples=500, deadline=None)
@given(st.one_of(TEXT, st.text(st.characters(max_codepoint=0x7E), max_size=60)))
def test_fixed_text_is_ftfys(text: str):
    import ftfy

    assert fix_text(text) == ftfy.fix_text(text)
    assert SUSPECT.search(text) or fix_text(text) is text


def test_runs_of_the_evaluation_sets(tmp_path: Path):
    text = "It was, he said, the best of times -- and the worst of times, too, in 1859."
    words = "it was he said the best of times and the worst of times too in 1859".split()
    assert list(word_ngrams(text)) == [tuple(words[start : start + WORDS]) for start in range(4)]
    path = tmp_path / "sets.jsonl"
    path.write_bytes(json_line({"text": text}) + json_line({"text": "too short"}))
    assert evaluation_ngrams((path,), "text") == (set(word_ngrams(text)), 1)
    with pytest.raises(ValueError, match=r"sets\.jsonl:1: .*'body'"):
        evaluation_ngrams((path,), "body")
    path.write_bytes(json_line({"text": "too short"}))
    evaluation_ngrams.cache_clear()
    with pytest.raises(ValueError, match="hold no text of 13 words"):
        evaluation_ngrams((path,), "text")


def test_the_split_is_stable_and_near_its_shares(tmp_path: Path):
    texts = [f"document {number}" for number in range(2000)]

    def where(texts: list[str], name: str, *shares: str) -> dict[str, str]:
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(b"".join(json_line({"text": text}) for text in texts))
        args = Namespace(shares=shares or ("90", "8", "2"), seed=7, text_key="text")
        run_shard(WebtextStage("split", split, args, ("shares", "seed")), Shard("split", (path,)), tmp_path / name)
        return {
            json.loads(line)["text"]: part.stem for part in (tmp_path / name).glob("*.jsonl") for line in part.open()
        }

    once = where(texts, "once")
    assert where(["another", *reversed(texts)], "grown") == {**once, "another": where(["another"], "one")["another"]}
    for name, count in (("train", 1800), ("valid", 160), ("test", 40)):
        assert abs([*once.values()].count(name) - count) < 40
    assert set(where(texts, "all", str(Fraction(1, 3)), "0", "0").values()) == {"train"}


def five_grams(text: str) -> set[str]:
    return {text[start : start + 5] for start in range(len(text) - 4)}


def program(name: str, *arguments: Path | str) -> None:
    getattr(commands, name)([*map(str, arguments), "--workers", "1"])


def pairs_in(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()[1:]]


def test_search_group_and_removal(tmp_path: Path):
    """Families have three similar texts. The first and the last differ too much to be a pair."""
    draw = random.Random(0)

    def words() -> list[str]:
        return ["".join(draw.choices("abcdefghijklmnop", k=6)) for _ in range(150)]

    def changed(words: list[str], places: range) -> list[str]:
        return [("other" if number in places else word) for number, word in enumerate(words)]

    documents = []  # (text, family); texts of family 99 have no duplicates
    for family in range(20):
        first = words()
        middle = changed(first, range(12))
        last = changed(middle, range(60, 72))
        documents += [(" ".join(member), family) for member in (first, middle, last, first)]
    one, two, three = (five_grams(text) for text, _ in documents[:3])
    assert len(one & three) / len(one | three) < 0.85 < len(one & two) / len(one | two)
    documents += [(" ".join(words()), 99) for _ in range(40)]
    draw.shuffle(documents)
    (tmp_path / "in").mkdir()
    (tmp_path / "texts").mkdir()
    for shard, part in (("a", documents[:50]), ("b", documents[50:])):
        lines = [json_line({"text": text, "of": family}) for text, family in part]
        (tmp_path / f"in/{shard}.jsonl").write_bytes(b"".join(lines))
    for number, (text, _) in enumerate(documents):
        (tmp_path / f"texts/{number:03d}.txt").write_text(text)

    program("find_duplicates", tmp_path / "in", tmp_path / "found", "--min-jaccard", "0.85")
    program("group_duplicate_url", tmp_path / "found/pairs.jsonl", tmp_path / "groups")
    groups = tmp_path / "groups/groups.jsonl"
    program("remove_group_duplicates", groups, tmp_path / "in", tmp_path / "out")
    for pair in pairs_in(tmp_path / "found"):
        one, two = (five_grams(documents[number][0]) for number in pair["pair"])
        assert pair["jaccard"] == pytest.approx(len(one & two) / len(one | two), abs=1e-4) and pair["jaccard"] >= 0.85
    left = [json.loads(line)["text"] for name in "ab" for line in (tmp_path / f"out/{name}.jsonl").open()]
    expected, seen = [], set()
    for text, family in documents:  # The first of each family stays, in the order of the input.
        if family == 99 or family not in seen:
            expected.append(text)
        seen.add(family)
    assert left == expected

    # Text files, which are not seekable, give the same pairs. A removal from files that were not searched is refused.
    program("find_duplicates", tmp_path / "texts", tmp_path / "found2", "--min-jaccard", "0.85")
    one_way, other_way = ([pair["pair"] for pair in pairs_in(tmp_path / name)] for name in ("found", "found2"))
    assert one_way == other_way
    with pytest.raises(ValueError, match="search it for duplicates first"):
        program("remove_group_duplicates", groups, tmp_path / "texts", tmp_path / "out2")
