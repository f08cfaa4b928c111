"""Test what all steps share: atomic output, no repeated work, counts of dropped entries, and the reading of input."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from data_utils.files import read_checksummed_json, write_checksummed_json
from megatron.gpt2.extensions.webtext.runner import run_step, step_parser
from megatron.gpt2.extensions.webtext.step import StepRun, WebtextStep, find_inputs, json_line, read_at


def shorten(run: StepRun) -> None:
    """Drop texts of fewer than `least` characters. Append the name of the input to the file `calls`."""
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
        self.least = 3
        self.input.mkdir()
        for name in "abc":
            self.write(name, [f"{name}{number}" + number * "x" for number in range(4)])

    def write(self, name: str, texts: Sequence[str]) -> None:
        (self.input / f"{name}.jsonl").write_bytes(b"".join(json_line({"text": text}) for text in texts))

    def run(self, *flags: str, library: str = "numpy") -> list[dict[str, Any]]:
        args = step_parser(shorten).parse_args([str(self.input), str(self.output), "--workers", "1", *flags])
        args.least, args.calls = self.least, self.calls
        return run_step(WebtextStep(shorten, args, ("least",), (library,)))

    def bytes(self) -> dict[str, bytes]:
        paths = [path for path in self.output.rglob("*") if path.is_file() and path.name != ".lock"]
        return {str(path.relative_to(self.output)): path.read_bytes() for path in paths}


@pytest.fixture
def three(tmp_path: Path) -> ThreeInputs:
    return ThreeInputs(tmp_path)


def test_outputs_manifests_and_report(three: ThreeInputs, capsys: pytest.CaptureFixture[str]):
    manifests = three.run()
    assert [manifest["input"]["name"] for manifest in manifests] == ["a", "b", "c"]
    manifest = read_checksummed_json(three.output / "manifests/a.json")
    assert manifest == manifests[0]
    assert (manifest["entered"], manifest["left"], manifest["parameters"]) == (4, 3, {"least": 3})
    assert manifest["dropped"] == {"short": {"count": 1, "samples": ["a0"]}}
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("shorten: 12 in, 9 out (75.0%); 3 inputs")
    assert said[2].split() == ["short", "3", "25.0%", "a0"]
    one_worker = three.bytes()
    three.output.rename(three.output.with_name("one_worker"))
    three.input = three.input.rename(three.input.with_name("elsewhere"))
    three.run("--workers", "2")
    assert three.bytes() == one_worker


def test_complete_inputs_are_skipped(three: ThreeInputs):
    def reran() -> str:
        """Run the step again. Return the inputs that were processed."""
        three.calls.unlink()
        three.calls.touch()
        three.run()
        return "".join(three.calls.read_text().split())

    three.run()
    whole = three.bytes()
    assert reran() == ""
    (three.output / "b.jsonl").write_bytes(whole["b.jsonl"].replace(b"b", b"B"))  # The damage keeps the size.
    assert reran() == "b" and three.bytes() == whole
    (three.output / "manifests/c.json").unlink()  # A kill between the output and its manifest gives this state.
    (three.output / ".a.jsonl.tmp").write_bytes(b"killed within")
    assert reran() == "c"
    three.write("a", ["another text"])
    assert reran() == "a" and three.bytes()["a.jsonl"] == json_line({"text": "another text"})
    three.least = 5
    assert reran() == "abc"
    three.write("a", ["x"])  # An input that becomes empty leaves no old output.
    assert reran() == "a" and "a.jsonl" not in three.bytes() and "manifests/a.json" in three.bytes()
    foreign = three.input / "b.jsonl"  # The manifest is from someone else and names a file outside of the folder.
    write_checksummed_json(three.output / "manifests/b.json", {"outputs": {str(foreign): []}})
    assert reran() == "b" and foreign.exists()
    (three.output / "d.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"d\.jsonl was not written by this run"):
        three.run()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_failure_leaves_nothing_half_written(three: ThreeInputs, workers: str):
    three.write("b", ["whole", "burst"])
    with pytest.raises(OSError, match="no room left on the disk of .*out: free some, and run the same command again"):
        three.run("--workers", workers)
    assert not [name for name in three.bytes() if "b" in Path(name).name.partition(".")[0] or ".tmp" in name]


def test_results_that_are_errors(three: ThreeInputs):
    with pytest.raises(ValueError, match=r"needs the package no-such-library: .*\[curate\]"):
        three.run(library="no-such-library")
    assert not three.calls.exists()
    with pytest.raises(ValueError, match="all of 12 entries were dropped"):
        three.least = 99
        three.run()
    three.least = 3
    with open(three.input / "b.jsonl", "a") as file:
        file.write("{\n")
    with pytest.raises(ValueError, match=r"b\.jsonl:5: .*1 of 13 lines are unusable.*--max-bad-fraction 0.001"):
        three.run()
    assert sum(manifest["left"] for manifest in three.run("--max-bad-fraction", "0.1")) == 9
    (three.input / "c.jsonl").write_text("{\n" * 1000)
    with pytest.raises(ValueError, match=r"c\.jsonl:1: .*all of the first 1000"):
        three.run("--max-bad-fraction", "1")


def test_documents_of_json_lines_and_scraped_text(tmp_path: Path):
    lines = [
        b'\xef\xbb\xbf{"body": "one", "url": "u"}',
        b"",
        b'{"body": ""}',
        b"{",
        b'{"body": "x", "url": "\\ud800"}',
        b'{"body": "\xff"}',
        '{"text": "no", "body": "zwei ü"}'.encode(),
    ]
    texts = b"\xef\xbb\xbfa text\r\nof two lines", b"\xff", b" \n"
    for name, content in (("a.jsonl", b"\n".join(lines)), *((f"{n}.txt", text) for n, text in enumerate(texts))):
        (tmp_path / name).write_bytes(content)
    found, dropped = [], []
    for source in find_inputs(str(tmp_path)):
        run = StepRun(Namespace(text_key="body"), source)
        for document in run.documents():
            found.append(document)
            assert source.name != "a" or read_at(source.files[0], run.offset, "body") == document
        dropped.append({reason: (entry["count"], entry["samples"][0]) for reason, entry in run.dropped.items()})
    scraped = {"id": "0.txt", "text": "a text\nof two lines"}
    assert found == [{"text": "one", "url": "u"}, {"text": "zwei ü"}, scraped]
    assert [entry["empty"] for entry in dropped] == [(1, f"{tmp_path}/a.jsonl:3"), (1, f"{tmp_path}/2.txt")]
    assert [entry["unreadable"][0] for entry in dropped] == [3, 1]


def test_two_inputs_of_one_name_are_refused(tmp_path: Path):
    for name in ("a.jsonl", "a.jsonl.gz"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match="would both become a"):
        find_inputs(str(tmp_path))
