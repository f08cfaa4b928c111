"""Sketches estimate the Jaccard index; pairs are found, and only true ones; removal keeps the first of a group."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.gpt2.extensions.webtext.near_duplicates import VALUES, buckets, jaccard, shingles, sketch
from megatron.gpt2.extensions.webtext.shards import as_line

ROOT = Path(__file__).resolve().parents[5]


def grams(text: str) -> set[str]:
    padded = text.ljust(5, "\0")
    return {padded[start : start + 5] for start in range(len(padded) - 4)}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=60), min_size=2, max_size=5))
def test_shingles_are_the_5_grams(texts: list[str]):
    for first, second in zip(texts, texts[1:], strict=False):
        assert len(shingles(first)) == len(grams(first))
        expected = len(grams(first) & grams(second)) / len(grams(first) | grams(second))
        assert jaccard(shingles(first), shingles(second)) == expected


@pytest.mark.parametrize("length", [12, 60, 300, 3000])
def test_sketches_estimate_without_bias(length: int):
    draw = random.Random(length)
    errors, variances = [], []
    for _ in range(200):
        text = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=length))
        other = list(text)
        for _ in range(draw.randint(1, max(1, length // 12))):
            other[draw.randrange(length)] = "é"
        index = jaccard(shingles(text), shingles("".join(other)))
        one, two = sketch(text), sketch("".join(other))
        errors.append(np.mean(one == two) - index)
        variances.append(index * (1 - index) / VALUES)
    assert abs(np.mean(errors)) < 4 * np.sqrt(np.mean(variances) / 200)
    assert np.std(errors) < 1.15 * np.sqrt(np.mean(variances))


@given(st.lists(st.integers(0, 5), max_size=30))
def test_buckets(keys: list[int]):
    expected = {tuple(number for number, other in enumerate(keys) if other == key) for key in keys}
    assert {tuple(bucket) for bucket in buckets(np.array(keys, np.uint64))} == {
        bucket for bucket in expected if len(bucket) > 1
    }


def program(name: str, *arguments: Path | str) -> str:
    run = subprocess.run(
        [sys.executable, str(ROOT / f"tools/openwebtext/{name}.py"), *map(str, arguments), "--workers", "1"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


def test_search_group_and_removal(tmp_path: Path):
    """Families of similar texts, of which a chain has its ends too far apart to be a pair."""
    draw = random.Random(0)

    def text(length: int = 150) -> list[str]:
        return ["".join(draw.choices("abcdefghijklmnop", k=6)) for _ in range(length)]

    def changed(words: list[str], places: range) -> list[str]:
        return [("other" if number in places else word) for number, word in enumerate(words)]

    families = []
    for _ in range(20):
        words = text()
        chain = changed(words, range(12))
        families.append([words, chain, changed(chain, range(60, 72)), list(words)])
    singles = [text() for _ in range(40)]
    documents = [
        (" ".join(words), (family, member))
        for family, members in enumerate(families)
        for member, words in enumerate(members)
    ] + [(" ".join(words), (99, 0)) for words in singles]
    draw.shuffle(documents)
    (tmp_path / "in").mkdir()
    for shard, part in (("a", documents[:50]), ("b", documents[50:])):
        (tmp_path / f"in/{shard}.jsonl").write_bytes(
            b"".join(as_line({"text": text, "of": list(of)}) for text, of in part)
        )
    first, second = (" ".join(families[0][member]) for member in (0, 2))
    middle = " ".join(families[0][1])
    assert jaccard(shingles(first), shingles(second)) < 0.85 < jaccard(shingles(first), shingles(middle))

    program("find_duplicates", tmp_path / "in", tmp_path / "found", "--min-jaccard", "0.85")
    program("group_duplicate_url", tmp_path / "found/pairs.jsonl", tmp_path / "groups")
    program("remove_group_duplicates", tmp_path / "groups/groups.jsonl", tmp_path / "in", tmp_path / "out")
    for line in (tmp_path / "found/pairs.jsonl").read_text().splitlines()[1:]:
        pair = json.loads(line)
        texts = [documents[number][0] for number in pair["pair"]]
        assert jaccard(*map(shingles, texts)) == pytest.approx(pair["jaccard"], abs=1e-4) and pair["jaccard"] >= 0.85
    left = [json.loads(line) for name in "ab" for line in (tmp_path / f"out/{name}.jsonl").open()]
    expected, seen = [], set()
    for content, (family, _) in documents:  # the first of each family, in the order of the input
        if family == 99 or family not in seen:
            expected.append(content)
        seen.add(family)
    assert [document["text"] for document in left] == expected

    # The same from files that cannot be read at an offset; and a removal from files that were not searched.
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, (content, _) in enumerate(documents):
        (folder / f"{number:03d}.txt").write_text(content)
    program("find_duplicates", folder, tmp_path / "found2", "--min-jaccard", "0.85")
    one, two = (
        [json.loads(line)["pair"] for line in (tmp_path / f"{name}/pairs.jsonl").read_text().splitlines()[1:]]
        for name in ("found", "found2")
    )
    assert one == two
    run = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tools/openwebtext/remove_group_duplicates.py"),
            str(tmp_path / "groups/groups.jsonl"),
            str(folder),
            str(tmp_path / "out2"),
        ],
        text=True,
        capture_output=True,
    )
    assert run.returncode == 2 and "search it for duplicates first" in run.stderr
    assert run.stderr.count("\n") == 1
