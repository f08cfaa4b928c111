"""The contract of every stage: atomic output, no repeated work, every dropped entry is counted. The file also tests
reading of input."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from data_utils.files import read_checksummed_json, write_checksummed_json
from megatron.gpt2.extensions.webtext.shards import Document, ShardRun, WebtextStage, find_shards, json_line, read_at
from megatron.gpt2.extensions.webtext.stages import run_stage, stage_parser


def shorten(run: ShardRun) -> None:
    """Drop texts of fewer than `least` characters, and record the call."""
    with open(run.args.calls, "a") as file:
        file.write(f"{run.shard.name}\n")
    for document in run.documents():
        if document["text"] == "burst":
            raise OSError(28, "No space left on device")
        if len(document["text"]) < run.args.least:
            run.drop("short", document)
        else:
            run.write(document)


class ThreeShards:
    """Three shards of four texts, and a stage that processes them."""

    def __init__(self, folder: Path) -> None:
        self.input, self.output, self.calls = folder / "in", folder / "out", folder / "calls"
        self.input.mkdir()
        for shard in "abc":
            self.write(shard, [f"{shard}{number}" + number * "x" for number in range(4)])

    def write(self, shard: str, texts: Sequence[str]) -> None:
        (self.input / f"{shard}.jsonl").write_bytes(b"".join(json_line({"text": text}) for text in texts))

    def run(self, *flags: str, least: int = 3, library: str = "numpy") -> list[dict[str, Any]]:
        args = stage_parser(shorten).parse_args([str(self.input), str(self.output), "--workers", "1", *flags])
        args.least, args.calls = least, self.calls
        return run_stage(WebtextStage(shorten, args, ("least",), (library,)))

    def ran(self) -> str:
        """Return the shards that ran since the last call."""
        found = self.calls.read_text().split() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return "".join(found)

    def bytes(self) -> dict[str, bytes]:
        paths = [path for path in self.output.rglob("*") if path.is_file() and path.name != ".lock"]
        return {str(path.relative_to(self.output)): path.read_bytes() for path in paths}


@pytest.fixture
def shards(tmp_path: Path) -> ThreeShards:
    return ThreeShards(tmp_path)


def test_outputs_manifests_and_report(shards: ThreeShards, capsys: pytest.CaptureFixture[str]):
    manifests = shards.run()
    assert [manifest["input"]["name"] for manifest in manifests] == ["a", "b", "c"]
    assert read_checksummed_json(shards.output / "manifests/b.json") == manifests[1]
    manifest = manifests[0]
    assert (manifest["entered"], manifest["left"], manifest["parameters"]) == (4, 3, {"least": 3})
    assert manifest["dropped"] == {"short": {"count": 1, "samples": ["a0"]}}
    assert list(manifest["outputs"]) == ["a.jsonl"]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("shorten: 12 in, 9 out (75.0%); 3 shards")
    assert said[2].split() == ["short", "3", "25.0%", "a0"]
    one_worker = shards.bytes()
    shards.output.rename(shards.output.with_name("one_worker"))
    shards.input = shards.input.rename(shards.input.with_name("elsewhere"))
    shards.run("--workers", "2")
    assert shards.bytes() == one_worker


def test_complete_shards_are_skipped(shards: ThreeShards):
    shards.run()
    whole = shards.bytes()
    shards.ran()
    shards.run()
    assert not shards.ran()
    (shards.output / "b.jsonl").write_bytes(whole["b.jsonl"].replace(b"b", b"B"))  # The damage has the same size.
    shards.run()
    assert shards.ran() == "b" and shards.bytes() == whole
    (shards.output / "manifests/c.json").unlink()  # The stage was killed between the output and its manifest.
    (shards.output / ".a.jsonl.tmp").write_bytes(b"killed within")
    shards.run()
    assert shards.ran() == "c"
    shards.write("a", ["another text"])
    shards.run()
    assert shards.ran() == "a" and shards.bytes()["a.jsonl"] == json_line({"text": "another text"})
    shards.run(least=5)
    assert shards.ran() == "abc"
    shards.write("a", ["x"])  # A shard that becomes empty leaves no old output.
    shards.run()
    assert "a.jsonl" not in shards.bytes() and "manifests/a.json" in shards.bytes()
    foreign = shards.input / "b.jsonl"  # The manifest is from someone else and names a file outside of the folder.
    write_checksummed_json(shards.output / "manifests/b.json", {"outputs": {str(foreign): []}})
    shards.run()
    assert foreign.exists()
    (shards.output / "d.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"d\.jsonl was not written by this run"):
        shards.run()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_failure_leaves_nothing_half_written(shards: ThreeShards, workers: str):
    shards.write("b", ["whole", "burst"])
    with pytest.raises(OSError, match="no room left on the disk of .*out: free some, and run the same command again"):
        shards.run("--workers", workers)
    assert not [name for name in shards.bytes() if "b" in Path(name).name.partition(".")[0] or ".tmp" in name]
    shards.write("b", ["whole", "again"])
    shards.run("--workers", workers)
    assert len([name for name in shards.bytes() if name.endswith(".jsonl")]) == 3


def test_results_that_are_errors(shards: ThreeShards):
    with pytest.raises(ValueError, match=r"needs the package no-such-library: .*\[curate\]"):
        shards.run(library="no-such-library")
    assert not shards.ran()
    with pytest.raises(ValueError, match="all of 12 entries were dropped"):
        shards.run(least=99)
    with open(shards.input / "b.jsonl", "a") as file:
        file.write("{\n")
    with pytest.raises(ValueError, match=r"b\.jsonl:5: .*1 of 13 lines are unusable.*--max-bad-fraction 0.001"):
        shards.run()
    assert sum(manifest["left"] for manifest in shards.run("--max-bad-fraction", "0.1")) == 9
    (shards.input / "c.jsonl").write_text("{\n" * 1000)
    with pytest.raises(ValueError, match=r"c\.jsonl:1: .*all of the first 1000"):
        shards.run("--max-bad-fraction", "1")


def read(path: Path, text_key: str = "text") -> tuple[list[tuple[int, Document]], dict[str, dict[str, Any]]]:
    """Return the documents with their offsets, and the dropped entries."""
    found: list[tuple[int, Document]] = []
    dropped: dict[str, dict[str, Any]] = {}
    for shard in find_shards(str(path)):
        run = ShardRun(Namespace(text_key=text_key), shard)
        found += [(run.offset, document) for document in run.documents()]
        dropped.update(run.dropped)
    return found, dropped


def test_json_lines_with_bad_ones(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    lines = [
        b'\xef\xbb\xbf{"text": "one", "url": "u"}',
        b"",
        b'{"text": ""}',
        b"{",
        b'{"text": "x", "url": "\\ud800"}',
        b'{"text": "\xff"}',
        '{"text": "zwei ü"}'.encode(),
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    found, dropped = read(path)
    assert [document["text"] for _, document in found] == ["one", "zwei ü"]
    assert {reason: entry["count"] for reason, entry in dropped.items()} == {"empty": 1, "unreadable": 3}
    assert dropped["empty"]["samples"] == [f"{path}:3"]
    for offset, document in found:
        assert read_at(path, offset, "text") == document
    (tmp_path / "b.json").write_text(json.dumps({"text": "no", "body": "yes"}))
    assert read(tmp_path / "b.json", "body")[0] == [(0, {"text": "yes"})]


def test_a_folder_of_scraped_text(tmp_path: Path):
    for number, content in enumerate((b"\xef\xbb\xbfa text\r\nof two lines", b"\xff", b" \n")):
        (tmp_path / f"{number}.txt").write_bytes(content)
    found, dropped = read(tmp_path)
    assert found == [(0, {"id": "0.txt", "text": "a text\nof two lines"})] and sorted(dropped) == [
        "empty",
        "unreadable",
    ]
    assert [shard.name for shard in find_shards(str(tmp_path / "*.txt"))] == ["texts_00000"]


def test_missing_and_colliding_names(tmp_path: Path):
    for name, said in ("", "this folder has no file"), ("*.jsonl", r"\*\.jsonl"):
        with pytest.raises(FileNotFoundError, match=said):
            find_shards(str(tmp_path / name))
    for name in ("a.jsonl", "a.jsonl.gz", "a.of.urls"):
        (tmp_path / name).write_text("{}")
    assert [shard.name for shard in find_shards(str(tmp_path / "*urls"))] == ["a.of.urls"]
    with pytest.raises(ValueError, match="would both become a"):
        find_shards(str(tmp_path))
