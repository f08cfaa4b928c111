"""Test that sketches estimate the Jaccard index, that all pairs are found, and that removal keeps the first
document."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from megatron.gpt2.extensions.webtext import commands
from megatron.gpt2.extensions.webtext.shards import json_line


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
