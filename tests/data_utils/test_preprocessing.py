"""Text to pairs: the same under any number of workers, nothing lost in silence, restartable at any point."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_utils import IndexedDataset, build_tokenizer, preprocess_plan, preprocess_shards, preprocessing
from data_utils.preprocess_plan import cut, piece_of
from data_utils.preprocessing import Job, preprocess, report

BYTES = build_tokenizer("bytes")
BUILTIN = build_tokenizer("builtin")


def write(path: Path, texts: list[str]) -> str:
    path.write_bytes(b"".join(json.dumps({"id": 1, "text": text}, ensure_ascii=bool(len(text) % 2)).encode() + b"\n"
                              for text in texts))
    return str(path)


def some_texts(count: int) -> list[str]:
    draw = random.Random(count)
    words = ["one", " two", "\n", "  ", "été", "😀", "<|endoftext|>", "日本", "\t", "'s", '"', "\\"]
    return ["".join(draw.choices(words, k=draw.randrange(1, 60))) for _ in range(count)]


def run(inputs: Any, prefix: Path, kind: str = "bytes", said: list[str] | None = None, **more: Any) -> dict[str, Any]:
    inputs = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    job = Job(**{"inputs": inputs, "output_prefix": str(prefix), "keys": ("text",), "tokenizer": {"kind": kind},
                 "append_eod": True, **more})
    return preprocess(job, log=(said if said is not None else []).append,
                      progress=lambda total: contextlib.nullcontext(lambda read, tokens: None))


def texts_of(prefix: Path, key: str = "text", tokenizer: Any = BYTES) -> list[str]:
    data = IndexedDataset(f"{prefix}_{key}_document")
    assert all(len(data[number]) and data[number][-1] == tokenizer.eod for number in range(len(data)))
    return [tokenizer.decode(data[number][:-1]) for number in range(len(data))]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess_plan, "LEAST_SHARD_BYTES", 5000)


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
        "a.jsonl", "out_text_document.bin", "out_text_document.idx", "out_text_document.json"]
    lines = report(Job((str(tmp_path / "a.jsonl"),), str(tmp_path / "out"), ("text",), {"kind": kind}, True),
                   manifest, 2.0)
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
    assert len(cut([piece_of(path, ("text",))])) > 10
    for workers in (1, 2):
        run(path, tmp_path / f"out{workers}", workers=workers)
    for suffix in (".bin", ".idx", ".json"):
        one, two = (tmp_path / f"out{workers}_text_document{suffix}" for workers in (1, 2))
        assert one.read_bytes() == two.read_bytes(), suffix
    assert texts_of(tmp_path / "out2") == texts


@pytest.mark.parametrize("size", [1, 100, 5000, 10**6])
def test_shards_hold_every_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(preprocess_plan, "LEAST_SHARD_BYTES", size)
    first, second = write(tmp_path / "a.jsonl", some_texts(100)), write(tmp_path / "b.jsonl", some_texts(3))
    pieces = [piece for shard in cut([piece_of(first, ("text",)), piece_of(second, ("text",))]) for piece in shard]
    for path in (first, second):
        ranges = [(piece.start, piece.stop) for piece in pieces if piece.path == path]
        assert ranges[0][0] == 0 and [stop for _, stop in ranges[:-1]] == [start for start, _ in ranges[1:]]
        data = Path(path).read_bytes()
        assert ranges[-1][1] == len(data) and all(data[stop - 1:stop] == b"\n" for _, stop in ranges)
    run([first, second], tmp_path / "out")
    assert texts_of(tmp_path / "out") == some_texts(100) + some_texts(3)


def test_every_form_of_input(tmp_path: Path, small_shards: None) -> None:
    zstandard, pyarrow = pytest.importorskip("zstandard"), pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = some_texts(200)
    plain = Path(write(tmp_path / "a.jsonl", texts)).read_bytes()
    forms = {"b.jsonl.gz": gzip.compress(plain), "c.jsonl.zst": zstandard.compress(plain), "f.part-0": plain,
             "d.jsonl": b"\xef\xbb\xbf" + plain, "g.jsonl": plain.rstrip(), "h.jsonl": plain.replace(b"\n", b"\r\n\n"),
             "e.json": json.dumps([{"text": text} for text in texts], indent=1).encode()}
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
    for inputs in (str(folder), str(folder / "*.txt"), tuple(map(str, sorted(folder.iterdir())))):
        run(inputs, tmp_path / "out")
        assert texts_of(tmp_path / "out") == expected
        for path in tmp_path.glob("out*"):
            path.unlink()


def test_a_document_longer_than_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "word and <|endoftext|> " * 5000
    path = write(tmp_path / "a.jsonl", [text, "b"])
    run(path, tmp_path / "whole", "builtin")
    monkeypatch.setattr(preprocess_shards, "PIECE_CHARACTERS", 1000)
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


BAD_LINES = [b'{"text": "half', b'{"id": 1}', b'{"text": 5}', b'["text"]', b'{"text": "\\ud800"}', b'{"text": "\xff"}',
             b"[" * 100_000, b'{"text": "a", "n": ' + b"9" * 10_000 + b"}", b'{"text": null}', b"null", b'"text"',
             b'{"text": "a"} {"text": "b"}']


@pytest.mark.parametrize("with_orjson", [True, False])
def test_bad_lines_are_skipped_counted_and_quarantined(tmp_path: Path, small_shards: None, with_orjson: bool,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_orjson:
        monkeypatch.setattr(preprocess_shards, "fast_json", lambda: json.loads)
    texts = some_texts(1000)
    good = Path(write(tmp_path / "good.jsonl", texts)).read_bytes().splitlines(keepends=True)
    content = list(good)
    for number, bad in enumerate(BAD_LINES):
        content.insert(80 * number + 79, bad + b"\n")
    content.insert(500, b"\n")
    content.append(b'{"text": ""}\n')
    (tmp_path / "a.jsonl").write_bytes(b"".join(content))
    said: list[str] = []
    manifest = run([str(tmp_path / "good.jsonl"), str(tmp_path / "a.jsonl")], tmp_path / "out", said=said,
                   max_bad_fraction=0.01)["text"]
    assert texts_of(tmp_path / "out") == texts * 2
    assert manifest["bad_lines"] == len(BAD_LINES) and manifest["empty_documents"] == 1
    quarantine = [json.loads(line) for line in (tmp_path / "out.bad.jsonl").read_text().splitlines()]
    assert [entry["file"] for entry in quarantine] == [str(tmp_path / "a.jsonl")] * len(BAD_LINES)
    lines = (tmp_path / "a.jsonl").read_bytes().split(b"\n")
    assert [lines[entry["line"] - 1].decode("utf-8", "backslashreplace") for entry in quarantine] == \
        [entry["content"] for entry in quarantine] == [bad.decode("utf-8", "backslashreplace") for bad in BAD_LINES]
    assert any("12 of 2,013 lines are unusable and left out" in line for line in said)


def test_lines_of_plain_text_that_are_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"line\n" * 2000 + b"\xff\n" + b"line\n")
    run(str(tmp_path / "a.txt"), tmp_path / "out")
    assert texts_of(tmp_path / "out") == ["line\n" * 2001]
    assert json.loads((tmp_path / "out.bad.jsonl").read_text())["line"] == 2001


def test_too_many_bad_lines_are_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(Path(write(path, ["a"] * 99)).read_bytes() + b"{\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:100: .*; 1 of 100 lines .*--max-bad-fraction 0.001.*bad\.jsonl"):
        run(str(path), tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl", "out.bad.jsonl", "out.shards"]
    run(str(path), tmp_path / "out", max_bad_fraction=0.01)  # the shard is taken up
    assert len(texts_of(tmp_path / "out")) == 99


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"text": ""}\n', b"[]", b'{"body": "text"}\n' * 3000])
def test_an_empty_output_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"holds no text|no field 'text'"):
        run(str(tmp_path / "a.json"), tmp_path / "out", max_bad_fraction=1.0)
    assert not list(tmp_path.glob("out_*"))


def test_damaged_and_missing_input(tmp_path: Path) -> None:
    zstandard, pyarrow = pytest.importorskip("zstandard"), pytest.importorskip("pyarrow")
    from pyarrow import parquet

    plain = Path(write(tmp_path / "a.jsonl", some_texts(2000))).read_bytes()
    parquet.write_table(pyarrow.table({"text": some_texts(2000)}), tmp_path / "a.parquet")
    whole = {"b.jsonl.gz": gzip.compress(plain), "c.jsonl.zst": zstandard.compress(plain),
             "d.parquet": (tmp_path / "a.parquet").read_bytes()}
    for name, packed in whole.items():
        (tmp_path / name).write_bytes(packed[:len(packed) // 2])
        with pytest.raises(ValueError, match=rf"{name} is damaged"):
            run(str(tmp_path / name), tmp_path / "out")
    with pytest.raises(ValueError, match="no column 'body', but text: --json-keys"):
        run(str(tmp_path / "a.parquet"), tmp_path / "out", keys=("body",))
    with pytest.raises(FileNotFoundError, match="--input .*nowhere.*: no such file"):
        run(str(tmp_path / "nowhere*.jsonl"), tmp_path / "out")
    for bad, flag in (({"workers": 0}, "--workers"), ({"max_bad_fraction": 2.0}, "--max-bad-fraction"),
                      ({"inputs": (str(tmp_path),)}, "--output-prefix .* lies in the folder"),
                      ({"keys": ("a", "a")}, "--json-keys"), ({"keys": ("a/b",)}, "--json-keys")):
        with pytest.raises(ValueError, match=flag):
            run(bad.pop("inputs", str(tmp_path / "a.jsonl")), tmp_path / "out", **bad)
    assert not list(tmp_path.glob("out_*")) and not list(tmp_path.glob("out.shards/*.tmp*"))


def test_finished_shards_are_taken_up_and_damaged_or_stale_ones_made_again(
        tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = some_texts(400)
    path = write(tmp_path / "a.jsonl", texts)
    expected = run(path, tmp_path / "expected")
    count = len(cut([piece_of(path, ("text",))]))
    taken: list[int] = []
    stop = 4
    original = preprocess_shards._Writer.take

    def take(self: Any, number: int, piece: Any, progress: Any) -> Any:
        taken.append(piece.start)
        if len(taken) == stop:
            raise KeyboardInterrupt
        return original(self, number, piece, progress)

    monkeypatch.setattr(preprocess_shards._Writer, "take", take)
    with pytest.raises(KeyboardInterrupt):
        run(path, tmp_path / "out")
    assert not list(tmp_path.glob("out.shards/*.tmp*")) and not list(tmp_path.glob("out_*"))
    shards = tmp_path / "out.shards"
    damaged = bytearray((shards / "00000_text.bin").read_bytes())
    damaged[7] ^= 1
    (shards / "00000_text.bin").write_bytes(damaged)
    (shards / "00001.json").write_text((shards / "00001.json").read_text().replace("1", "2", 1))
    (shards / "00002.5.tmp_text.bin").write_bytes(b"half")  # of a process that was killed
    del taken[:]
    stop = -1
    found = run(path, tmp_path / "out")
    assert len(taken) == count - 1  # shard 2 alone was whole
    assert found == expected and texts_of(tmp_path / "out") == texts
    assert (tmp_path / "out_text_document.idx").read_bytes() == (tmp_path / "expected_text_document.idx").read_bytes()


def test_a_changed_input_makes_its_shards_again(tmp_path: Path, small_shards: None,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"text {number:04d}" for number in range(2000)]
    path = write(tmp_path / "a.jsonl", texts)
    with monkeypatch.context() as patch:
        patch.setattr(preprocessing, "_publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(path, tmp_path / "out")
    texts[1000] = "TEXT 1000"
    write(tmp_path / "a.jsonl", texts)
    run(path, tmp_path / "out")
    assert texts_of(tmp_path / "out") == texts


def test_done_is_done_and_another_recipe_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", some_texts(20))
    first = run(path, tmp_path / "out")
    said: list[str] = []
    before = (tmp_path / "out_text_document.bin").stat()
    assert run(path, tmp_path / "out", said=said) == first and "nothing to do" in said[0]
    assert (tmp_path / "out_text_document.bin").stat().st_mtime_ns == before.st_mtime_ns
    for change in ({"append_eod": False}, {"kind": "builtin"}, {"inputs": (path, path)}):
        with pytest.raises(ValueError, match="exists and was made of other input or in another way"):
            run(change.pop("inputs", path), tmp_path / "out", **change)
    write(tmp_path / "a.jsonl", some_texts(21))
    with pytest.raises(ValueError, match="exists and was made of other input"):
        run(path, tmp_path / "out")


def test_too_small_a_disk_is_said_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", some_texts(2000))
    free = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    with pytest.raises(OSError, match="about 0.00 GB are needed.*free on that disk"):
        run(path, tmp_path / "out")


def test_fuzzed_lines_mean_the_same_with_and_without_orjson(tmp_path: Path) -> None:
    orjson = pytest.importorskip("orjson")
    draw = random.Random(7)
    seeds = [json.dumps({"text": text, "n": [1.5, None, {"a": -2e9}]}).encode() for text in some_texts(200)]
    accepted = 0
    for seed in seeds * 20:
        line = bytearray(seed)
        for _ in range(draw.randrange(1, 3)):
            line[draw.randrange(len(line))] = draw.choice(b'"\\{}[],:0159eE+-.nul\x00\x1f\x80\xc3\xed')
        try:
            found = orjson.loads(bytes(line))
        except ValueError:
            continue
        assert json.loads(bytes(line).decode("utf-8")) == found
        accepted += 1
    assert accepted > 200


def test_the_index_of_many_documents_is_written_in_blocks(tmp_path: Path, small_shards: None) -> None:
    texts = ["a" * (number % 7 + 1) for number in range(3000)]
    run(write(tmp_path / "a.jsonl", texts), tmp_path / "out")
    index = (tmp_path / "out_text_document.idx").read_bytes()
    lengths = [len(text) + 1 for text in texts]
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * 2
    assert index == (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3000, 3001) + np.array(lengths, "<i4").tobytes()
                     + pointers.astype("<i8").tobytes() + np.arange(3001, dtype="<i8").tobytes())
