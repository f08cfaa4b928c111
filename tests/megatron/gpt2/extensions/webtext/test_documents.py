"""What a stage reads: files, folders, globs, compressed or not, and what of it is no document."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megatron.gpt2.extensions.webtext.documents import (
    Document,
    as_line,
    document_shards,
    is_seekable,
    read_at,
    read_documents,
)


def read(path: Path, text_key: str = "text") -> tuple[list[tuple[int, Document]], list[tuple[str, str]]]:
    skipped: list[tuple[str, str]] = []
    shards = document_shards([str(path)])
    found = [
        item
        for shard in shards
        for item in read_documents(
            shard.files, text_key, lambda reason, sample: skipped.append((reason, sample)), lambda count: None
        )
    ]
    return found, skipped


def test_json_lines_with_bad_ones(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    lines = [
        b'{"text": "one", "url": "u"}',
        b"",
        b'{"text": ""}',
        b"{",
        b"[1]",
        b'{"body": "x"}',
        b'{"text": 3}',
        b'{"text": "\\ud800"}',
        b'{"text": "\xff"}',
        '{"text": "zwei ü"}'.encode(),
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    found, skipped = read(path)
    assert [document["text"] for _, document in found] == ["one", "zwei ü"]
    assert [reason for reason, _ in skipped] == ["empty"] + 6 * ["unreadable"]
    assert [sample.split(": ")[0] for _, sample in skipped] == [f"{path}:{number}" for number in range(3, 10)]
    for offset, document in found:
        assert read_at(path, offset, "text") == document


@pytest.mark.parametrize("packed", ["gz", "zst"])
def test_compressed_files(tmp_path: Path, packed: str):
    content = as_line({"text": "packed"}) * 3
    if packed == "zst":
        content = pytest.importorskip("zstandard").ZstdCompressor().compress(content)
    else:
        content = gzip.compress(content)
    (tmp_path / f"b.jsonl.{packed}").write_bytes(content)
    found, skipped = read(tmp_path)
    assert [document["text"] for _, document in found] == ["packed"] * 3 and not skipped
    (shard,) = document_shards([str(tmp_path)])
    assert shard.name == "b" and not is_seekable(shard)
    (tmp_path / f"b.jsonl.{packed}").write_bytes(content[:-5])
    with pytest.raises(ValueError, match="is damaged"):
        read(tmp_path)


def test_a_folder_of_scraped_text(tmp_path: Path):
    for number in range(12):
        (tmp_path / f"{number:02d}.txt").write_text(f"text {number}\nof two lines")
    (tmp_path / "12.txt").write_bytes(b"\xff")
    (tmp_path / "13.txt").write_text(" \n")
    found, skipped = read(tmp_path)
    assert [document for _, document in found] == [
        {"id": f"{n:02d}.txt", "text": f"text {n}\nof two lines"} for n in range(12)
    ]
    assert [reason for reason, _ in skipped] == ["unreadable", "empty"]
    assert len(document_shards([str(tmp_path)])) == 1 and len(document_shards([str(tmp_path / "*.txt")])) == 1


def test_another_field(tmp_path: Path):
    (tmp_path / "a.json").write_text(json.dumps({"text": "no", "body": "yes"}))
    assert [document for _, document in read(tmp_path, "body")[0]] == [{"text": "yes"}]


def test_names_that_lead_nowhere_or_collide(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="in this folder"):
        document_shards([str(tmp_path)])
    with pytest.raises(FileNotFoundError, match=r"\*\.jsonl"):
        document_shards([str(tmp_path / "*.jsonl")])
    for name in ("a.jsonl", "a.jsonl.gz"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="would both become a"):
        document_shards([str(tmp_path)])
