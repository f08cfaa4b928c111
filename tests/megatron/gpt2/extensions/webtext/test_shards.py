"""The contract of every stage: whole or not at all, not twice, and no loss without a word. And what a stage reads."""

from __future__ import annotations

import gzip
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.extensions.webtext.near_duplicates import is_seekable
from megatron.gpt2.extensions.webtext.shards import Document, ShardRun, Stage, as_line, find_shards, read_at
from megatron.gpt2.extensions.webtext.stages import run_stage, stage_parser


def shorten(run: ShardRun) -> None:
    """Drops texts of fewer than `least` characters, and notes that it ran."""
    with open(run.args.calls, "a") as file:
        file.write(f"{run.shard.name}\n")
    for document in run.documents():
        if document["text"] == "burst":
            raise OSError(28, "No space left on device")
        if len(document["text"]) < run.args.least:
            run.drop("short", document)
        else:
            run.write(document)


class Setting:
    """Three shards of four texts, and a stage over them."""

    def __init__(self, folder: Path) -> None:
        self.input, self.output, self.calls = folder / "in", folder / "out", folder / "calls"
        self.input.mkdir()
        for shard in "abc":
            self.write(shard, [f"{shard}{number}" + number * "x" for number in range(4)])

    def write(self, shard: str, texts: Sequence[str]) -> None:
        (self.input / f"{shard}.jsonl").write_bytes(b"".join(as_line({"text": text}) for text in texts))

    def run(self, *flags: str, least: int = 3, library: str = "numpy", **options: Any) -> list[dict[str, Any]]:
        args = stage_parser(shorten).parse_args([str(self.input), str(self.output), "--workers", "1", *flags])
        args.least, args.calls = least, self.calls
        return run_stage(Stage("shorten", shorten, args, ("least",), (library,)), **options)

    def ran(self) -> str:
        """The shards that were worked on since this was asked last."""
        found = self.calls.read_text().split() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return "".join(found)

    def bytes(self) -> dict[str, bytes]:
        paths = [path for path in self.output.rglob("*") if path.is_file() and path.name != ".lock"]
        return {str(path.relative_to(self.output)): path.read_bytes() for path in paths}


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def test_outputs_manifests_and_report(setting: Setting, capsys: pytest.CaptureFixture[str]):
    manifests = setting.run()
    assert [manifest["input"]["name"] for manifest in manifests] == ["a", "b", "c"]
    assert json.loads((setting.output / "manifests/b.json").read_text()) == manifests[1]
    manifest = manifests[0]
    assert (manifest["entered"], manifest["left"], manifest["parameters"]) == (4, 3, {"least": 3})
    assert manifest["dropped"] == {"short": {"count": 1, "samples": ["a0"]}}
    assert [entry["name"] for entry in manifest["outputs"]] == ["a.jsonl"]
    assert sorted(setting.bytes()) == [f"{shard}.jsonl" for shard in "abc"] + [
        f"manifests/{shard}.json" for shard in "abc"
    ]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("shorten: 12 in, 9 out (75.0%); 3 shards")
    assert said[2].split() == ["short", "3", "25.0%", "a0"]
    alone = setting.bytes()
    setting.output.rename(setting.output.with_name("alone"))
    setting.input = setting.input.rename(setting.input.with_name("elsewhere"))
    setting.run("--workers", "2")
    assert setting.bytes() == alone and len(setting.ran()) == 6


def test_only_what_is_not_done_is_done_again(setting: Setting):
    setting.run()
    whole = setting.bytes()
    setting.ran()
    setting.run()
    assert not setting.ran()
    (setting.output / "b.jsonl").write_bytes(whole["b.jsonl"].replace(b"b", b"B"))  # damage of the same size
    setting.run()
    assert setting.ran() == "b" and setting.bytes() == whole
    (setting.output / "manifests/c.json").unlink()  # killed between the output and its manifest
    (setting.output / ".a.jsonl.tmp").write_bytes(b"killed within")
    setting.run()
    assert setting.ran() == "c"
    setting.write("a", ["another text"])
    setting.run()
    assert setting.ran() == "a" and setting.bytes()["a.jsonl"] == as_line({"text": "another text"})
    setting.run(least=5)
    assert setting.ran() == "abc"
    setting.write("a", ["x"])  # a shard that becomes empty leaves no old output
    setting.run()
    assert "a.jsonl" not in setting.bytes() and "manifests/a.json" in setting.bytes()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_failure_leaves_nothing_half_written(setting: Setting, workers: str):
    setting.write("b", ["whole", "burst"])
    with pytest.raises(OSError, match="out: the disk is full"):
        setting.run("--workers", workers)
    assert not [name for name in setting.bytes() if "b" in Path(name).name.partition(".")[0] or ".tmp" in name]
    setting.write("b", ["whole", "again"])
    setting.run("--workers", workers)
    assert len([name for name in setting.bytes() if name.endswith(".jsonl")]) == 3


def test_results_that_are_errors(setting: Setting):
    with pytest.raises(ValueError, match=r"needs no-such-library: .*\[curate\]"):
        setting.run(library="no-such-library")
    assert not setting.ran()
    with pytest.raises(ValueError, match="all of 12 entries were dropped"):
        setting.run(least=99)
    with open(setting.input / "b.jsonl", "a") as file:
        file.write("{\n")
    with pytest.raises(ValueError, match=r"b\.jsonl:5: .*1 of 13 entries are unreadable.*--max-bad-fraction 0.001"):
        setting.run()
    assert sum(manifest["left"] for manifest in setting.run("--max-bad-fraction", "0.1")) == 9
    (setting.input / "c.jsonl").write_text("{\n" * 1000)
    with pytest.raises(ValueError, match=r"c\.jsonl:1: .*all of the first 1000"):
        setting.run("--max-bad-fraction", "1")
    (setting.input / "c.jsonl").unlink()
    (setting.output / "c.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"c\.jsonl is not of this run"):
        setting.run("--max-bad-fraction", "1")
    setting.run("--max-bad-fraction", "1", alone=False)


@pytest.mark.parametrize(("limit", "entered"), [(1, [1]), (4, [4]), (6, [4, 2]), (99, [4, 4, 4])])
def test_limit(setting: Setting, limit: int, entered: list[int]):
    assert [manifest["entered"] for manifest in setting.run("--limit", str(limit), least=1)] == entered


def read(path: Path, text_key: str = "text") -> tuple[list[tuple[int, Document]], dict[str, dict[str, Any]]]:
    """The documents with their offsets, and those that were dropped."""
    found: list[tuple[int, Document]] = []
    dropped: dict[str, dict[str, Any]] = {}
    for shard in find_shards(str(path)):
        run = ShardRun(Namespace(text_key=text_key), shard)
        found += run.located()
        dropped.update(run.dropped)
    return found, dropped


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
        b'{"text": "x", "url": "\\ud800"}',
        b'{"text": "\xff"}',
        '{"text": "zwei ü"}'.encode(),
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    found, dropped = read(path)
    assert [document["text"] for _, document in found] == ["one", "zwei ü"]
    assert {reason: entry["count"] for reason, entry in dropped.items()} == {"empty": 1, "unreadable": 6}
    assert dropped["empty"]["samples"] == [f"{path}:3"]
    assert [sample.split(": ")[0] for sample in dropped["unreadable"]["samples"]] == [f"{path}:{n}" for n in (4, 5, 6)]
    for offset, document in found:
        assert read_at(path, offset, "text") == document
    (tmp_path / "b.json").write_text(json.dumps({"text": "no", "body": "yes"}))
    assert read(tmp_path / "b.json", "body")[0] == [(0, {"text": "yes"})]


def test_compressed_files(tmp_path: Path):
    content = gzip.compress(as_line({"text": "packed"}) * 3)
    (tmp_path / "b.jsonl.gz").write_bytes(content)
    found, dropped = read(tmp_path)
    assert [document["text"] for _, document in found] == ["packed"] * 3 and not dropped
    (shard,) = find_shards(str(tmp_path))
    assert (shard.name, shard.bytes, is_seekable(shard)) == ("b", len(content), False)


def test_a_folder_of_scraped_text(tmp_path: Path):
    for number in range(12):
        (tmp_path / f"{number:02d}.txt").write_text(f"text {number}\nof two lines")
    (tmp_path / "12.txt").write_bytes(b"\xff")
    (tmp_path / "13.txt").write_text(" \n")
    found, dropped = read(tmp_path)
    expected = [{"id": f"{n:02d}.txt", "text": f"text {n}\nof two lines"} for n in range(12)]
    assert [document for _, document in found] == expected and sorted(dropped) == ["empty", "unreadable"]
    assert [shard.name for shard in find_shards(str(tmp_path / "*.txt"))] == ["texts_00000"]


def test_names_that_lead_nowhere_or_collide(tmp_path: Path):
    for name, said in ("", "in this folder"), ("*.jsonl", r"\*\.jsonl"):
        with pytest.raises(FileNotFoundError, match=said):
            find_shards(str(tmp_path / name))
    for name in ("a.jsonl", "a.jsonl.gz", "a.of.urls"):
        (tmp_path / name).write_text("{}")
    assert [shard.name for shard in find_shards(str(tmp_path / "*urls"))] == ["a.of.urls"]
    with pytest.raises(ValueError, match="would both become a"):
        find_shards(str(tmp_path))
