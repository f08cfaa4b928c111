"""Lines and files that cannot be used: named, counted, kept aside; nothing is lost in silence."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from data_utils.preprocessing import shards
from tests.data_utils.preprocessing.jobs import run, some_texts, texts_of, write

BAD_LINES = [
    b'{"text": "half',
    b'{"id": 1}',
    b'{"text": 5}',
    b'["text"]',
    b'{"text": "\\ud800"}',
    b'{"text": "\xff"}',
    b"[" * 100_000,
    b'{"text": "a", "n": ' + b"9" * 10_000 + b"}",
    b'{"text": null}',
    b"null",
    b'"text"',
    b'{"text": "a"} {"text": "b"}',
]


@pytest.mark.parametrize("with_orjson", [True, False])
def test_bad_lines_are_skipped_counted_and_quarantined(
    tmp_path: Path, small_shards: None, with_orjson: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_orjson:
        monkeypatch.setattr(shards, "fast_json", lambda: json.loads)
    texts = some_texts(1000)
    good = Path(write(tmp_path / "good.jsonl", texts)).read_bytes().splitlines(keepends=True)
    content = list(good)
    for number, bad in enumerate(BAD_LINES):
        content.insert(80 * number + 79, bad + b"\n")
    content.insert(500, b"\n")
    content.append(b'{"text": ""}\n')
    (tmp_path / "a.jsonl").write_bytes(b"".join(content))
    said: list[str] = []
    manifest = run(
        [str(tmp_path / "good.jsonl"), str(tmp_path / "a.jsonl")], tmp_path / "out", said=said, max_bad_fraction=0.01
    )["text"]
    assert texts_of(tmp_path / "out") == texts * 2
    assert manifest["bad_lines"] == len(BAD_LINES) and manifest["empty_documents"] == 1
    quarantine = [json.loads(line) for line in (tmp_path / "out.bad.jsonl").read_text().splitlines()]
    assert [entry["file"] for entry in quarantine] == [str(tmp_path / "a.jsonl")] * len(BAD_LINES)
    lines = (tmp_path / "a.jsonl").read_bytes().split(b"\n")
    assert (
        [lines[entry["line"] - 1].decode("utf-8", "backslashreplace") for entry in quarantine]
        == [entry["content"] for entry in quarantine]
        == [bad.decode("utf-8", "backslashreplace") for bad in BAD_LINES]
    )
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
    whole = {
        "b.jsonl.gz": gzip.compress(plain),
        "c.jsonl.zst": zstandard.compress(plain),
        "d.parquet": (tmp_path / "a.parquet").read_bytes(),
    }
    for name, packed in whole.items():
        (tmp_path / name).write_bytes(packed[: len(packed) // 2])
        with pytest.raises(ValueError, match=rf"{name} is damaged"):
            run(str(tmp_path / name), tmp_path / "out")
    with pytest.raises(ValueError, match="no column 'body', but text: --json-keys"):
        run(str(tmp_path / "a.parquet"), tmp_path / "out", keys=("body",))
    with pytest.raises(FileNotFoundError, match="--input .*nowhere.*: no such file"):
        run(str(tmp_path / "nowhere*.jsonl"), tmp_path / "out")
    for bad, flag in (
        ({"workers": 0}, "--workers"),
        ({"max_bad_fraction": 2.0}, "--max-bad-fraction"),
        ({"inputs": (str(tmp_path),)}, "--output-prefix .* lies in the folder"),
        ({"keys": ("a", "a")}, "--json-keys"),
        ({"keys": ("a/b",)}, "--json-keys"),
    ):
        with pytest.raises(ValueError, match=flag):
            run(bad.pop("inputs", str(tmp_path / "a.jsonl")), tmp_path / "out", **bad)
    assert not list(tmp_path.glob("out_*")) and not list(tmp_path.glob("out.shards/*.tmp*"))


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
