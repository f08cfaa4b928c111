"""Test each program by itself: as the first of the pipeline, with bad input, and on datatrove's executors."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data_utils import IndexedDataset, build_splits, build_tokenizer
from megatron.gpt2.commands import preprocess_data
from megatron.gpt2.extensions.webtext import commands
from tests.conftest import ROOT, needs

pytestmark = needs("py3langid", "trafilatura", "datatrove", extra="curate")
TOOLS = ROOT / "tools" / "openwebtext"
STORY = (
    "This is a story of a small town by the sea, where the harbour was full of boats and nobody was in a hurry. "
    "Every morning the fishermen went out, and every evening they came back with what they had caught. "
) * 8


def program(name: str, *arguments: Path | str) -> None:
    """Run the program in this process, which has loaded the libraries."""
    getattr(commands, name)([*map(str, arguments)])


def run(name: str, *arguments: Path | str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(TOOLS / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(words, text=True, capture_output=True, env={**os.environ, **environment}, timeout=240)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the current folder, with scraped text and with shards of JSON lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    Path("texts").mkdir()
    for number in range(6):
        Path(f"texts/{number}.txt").write_text(f"Chapter {number}. " + STORY if number else "short")
    Path("shards").mkdir()
    for shard in range(3):
        lines = [json.dumps({"text": f"Tale {shard}, {number}. {STORY}"}) + "\n" for number in range(3)]
        Path(f"shards/{shard}.jsonl").write_text("".join(lines))
    Path("evaluation.txt").write_text("Nothing of these words is in the other texts, however long one looks for them.")


OF_DOCUMENTS = {
    "cleanup_dataset": (),
    "find_duplicates": (),
    "filter_ngrams": ("--evaluation", "evaluation.txt"),
    "split_dataset": (),
}


@pytest.mark.parametrize("name", [*OF_DOCUMENTS, "blacklist_urls", "download_urls"])
def test_empty_input_is_an_error(name: str):
    Path("in").mkdir()
    with pytest.raises(FileNotFoundError, match="this folder has no file"):
        program(name, "in", "out", *OF_DOCUMENTS.get(name, ()))
    Path("in/empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="the input is empty: give other files"):
        program(name, "in", "out", *OF_DOCUMENTS.get(name, ()))


def test_every_stage_takes_scraped_text(capsys: pytest.CaptureFixture[str]):
    for name, arguments in OF_DOCUMENTS.items():
        program(name, "texts", name, *arguments, "--limit", "3")
        assert ": 3 in, " in capsys.readouterr().out
    program("merge_jsons", "--data_path", "texts")
    merged = [json.loads(line) for line in Path("merged_output.json").read_text().splitlines()]
    assert [document["id"] for document in merged] == [f"{number}.txt" for number in range(6)]
    program("split_dataset", "merged_output.json", "split")
    assert "--train-data" in capsys.readouterr().out


def test_file_names_of_2019_from_addresses_to_a_data_set():
    """A name that ends in .json is one file. A folder of shards is accepted instead of a file."""
    Path("urls.txt").write_text("\ufeffhttp://a.org/1\nhttp://a.org/1\nhttp://b.org/2\n")
    program("blacklist_urls", "urls.txt", "clean_urls.txt", "--urls-per-file", "1")
    assert Path("clean_urls.txt").read_text() == "http://a.org/1\nhttp://b.org/2\n"
    with open("shards/2.jsonl", "a") as file:
        file.write(json.dumps({"text": f"Tale 1, 1. {STORY}"}) + "\n")  # This line is a duplicate.
    program("cleanup_dataset", "shards", "clean.json", "--workers", "1")  # Three shards become one file.
    program("cleanup_dataset", "clean.json", "clean_again.jsonl")
    assert Path("clean.json").read_bytes() == Path("clean_again.jsonl").read_bytes()
    program("find_duplicates", "clean.json", "duplicates.json", "--min-jaccard", "1")
    program("group_duplicate_url", "duplicates.json", "groups.json")
    program("remove_group_duplicates", "groups.json", "clean.json", "unique.json")
    program("cleanup_dataset", "shards", "folder", "--workers", "1")
    assert not list(Path().glob("*.shards")) and len(list(Path().glob("folder/*.jsonl"))) == 3
    cleaned, kept = (
        [json.loads(line)["text"] for line in Path(name).read_text().splitlines()]
        for name in ("clean.json", "unique.json")
    )
    assert len(kept) == 9 and len(set(kept)) == 9
    tokens = sum(len(text) + 1 for text in cleaned)
    for name in ("clean.json", "folder"):
        tokenizer = build_tokenizer("bytes")
        made = build_splits(train_data=[name], split="1", tokenizer=tokenizer, seq_length=8, log=print)
        assert made.train.num_tokens == tokens
        line = f"--input {name} --output-prefix {name}_tokens --tokenizer-type bytes --append-eod"
        preprocess_data.main(line.split())
        assert len(IndexedDataset(f"{name}_tokens_text_document").tokens) == tokens


@pytest.mark.parametrize(
    "line, words",
    {
        "cleanup_dataset texts out.txt": "out.txt: this stage writes a folder, or a file whose name ends in .json or",
        "split_dataset texts out.json": "out.json: this stage writes a folder",
        "cleanup_dataset texts/1.txt texts/1.txt": "texts/1.txt: this stage writes a folder",
        "cleanup_dataset shards/1.jsonl shards/1.jsonl": "shards/1.jsonl is a file of the input",
        "cleanup_dataset texts out --limit 0": "--limit: 0 is not a whole number above 0",
        "cleanup_dataset texts out --max-bad-fraction 2": "between 0 and 1",
        "cleanup_dataset texts out --executor slurm": "--slurm-partition",
        "cleanup_dataset texts out --executor local --limit 3": "--limit",
        "find_duplicates texts out --min-jaccard 0": "--min-jaccard",
        "split_dataset texts out --split x": "--split",
        "download_urls texts out --page-seconds nan": "--page-seconds",
        "group_duplicate_url texts out": "give one file, pairs.jsonl",
        "filter_ngrams texts out": "--evaluation",
        "filter_ngrams texts out --evaluation nowhere.txt": "nowhere.txt",
        "cleanup_dataset texts out --unknown": "--unknown",
    }.items(),
)
def test_bad_input_is_one_line_and_writes_nothing(line: str, words: str):
    before = sorted(Path().rglob("*"))
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(words)) as error:
        program(*line.split())
    assert "\n" not in str(error.value) and sorted(Path().rglob("*")) == before


def test_results_without_a_network_are_not_recorded(monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    Path("urls.txt").write_text("http://a.invalid/1\nhttp://b.invalid/2\n")
    with pytest.raises(OSError, match="is there a network"):
        program("download_urls", "urls.txt", "out")
    assert not list(Path("out").rglob("*.json*"))


def file_hashes(folder: str) -> dict[str, str]:
    paths = {str(path.relative_to(folder)): path for path in sorted(Path(folder).rglob("*")) if path.is_file()}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items() if not name.startswith(".")
    }


@pytest.mark.parametrize("executor", [pytest.param("local", marks=pytest.mark.wide), "ray"])
def test_executors_make_the_same_bytes(executor: str, capsys: pytest.CaptureFixture[str]):
    if executor == "ray":
        pytest.importorskip("ray")
    program("cleanup_dataset", "shards", "alone")
    found = run("cleanup_dataset", "shards", "cluster", "--executor", executor, "--tasks", "2")
    assert found.returncode == 0, found.stderr
    assert "Processing done" in "".join(path.read_text() for path in Path().glob("cluster/.datatrove/logs/*"))
    assert file_hashes("cluster") == file_hashes("alone") and "9 in, 9 out" in found.stdout


def test_slurm(capsys: pytest.CaptureFixture[str]):
    """A fake Slurm runs the array job that datatrove submits."""
    programs = {
        "sbatch": 'cat "${@: -1}" > job; last=$(sed -n "s/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p" job)\n'
        "if grep -q launch_pickled job; then for rank in $(seq 0 $last); do\n"
        "SLURM_ARRAY_TASK_ID=$rank SLURM_NODELIST=here RUN_OFFSET=0 bash job >&2; done; fi\n"
        "echo Submitted batch job 7\n",
        "srun": 'shift 3; exec "$@"\n',
        "scontrol": "echo here\n",
    }
    Path("bin").mkdir()
    for name, text in programs.items():
        Path("bin", name).write_text(f"#!/bin/bash\n{text}")
        Path("bin", name).chmod(0o755)
    flags = "--executor slurm --slurm-partition cpu --tasks 2".split()
    found = run("cleanup_dataset", "shards", "out", *flags, PATH=f"{Path('bin').resolve()}:{os.environ['PATH']}")
    assert found.returncode == 0 and "submitted to Slurm" in found.stdout, found.stderr
    before = {path: path.stat().st_mtime_ns for path in Path("out").glob("*.jsonl")}
    assert sorted(path.name for path in before) == ["0.jsonl", "1.jsonl", "2.jsonl"]
    program("cleanup_dataset", "shards", "out")
    assert "9 in, 9 out" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_program_names_of_2019_exist():
    names = "blacklist_urls cleanup_dataset find_duplicates group_duplicate_url merge_jsons remove_group_duplicates"
    assert {path.stem for path in TOOLS.glob("*.py")} >= set(names.split())
