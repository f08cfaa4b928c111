"""The contract of every stage: whole or not at all, not twice, and no loss without a word."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.extensions.webtext.documents import Shard, as_line, document_shards
from megatron.gpt2.extensions.webtext.shard_run import ShardRun, Stage
from megatron.gpt2.extensions.webtext.stages import run_stage


def shorten(run: ShardRun, *, least: int, calls: Path) -> None:
    """Drops texts of fewer than `least` characters, and notes that it ran."""
    with open(calls, "a") as file:
        file.write(f"{run.shard.name}\n")
    for document in run.documents():
        if document["text"] == "burst":
            raise OSError(28, "No space left on device")
        if len(document["text"]) < least:
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
        self.stage = Stage("shorten", shorten, {"least": 3}, {"calls": self.calls}, libraries=("numpy",))
        self.said: list[str] = []

    def write(self, shard: str, texts: Sequence[str]) -> None:
        (self.input / f"{shard}.jsonl").write_bytes(b"".join(as_line({"text": text}) for text in texts))

    def run(self, **options: Any) -> list[dict[str, Any]]:
        return run_stage(
            options.pop("stage", self.stage),
            document_shards([str(self.input)]),
            self.output,
            log=self.said.append,
            **options,
        )

    def ran(self) -> list[str]:
        """The shards that were worked on since this was asked last."""
        found = self.calls.read_text().split() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return found

    def bytes(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.output)): path.read_bytes()
            for path in self.output.rglob("*")
            if path.is_file() and path.name != ".lock"
        }


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def test_outputs_manifests_and_report(setting: Setting):
    manifests = setting.run()
    assert [manifest["input"]["name"] for manifest in manifests] == ["a", "b", "c"]
    assert json.loads((setting.output / "manifests/b.json").read_text()) == manifests[1]
    manifest = manifests[0]
    assert (manifest["entered"], manifest["left"], manifest["parameters"]) == (4, 3, {"least": 3})
    assert manifest["dropped"] == {"short": {"count": 1, "samples": ["a0"]}}
    assert [entry["name"] for entry in manifest["outputs"]] == ["a.jsonl"]
    assert sorted(setting.bytes()) == [
        "a.jsonl",
        "b.jsonl",
        "c.jsonl",
        "manifests/a.json",
        "manifests/b.json",
        "manifests/c.json",
    ]
    assert setting.said[0].startswith("shorten: 12 in, 9 out (75.0%); 3 shards")
    assert setting.said[2].split() == ["short", "3", "25.0%", "a0"]


def test_processes_write_the_same_bytes(setting: Setting):
    setting.run()
    alone = setting.bytes()
    setting.output.rename(setting.output.with_name("alone"))
    setting.run(workers=2)
    assert setting.bytes() == alone and len(setting.ran()) == 6


def test_only_what_is_not_done_is_done_again(setting: Setting):
    setting.run()
    whole = setting.bytes()
    setting.ran()
    setting.run()
    assert not setting.ran()
    (setting.output / "b.jsonl").write_bytes(whole["b.jsonl"].replace(b"b", b"B"))  # damage of the same size
    setting.run()
    assert setting.ran() == ["b"] and setting.bytes() == whole
    (setting.output / "manifests/c.json").unlink()  # killed between the output and its manifest
    setting.run()
    assert setting.ran() == ["c"] and setting.bytes() == whole
    (setting.output / ".a.jsonl.tmp").write_bytes(b"killed within")
    setting.write("a", ["another text"])
    setting.run()
    assert setting.ran() == ["a"] and setting.bytes()["a.jsonl"] == as_line({"text": "another text"})
    setting.run(stage=replace(setting.stage, parameters={"least": 5}))
    assert setting.ran() == ["a", "b", "c"]


def test_a_shard_that_becomes_empty_leaves_no_old_output(setting: Setting):
    setting.run()
    setting.write("a", ["x"])
    setting.run()
    assert "a.jsonl" not in setting.bytes() and "manifests/a.json" in setting.bytes()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_leaves_nothing_half_written(setting: Setting, workers: int):
    setting.write("b", ["whole", "burst"])
    with pytest.raises(OSError, match="out: the disk is full"):
        setting.run(workers=workers)
    assert not [name for name in setting.bytes() if "b" in Path(name).name.partition(".")[0] or ".tmp" in name]
    setting.write("b", ["whole", "again"])
    setting.run(workers=workers)
    assert len([name for name in setting.bytes() if name.endswith(".jsonl")]) == 3


def test_nothing_in_and_nothing_out_are_errors(setting: Setting):
    with pytest.raises(ValueError, match="all of 12 entries were dropped"):
        setting.run(stage=replace(setting.stage, parameters={"least": 99}))
    for shard in "abc":
        (setting.input / f"{shard}.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="the input holds nothing"):
        setting.run()


def test_unreadable_lines(setting: Setting):
    with open(setting.input / "b.jsonl", "a") as file:
        file.write("{\n")
    with pytest.raises(ValueError, match=r"b\.jsonl:5: .*1 of 13 entries are unreadable.*--max-bad-fraction 0.001"):
        setting.run()
    assert sum(manifest["left"] for manifest in setting.run(max_bad_fraction=0.1)) == 9
    (setting.input / "c.jsonl").write_text("{\n" * 1000)
    with pytest.raises(ValueError, match=r"c\.jsonl:1: .*all of the first 1000"):
        setting.run(max_bad_fraction=1)


@pytest.mark.parametrize(("limit", "entered"), [(1, [1]), (4, [4]), (6, [4, 2]), (99, [4, 4, 4])])
def test_limit(setting: Setting, limit: int, entered: list[int]):
    assert [
        manifest["entered"]
        for manifest in setting.run(limit=limit, stage=replace(setting.stage, parameters={"least": 1}))
    ] == entered


def test_what_is_not_of_this_run_is_named(setting: Setting):
    setting.run()
    (setting.input / "c.jsonl").unlink()
    with pytest.raises(ValueError, match="holds c, which is not in the input"):
        setting.run()
    (setting.output / "manifests/c.json").unlink()
    with pytest.raises(ValueError, match=r"c\.jsonl is not of this run"):
        setting.run()
    setting.run(alone=False)


def test_a_library_that_is_missing_is_named_first(setting: Setting):
    with pytest.raises(ValueError, match=r"needs no-such-library: .*\[curate\]"):
        setting.run(stage=replace(setting.stage, libraries=("no-such-library",)))
    assert not setting.ran()


def test_facts_of_a_shard_say_nothing_of_where_it_lies(setting: Setting, tmp_path: Path):
    before = Shard("s", (setting.input / "a.jsonl",)).facts()
    setting.input.rename(tmp_path / "elsewhere")
    assert Shard("s", (tmp_path / "elsewhere/a.jsonl",)).facts() == before
