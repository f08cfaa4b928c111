"""Test what all steps share: atomic output, no repeated work, counts of dropped entries, and the reading of input."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from data_utils.files import read_checksummed_json, write_checksummed_json
from megatron.gpt2.extensions.webtext.runner import run_step, step_parser
from megatron.gpt2.extensions.webtext.step import Document, StepRun, WebtextStep, find_inputs, json_line, read_at


def shorten(run: StepRun) -> None:
    """Drop texts of fewer than `least` characters, and record the call."""
    with open(run.args.calls, "a") as file:
        file.write(f"{run.source.name}\n")
    for document in run.documents():
        if document["text"] == "burst":
            raise OSError(28, "No space left on device")
        if len(document["text"]) < run.args.least:
            run.drop("short", document)
        else:
            run.write(document)


class ThreeInputs:
    """Three files of four texts, and a step that processes the files."""

    def __init__(self, folder: Path) -> None:
        self.input, self.output, self.calls = folder / "in", folder / "out", folder / "calls"
        self.input.mkdir()
        for name in "abc":
            self.write(name, [f"{name}{number}" + number * "x" for number in range(4)])

    def write(self, name: str, texts: Sequence[str]) -> None:
        (self.input / f"{name}.jsonl").write_bytes(b"".join(json_line({"text": text}) for text in texts))

    def run(self, *flags: str, least: int = 3, library: str = "numpy") -> list[dict[str, Any]]:
        args = step_parser(shorten).parse_args([str(self.input), str(self.output), "--workers", "1", *flags])
        args.least, args.calls = least, self.calls
        return run_step(WebtextStep(shorten, args, ("least",), (library,)))

    def ran(self) -> str:
        """Return the inputs that were processed since the last call."""
        found = self.calls.read_text().split() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return "".join(found)

    def bytes(self) -> dict[str, bytes]:
        paths = [path for path in self.output.rglob("*") if path.is_file() and path.name != ".lock"]
        return {str(path.relative_to(self.output)): path.read_bytes() for path in paths}


@pytest.fixture
def three(tmp_path: Path) -> ThreeInputs:
    return ThreeInputs(tmp_path)


def test_outputs_manifests_and_report(three: ThreeInputs, capsys: pytest.CaptureFixture[str]):
    manifests = three.run()
    assert [manifest["input"]["name"] for manifest in manifests] == ["a", "b", "c"]
    assert read_checksummed_json(three.output / "manifests/b.json") == manifests[1]
    manifest = manifests[0]
    assert (manifest["entered"], manifest["left"], manifest["parameters"]) == (4, 3, {"least": 3})
    assert manifest["dropped"] == {"short": {"count": 1, "samples": ["a0"]}}
    assert list(manifest["outputs"]) == ["a.jsonl"]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("shorten: 12 in, 9 out (75.0%); 3 inputs")
    assert said[2].split() == ["short", "3", "25.0%", "a0"]
    one_worker = three.bytes()
    three.output.rename(three.output.with_name("one_worker"))
    three.input = three.input.rename(three.input.with_name("elsewhere"))
    three.run("--workers", "2")
    assert three.bytes() == one_worker


def test_complete_inputs_are_skipped(three: ThreeInputs):
    three.run()
    whole = three.bytes()
    three.ran()
    three.run()
    assert not three.ran()
    (three.output / "b.jsonl").write_bytes(whole["b.jsonl"].replace(b"b", b"B"))  # The damaged file has the same size.
    three.run()
    assert three.ran() == "b" and three.bytes() == whole
    (three.output / "manifests/c.json").unlink()  # The step was killed between the output and its manifest.
    (three.output / ".a.jsonl.tmp").write_bytes(b"killed within")
    three.run()
    assert three.ran() == "c"
    three.write("a", ["another text"])
    three.run()
    assert three.ran() == "a" and three.bytes()["a.jsonl"] == json_line({"text": "another text"})
    three.run(least=5)
    assert three.ran() == "abc"
    three.write("a", ["x"])  # An input that becomes empty leaves no old output.
    three.run()
    assert "a.jsonl" not in three.bytes() and "manifests/a.json" in three.bytes()
    foreign = three.input / "b.jsonl"  # The manifest is from someone else and names a file outside of the folder.
    write_checksummed_json(three.output / "manifests/b.json", {"outputs": {str(foreign): []}})
    three.run()
    assert foreign.exists()
    (three.output / "d.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"d\.jsonl was not written by this run"):
        three.run()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_failure_leaves_nothing_half_written(three: ThreeInputs, workers: str):
    three.write("b", ["whole", "burst"])
    with pytest.raises(OSError, match="no room left on the disk of .*out: free some, and run the same command again"):
        three.run("--workers", workers)
    assert not [name for name in three.bytes() if "b" in Path(name).name.partition(".")[0] or ".tmp" in name]
    three.write("b", ["whole", "again"])
    three.run("--workers", workers)
    assert len([name for name in three.bytes() if name.endswith(".jsonl")]) == 3


def test_results_that_are_errors(three: ThreeInputs):
    with pytest.raises(ValueError, match=r"needs the package no-such-library: .*\[curate\]"):
        three.run(library="no-such-library")
    assert not three.ran()
    with pytest.raises(ValueError, match="all of 12 entries were dropped"):
        three.run(least=99)
    with open(three.input / "b.jsonl", "a") as file:
        file.write("{\n")
    with pytest.raises(ValueError, match=r"b\.jsonl:5: .*1 of 13 lines are unusable.*--max-bad-fraction 0.001"):
        three.run()
    assert sum(manifest["left"] for manifest in three.run("--max-bad-fraction", "0.1")) == 9
    (three.input / "c.jsonl").write_text("{\n" * 1000)
    with pytest.raises(ValueError, match=r"c\.jsonl:1: .*all of the first 1000"):
        three.run("--max-bad-fraction", "1")


def read(path: Path, text_key: str = "text") -> tuple[list[tuple[int, Document]], dict[str, dict[str, Any]]]:
    """Return the documents with their offsets, and the dropped entries."""
    found: list[tuple[int, Document]] = []
    dropped: dict[str, dict[str, Any]] = {}
    for source in find_inputs(str(path)):
        run = StepRun(Namespace(text_key=text_key), source)
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
    assert [source.name for source in find_inputs(str(tmp_path / "*.txt"))] == ["texts_00000"]


def test_missing_and_colliding_names(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"\*\.jsonl"):
        find_inputs(str(tmp_path / "*.jsonl"))
    for name in ("a.jsonl", "a.jsonl.gz", "a.of.urls"):
        (tmp_path / name).write_text("{}")
    assert [source.name for source in find_inputs(str(tmp_path / "*urls"))] == ["a.of.urls"]
    with pytest.raises(ValueError, match="would both become a"):
        find_inputs(str(tmp_path))
