"""Test preprocessing: any number of workers, every format of input, bad lines, restarts."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from data_utils import IndexedDataset, build_tokenizer, preprocessing
from data_utils.preprocessing import PreprocessingJob, inputs
from tests.data_utils.data_files import BAD_LINES, BYTES, write, write_lines


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MIN_SHARD_BYTES", 10_000)


def some_texts(count: int) -> list[str]:
    draw = random.Random(count)
    words = ["one", " two", "\n", "  ", "été", "😀", "<|endoftext|>", "日本", "\t", "'s", '"', "\\"]
    return ["".join(draw.choices(words, k=draw.randrange(1, 60))) for _ in range(count)]


def run(paths: Any, prefix: Path, kind: str = "bytes", said: list[str] | None = None, **more: Any) -> dict[str, Any]:
    given = (paths,) if isinstance(paths, str) else tuple(paths)
    options = {"keys": ("text",), "tokenizer": (("kind", kind),), "append_eod": True, **more}
    return preprocessing.preprocess(
        PreprocessingJob(given, str(prefix), **options), log=([] if said is None else said).append
    )


def texts_of(prefix: Path, key: str = "text") -> list[str]:
    data = IndexedDataset(f"{prefix}_{key}_document")
    assert all(len(data[number]) and data[number][-1] == BYTES.eod for number in range(len(data)))
    return [BYTES.decode(data[number][:-1]) for number in range(len(data))]


@pytest.mark.parametrize("kind", ["bytes", "builtin"])
def test_output_equals_the_tokenizer(tmp_path: Path, kind: str) -> None:
    """No text can inject an end-of-document token."""
    texts = [*some_texts(300), "<|endoftext|>", "a<|endoftext|>b", "<|endoftext|>" * 100]
    path, prefix = write_lines(tmp_path / "a.jsonl", texts), f"{tmp_path}/out_text_document"
    manifest = run(path, tmp_path / "out", kind)["text"]
    tokenizer, data = build_tokenizer(kind), IndexedDataset(prefix)
    assert [list(data[number]) for number in range(303)] == [[*tokenizer.encode(text), tokenizer.eod] for text in texts]
    assert int((data.tokens == tokenizer.eod).sum()) == manifest["documents"] == 303
    assert manifest["tokens"] == len(data.tokens) and manifest["inputs"][0]["lines"] == 303
    assert manifest["text_bytes"] == len("".join(texts).encode())
    run(path, tmp_path / "plain", kind, append_eod=False)
    plain = IndexedDataset(tmp_path / "plain_text_document").tokens
    assert list(plain) == list(data.tokens[data.tokens != tokenizer.eod])


def test_every_format_of_input(tmp_path: Path, small_shards: None) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = some_texts(200)
    plain = Path(write_lines(tmp_path / "a.jsonl", texts)).read_bytes()
    forms = {
        "b.jsonl.gz": gzip.compress(plain),
        "f.part-0": plain,
        "d.jsonl": b"\xef\xbb\xbf" + plain,
        "g.jsonl": plain.rstrip(),
        "h.jsonl": plain.replace(b"\n", b"\r\n\n"),
        "e.json": json.dumps([{"text": text} for text in texts], indent=1).encode(),
    }
    for name, content in forms.items():
        write(tmp_path / name, content)
    parquet.write_table(pyarrow.table({"text": texts, "other": range(200)}), tmp_path / "i.parquet", row_group_size=50)
    for name in (*forms, "i.parquet"):
        run(str(tmp_path / name), tmp_path / f"out-{name}")
        assert texts_of(tmp_path / f"out-{name}") == texts, name
    with pytest.raises(ValueError, match="no column 'body', but text, other: --json-keys"):
        run(str(tmp_path / "i.parquet"), tmp_path / "damaged", keys=("body",))
    path = write(tmp_path / "i.parquet", (tmp_path / "i.parquet").read_bytes()[:-40])
    with pytest.raises(ValueError, match="i.parquet is damaged"):
        run(path, tmp_path / "damaged")
    assert not list(tmp_path.glob("damaged_*"))


def test_folders_and_several_keys(tmp_path: Path) -> None:
    """A folder contains plain text, the other input has two fields."""
    (folder := tmp_path / "scraped").mkdir()
    pages = [f"page {number}\nsecond line\n" for number in range(3)]
    for number, text in enumerate(pages):
        write(folder / f"{number}.txt", text)
    run(str(folder), tmp_path / "pages")
    assert texts_of(tmp_path / "pages") == pages
    with pytest.raises(ValueError, match="--output-prefix .* is inside the input folder"):
        run(str(folder), folder / "out")
    with pytest.raises(ValueError, match="--json-keys"):
        run(str(folder), tmp_path / "out", keys=("a/b",))
    lines = [{"title": f"t{number}", "body": "" if number == 3 else f"b{number}"} for number in range(10)]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    manifests = run(path, tmp_path / "out", keys=("title", "body"))
    for key, empty in (("title", 0), ("body", 1)):
        assert texts_of(tmp_path / "out", key) == [line[key] for line in lines if line[key]]
        assert manifests[key]["empty_documents"] == empty


# --- unusable lines


@pytest.mark.parametrize("with_orjson", [True, False])
def test_bad_lines_are_skipped_counted_and_saved(
    tmp_path: Path, small_shards: None, with_orjson: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_orjson:
        monkeypatch.setattr(preprocessing, "json_parser", lambda: json.loads)
    texts = some_texts(1000)
    good = write_lines(tmp_path / "good.jsonl", texts)
    content = Path(good).read_bytes().splitlines(keepends=True)
    for number, bad in enumerate(BAD_LINES):
        content.insert(80 * number + 79, bad + b"\n")
    content.insert(500, b"\n")
    path, said = write(tmp_path / "a.jsonl", b"".join([*content, b'{"text": ""}\n'])), list[str]()
    manifest = run([good, path], tmp_path / "out", said=said, max_bad_fraction=0.01)["text"]
    assert texts_of(tmp_path / "out") == texts * 2
    assert manifest["bad_lines"] == len(BAD_LINES) and manifest["empty_documents"] == 1
    quarantine = [json.loads(line) for line in (tmp_path / "out.bad.jsonl").read_text().splitlines()]
    assert [entry["file"] for entry in quarantine] == [path] * len(BAD_LINES)
    lines = Path(path).read_bytes().split(b"\n")
    assert [lines[entry["line"] - 1] for entry in quarantine] == BAD_LINES
    assert [entry["content"] for entry in quarantine][:1] == ['{"text": "half']
    assert any("12 of 2,013 lines are unusable and left out" in line for line in said)


def test_too_many_bad_lines_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "a"}\n' * 99 + b"{\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:100: .*; 1 of 100 lines .*--max-bad-fraction 0.001.*bad\.jsonl"):
        run(path, tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl", "out.bad.jsonl", "out.shards"]
    run(path, tmp_path / "out", max_bad_fraction=0.01)  # The finished shard is used again.
    assert len(texts_of(tmp_path / "out")) == 99


@pytest.mark.parametrize("content", [b"\n\n", b'{"text": ""}\n', b'{"body": "text"}\n' * 3000])
def test_an_empty_output_is_an_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match=r"holds no text|no field 'text'"):
        run(write(tmp_path / "a.json", content), tmp_path / "out", max_bad_fraction=1.0)
    assert not list(tmp_path.glob("out_*"))


# --- restarts


def test_existing_output_is_kept_or_refused(tmp_path: Path, small_shards: None) -> None:
    path, said = write_lines(tmp_path / "a.jsonl", some_texts(200)), list[str]()
    made, before = run(path, tmp_path / "out"), (tmp_path / "out_text_document.bin").stat()
    assert run(path, tmp_path / "out", said=said) == made and "nothing to do" in said[0]
    assert (tmp_path / "out_text_document.bin").stat().st_mtime_ns == before.st_mtime_ns
    other = write_lines(tmp_path / "b.jsonl", some_texts(21))
    for given, change in ((path, {"append_eod": False}), (path, {"kind": "builtin"}), (other, {})):
        with pytest.raises(ValueError, match="exists and was made from different input or in a different way"):
            run(given, tmp_path / "out", **change)


@pytest.mark.parametrize("file", ["00000_text.bin", "00001_text.idx", "merged_text.bin", "merged_text.idx"])
def test_a_full_disk(tmp_path: Path, small_shards: None, file: str) -> None:
    texts = some_texts(300)
    path, full = write_lines(tmp_path / "a.jsonl", texts), tmp_path / "out.shards" / file
    full.parent.mkdir()
    full.symlink_to("/dev/full")  # Each write to /dev/full fails as on a full disk.
    with pytest.raises(OSError, match="no room left on the disk of .*/out: free some, .* with the finished shards"):
        run(path, tmp_path / "out")
    assert not full.is_symlink() and not list(tmp_path.glob("out_*"))
    run(path, tmp_path / "out")
    assert texts_of(tmp_path / "out") == texts
