"""Text to pairs: the same under any number of workers and for every form of input."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from data_utils import IndexedDataset
from data_utils.preprocessing import inputs, shards
from data_utils.preprocessing.inputs import cut, whole_file
from data_utils.preprocessing.preprocess import Job, report
from tests.data_utils.preprocessing.jobs import BUILTIN, BYTES, run, some_texts, texts_of, write


@pytest.mark.parametrize("kind", ["bytes", "builtin"])
def test_what_is_written_is_what_the_tokenizer_gives(tmp_path: Path, kind: str) -> None:
    texts = some_texts(300)
    manifest = run(write(tmp_path / "a.jsonl", texts), tmp_path / "out", kind)["text"]
    tokenizer = BYTES if kind == "bytes" else BUILTIN
    data = IndexedDataset(tmp_path / "out_text_document")
    assert [list(data[number]) for number in range(300)] == [[*tokenizer.encode(text), tokenizer.eod] for text in texts]
    assert manifest["documents"] == 300 and manifest["tokens"] == len(data.tokens)
    assert manifest["text_bytes"] == len("".join(texts).encode()) and manifest["inputs"][0]["lines"] == 300
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.jsonl",
        "out_text_document.bin",
        "out_text_document.idx",
        "out_text_document.json",
    ]
    lines = report(
        Job((str(tmp_path / "a.jsonl"),), str(tmp_path / "out"), ("text",), {"kind": kind}, True), manifest, 2.0
    )
    assert "300 documents" in lines[0] and "longest" in lines[1] and "0 bad lines" in lines[-2]


def test_no_text_can_inject_an_end_of_document(tmp_path: Path) -> None:
    texts = ["<|endoftext|>", "a<|endoftext|>b", "<|endoftext|>" * 100]
    run(write(tmp_path / "a.jsonl", texts), tmp_path / "out", "builtin")
    data = IndexedDataset(tmp_path / "out_text_document")
    assert len(data) == 3 and int((data.tokens == BUILTIN.eod).sum()) == 3
    assert texts_of(tmp_path / "out", tokenizer=BUILTIN) == texts


def test_without_append_eod_there_is_none(tmp_path: Path) -> None:
    run(write(tmp_path / "a.jsonl", ["ab", "c"]), tmp_path / "out", append_eod=False)
    assert bytes(IndexedDataset(tmp_path / "out_text_document").tokens.astype(np.uint8)) == b"abc"


def test_the_same_bytes_under_any_number_of_workers(tmp_path: Path, small_shards: None) -> None:
    texts = some_texts(600)
    path = write(tmp_path / "a.jsonl", texts)
    assert len(cut([whole_file(path, ("text",))])) > 10
    for workers in (1, 2):
        run(path, tmp_path / f"out{workers}", workers=workers)
    for suffix in (".bin", ".idx", ".json"):
        one, two = (tmp_path / f"out{workers}_text_document{suffix}" for workers in (1, 2))
        assert one.read_bytes() == two.read_bytes(), suffix
    assert texts_of(tmp_path / "out2") == texts


@pytest.mark.parametrize("size", [1, 100, 5000, 10**6])
def test_shards_hold_every_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(inputs, "LEAST_SHARD_BYTES", size)
    first, second = write(tmp_path / "a.jsonl", some_texts(100)), write(tmp_path / "b.jsonl", some_texts(3))
    spans = [span for shard in cut([whole_file(first, ("text",)), whole_file(second, ("text",))]) for span in shard]
    for path in (first, second):
        ranges = [(span.start, span.stop) for span in spans if span.path == path]
        assert ranges[0][0] == 0 and [stop for _, stop in ranges[:-1]] == [start for start, _ in ranges[1:]]
        data = Path(path).read_bytes()
        assert ranges[-1][1] == len(data) and all(data[stop - 1 : stop] == b"\n" for _, stop in ranges)
    run([first, second], tmp_path / "out")
    assert texts_of(tmp_path / "out") == some_texts(100) + some_texts(3)


def test_every_form_of_input(tmp_path: Path, small_shards: None) -> None:
    zstandard, pyarrow = pytest.importorskip("zstandard"), pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = some_texts(200)
    plain = Path(write(tmp_path / "a.jsonl", texts)).read_bytes()
    forms = {
        "b.jsonl.gz": gzip.compress(plain),
        "c.jsonl.zst": zstandard.compress(plain),
        "f.part-0": plain,
        "d.jsonl": b"\xef\xbb\xbf" + plain,
        "g.jsonl": plain.rstrip(),
        "h.jsonl": plain.replace(b"\n", b"\r\n\n"),
        "e.json": json.dumps([{"text": text} for text in texts], indent=1).encode(),
    }
    for name, content in forms.items():
        (tmp_path / name).write_bytes(content)
    parquet.write_table(pyarrow.table({"text": texts, "other": range(200)}), tmp_path / "i.parquet", row_group_size=50)
    for name in (*forms, "i.parquet"):
        run(str(tmp_path / name), tmp_path / f"out-{name}")
        assert texts_of(tmp_path / f"out-{name}") == texts, name


def test_plain_text_is_one_document_a_file_and_folders_and_patterns_are_taken(tmp_path: Path) -> None:
    folder = tmp_path / "scraped"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:03d}.txt").write_text(f"page {number}\nsecond line\n")
    expected = [f"page {number}\nsecond line\n" for number in range(30)]
    for given in (str(folder), str(folder / "*.txt"), tuple(map(str, sorted(folder.iterdir())))):
        run(given, tmp_path / "out")
        assert texts_of(tmp_path / "out") == expected
        for path in tmp_path.glob("out*"):
            path.unlink()


def test_a_document_longer_than_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "word and <|endoftext|> " * 5000
    path = write(tmp_path / "a.jsonl", [text, "b"])
    run(path, tmp_path / "whole", "builtin")
    monkeypatch.setattr(shards, "PART_CHARACTERS", 1000)
    run(path, tmp_path / "parts", "builtin")
    whole, parts = (tmp_path / f"{name}_text_document.bin" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()


def test_several_keys(tmp_path: Path) -> None:
    lines = [{"title": f"t{number}", "body": "" if number == 3 else f"b{number}"} for number in range(10)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifests = run(str(tmp_path / "a.jsonl"), tmp_path / "out", keys=("title", "body"))
    assert texts_of(tmp_path / "out", "title") == [f"t{number}" for number in range(10)]
    assert texts_of(tmp_path / "out", "body") == [f"b{number}" for number in range(10) if number != 3]
    assert manifests["body"]["empty_documents"] == 1 and manifests["title"]["empty_documents"] == 0


def test_the_index_of_many_documents_is_written_in_blocks(tmp_path: Path, small_shards: None) -> None:
    texts = ["a" * (number % 7 + 1) for number in range(3000)]
    run(write(tmp_path / "a.jsonl", texts), tmp_path / "out")
    index = (tmp_path / "out_text_document.idx").read_bytes()
    lengths = [len(text) + 1 for text in texts]
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * 2
    assert index == (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 8, 3000, 3001)
        + np.array(lengths, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + np.arange(3001, dtype="<i8").tobytes()
    )
