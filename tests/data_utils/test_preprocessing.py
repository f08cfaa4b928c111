"""Test preprocessing: every format of input, bad lines, existing output and a full disk."""

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


def run(paths: str | list[str], prefix: Path, kind: str = "bytes", **more: Any) -> dict[str, Any]:
    inputs = (paths,) if isinstance(paths, str) else tuple(paths)
    options = {"keys": ("text",), "append_eod": True, "log": lambda line: None, **more}
    log = options.pop("log")
    return preprocessing.preprocess(
        PreprocessingJob(inputs, str(prefix), tokenizer=(("kind", kind),), **options), log=log
    )


def texts_of(prefix: Path, key: str = "text") -> list[str]:
    data = IndexedDataset(f"{prefix}_{key}_document")
    assert all(len(data[number]) and data[number][-1] == BYTES.eod for number in range(len(data)))
    return [BYTES.decode(data[number][:-1]) for number in range(len(data))]


@pytest.mark.parametrize("kind", ["bytes", "builtin"])
def test_output_equals_the_tokenizer(tmp_path: Path, kind: str) -> None:
    """The text "<|endoftext|>" must not become the end-of-document token."""
    texts, tokenizer = [*some_texts(300), "<|endoftext|>" * 100], build_tokenizer(kind)
    path = write_lines(tmp_path / "a.jsonl", texts)
    manifest = run(path, tmp_path / "out", kind)["text"]
    data = IndexedDataset(tmp_path / "out_text_document")
    assert [list(data[number]) for number in range(301)] == [[*tokenizer.encode(text), tokenizer.eod] for text in texts]
    assert int((data.tokens == tokenizer.eod).sum()) == manifest["documents"] == manifest["inputs"][0]["lines"] == 301
    assert (manifest["tokens"], manifest["text_bytes"]) == (len(data.tokens), len("".join(texts).encode()))
    run(path, tmp_path / "plain", kind, append_eod=False)
    plain = IndexedDataset(tmp_path / "plain_text_document").tokens
    assert list(plain) == list(data.tokens[data.tokens != tokenizer.eod])


def test_every_format_of_input(tmp_path: Path, small_shards: None) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = some_texts(200)
    plain = Path(write_lines(tmp_path / "a.jsonl", texts)).read_bytes()
    table = tmp_path / "i.parquet"
    parquet.write_table(pyarrow.table({"text": texts, "other": range(200)}), table, row_group_size=50)
    forms = {
        "b.jsonl.gz": gzip.compress(plain),
        "f.part-0": plain,
        "d.jsonl": b"\xef\xbb\xbf" + plain.rstrip().replace(b"\n", b"\r\n\n"),
        "e.json": json.dumps([{"text": text} for text in texts], indent=1).encode(),
        "i.parquet": table.read_bytes(),
    }
    for name, content in forms.items():
        run(write(tmp_path / name, content), tmp_path / f"out-{name}")
        assert texts_of(tmp_path / f"out-{name}") == texts, name
    with pytest.raises(ValueError, match="no column 'body', but text, other: --json-keys"):
        run(str(table), tmp_path / "damaged", keys=("body",))
    with pytest.raises(ValueError, match="i.parquet is damaged"):
        run(write(table, table.read_bytes()[:-40]), tmp_path / "damaged")
    assert not list(tmp_path.glob("damaged_*"))


def test_folders_and_several_keys(tmp_path: Path) -> None:
    """One input is a folder of plain text. The other input is a file of JSON lines with two fields."""
    (folder := tmp_path / "scraped").mkdir()
    pages = [f"page {number}\nsecond line\n" for number in range(3)]
    for number, text in enumerate(pages):
        write(folder / f"{number}.txt", text)
    run(str(folder), tmp_path / "pages")
    assert texts_of(tmp_path / "pages") == pages
    for prefix, keys, said in (
        (folder / "out", ("text",), "--output-prefix .* is inside the input folder"),
        (tmp_path / "out", ("a/b",), "--json-keys"),
    ):
        with pytest.raises(ValueError, match=said):
            run(str(folder), prefix, keys=keys)
    path = write(tmp_path / "a.jsonl", '{"title": "a", "body": "b"}\n{"title": "c", "body": ""}\n')
    manifests = run(path, tmp_path / "out", keys=("title", "body"))
    for key, texts, empty in (("title", ["a", "c"], 0), ("body", ["b"], 1)):
        assert texts_of(tmp_path / "out", key) == texts and manifests[key]["empty_documents"] == empty


# --- unusable lines


@pytest.mark.parametrize("with_orjson", [True, False])
def test_bad_lines_are_skipped_counted_and_saved(
    tmp_path: Path, small_shards: None, with_orjson: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_orjson:
        monkeypatch.setattr(preprocessing, "json_parser", lambda: json.loads)
    texts, said = some_texts(1000), list[str]()
    good = write_lines(tmp_path / "good.jsonl", texts)
    lines = Path(good).read_bytes().splitlines()
    for number, bad in enumerate([*BAD_LINES, b"", b'{"text": ""}']):
        lines.insert(70 * number + 9, bad)
    path = write(tmp_path / "a.jsonl", b"\n".join(lines))
    manifest = run([good, path], tmp_path / "out", log=said.append, max_bad_fraction=0.01)["text"]
    assert texts_of(tmp_path / "out") == texts * 2
    assert manifest["bad_lines"] == len(BAD_LINES) and manifest["empty_documents"] == 1
    quarantine = [json.loads(line) for line in (tmp_path / "out.bad.jsonl").read_text().splitlines()]
    found = [(entry["file"], lines[entry["line"] - 1]) for entry in quarantine]
    assert found == [(path, line) for line in BAD_LINES] and quarantine[0]["content"] == '{"text": "half'
    assert any("12 of 2,013 lines are unusable and left out" in line for line in said)


def test_too_many_bad_lines_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "a"}\n' * 99 + b"{\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:100: .*; 1 of 100 lines .*--max-bad-fraction 0.001.*bad\.jsonl"):
        run(path, tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl", "out.bad.jsonl", "out.shards"]
    run(path, tmp_path / "out", max_bad_fraction=0.01)  # The shard of the failed run is used again.
    assert len(texts_of(tmp_path / "out")) == 99


@pytest.mark.parametrize("content", [b"\n\n", b'{"text": ""}\n', b'{"body": "text"}\n' * 3000])
def test_an_empty_output_is_an_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match=r"holds no text|no field 'text'"):
        run(write(tmp_path / "a.json", content), tmp_path / "out", max_bad_fraction=1.0)
    assert not list(tmp_path.glob("out_*"))


# --- restarts


def test_existing_output_is_kept_or_refused(tmp_path: Path, small_shards: None) -> None:
    path, said = write_lines(tmp_path / "a.jsonl", some_texts(200)), list[str]()
    made = run(path, tmp_path / "out")
    assert run(path, tmp_path / "out", log=said.append) == made and "nothing to do" in said[0]
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
