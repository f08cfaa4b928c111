"""Each program alone: as the first of the pipeline, with bad input, and on datatrove's executors."""

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
from tests.warm_python import WarmPython

ROOT = Path(__file__).resolve().parents[5]
TOOLS = ROOT / "tools" / "openwebtext"
STORY = (
    "This is a story of a small town by the sea, where the harbour was full of boats and nobody was in a hurry. "
    "Every morning the fishermen went out, and every evening they came back with what they had caught. "
) * 8


def run(
    python: str, name: str, *arguments: Path | str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python, str(TOOLS / f"{name}.py"), *map(str, arguments)],
        text=True,
        capture_output=True,
        env={**os.environ, **(environment or {})},
        timeout=240,
    )


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of scraped text."""
    pytest.importorskip("py3langid", reason="the extra [curate] is not installed")
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"Chapter {number}. " + STORY if number else "short")
    return folder


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("blacklist_urls", ()),
        ("download_urls", ()),
        ("cleanup_dataset", ()),
        ("find_duplicates", ()),
        ("filter_ngrams", ("--evaluation", "{folder}/evaluation.txt")),
        ("split_dataset", ()),
    ],
)
def test_nothing_in_is_an_error(python: WarmPython, tmp_path: Path, name: str, arguments: tuple[str, ...]):
    (tmp_path / "evaluation.txt").write_text(STORY)
    (tmp_path / "in").mkdir()
    words = [word.format(folder=tmp_path) for word in arguments]
    found = run(python.python, name, tmp_path / "in", tmp_path / "out", *words)
    assert (found.returncode, found.stderr.count("\n")) == (2, 1) and "there is no file" in found.stderr
    (tmp_path / "in" / "empty.jsonl").write_text("\n")
    found = run(python.python, name, tmp_path / "in", tmp_path / "out", *words)
    assert (found.returncode, found.stderr) == (2, "error: the input holds nothing: name files that do\n")


def test_every_stage_takes_scraped_text(python: WarmPython, texts: Path, tmp_path: Path):
    (tmp_path / "evaluation.txt").write_text(
        "Nothing of these words is in the other texts, however long one looks for them there."
    )
    for name, arguments in (
        ("cleanup_dataset", ()),
        ("find_duplicates", ()),
        ("filter_ngrams", ("--evaluation", tmp_path / "evaluation.txt")),
        ("split_dataset", ()),
    ):
        found = run(python.python, name, texts, tmp_path / name, *arguments, "--limit", "3")
        assert found.returncode == 0, found.stderr
        assert ": 3 in, " in found.stdout
    found = run(python.python, "merge_jsons", "--data_path", texts, "--output_file", tmp_path / "merged.json")
    assert found.returncode == 0, found.stderr
    assert [json.loads(line)["id"] for line in (tmp_path / "merged.json").open()] == [f"{n}.txt" for n in range(6)]
    assert "--train-data" in run(python.python, "split_dataset", tmp_path / "merged.json", tmp_path / "split").stdout


def program(name: str, *arguments: Path | str) -> None:
    """In this process, which has the libraries loaded."""
    getattr(commands, name)([*map(str, arguments)])


def test_file_names_of_2019_from_addresses_to_a_data_set(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A name that ends in .json is one file, and a folder of shards is taken wherever a file is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("urls.txt").write_text("http://a.org/1\nhttp://a.org/1\nhttp://b.org/2\n")
    program("blacklist_urls", "urls.txt", "clean_urls.txt", "--urls-per-file", "1")
    assert Path("clean_urls.txt").read_text() == "http://a.org/1\nhttp://b.org/2\n"
    with open(shards / "2.jsonl", "a") as file:
        file.write(json.dumps({"text": f"Tale 1, 1. {STORY}"}) + "\n")  # once more
    program("cleanup_dataset", shards, "clean.json", "--workers", "1")  # of three shards one file
    program("cleanup_dataset", "clean.json", "clean_again.jsonl")
    assert Path("clean.json").read_bytes() == Path("clean_again.jsonl").read_bytes()
    program("find_duplicates", "clean.json", "duplicates.json", "--min-jaccard", "1")
    program("group_duplicate_url", "duplicates.json", "groups.json")
    program("remove_group_duplicates", "groups.json", "clean.json", "unique.json")
    program("cleanup_dataset", shards, "folder", "--workers", "1")
    assert not list(tmp_path.glob("*.shards")) and len(list(tmp_path.glob("folder/*.jsonl"))) == 3
    cleaned, kept = (
        [json.loads(line)["text"] for line in Path(name).read_text().splitlines()]
        for name in ("clean.json", "unique.json")
    )
    assert len(kept) == 9 and len(set(kept)) == 9
    tokenizer = build_tokenizer("bytes")
    tokens = [
        build_splits(
            train_data=[name],
            split="1",
            tokenizer=tokenizer,
            seq_length=8,
            need_valid=False,
            need_test=False,
            log=print,
        ).train.num_tokens
        for name in ("clean.json", "folder")
    ]
    assert tokens[0] == tokens[1] == sum(len(text) + 1 for text in cleaned)
    for name in ("clean.json", "folder"):
        preprocess_data.main(
            [
                "--input",
                name,
                "--output-prefix",
                f"{name}_tokens",
                "--tokenizer-type",
                "bytes",
                "--append-eod",
                "--workers",
                "1",
            ]
        )
        assert len(IndexedDataset(f"{name}_tokens_text_document").tokens) == tokens[0]


@pytest.mark.parametrize(
    ("name", "output", "words"),
    [
        (
            "cleanup_dataset",
            "clean.txt",
            "clean.txt: this stage writes a folder, or a file whose name ends in .json or",
        ),
        ("split_dataset", "split.json", "split.json: this stage writes a folder"),
        ("cleanup_dataset", "in.json", "in.json is a file of the input"),
    ],
)
def test_names_of_files_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, output: str, words: str
):
    pytest.importorskip("py3langid", reason="the extra [curate] is not installed")
    monkeypatch.chdir(tmp_path)
    Path("in.json").write_text(json.dumps({"text": STORY}) + "\n")
    with pytest.raises(ValueError, match=re.escape(words)):
        program(name, "in.json", output)
    assert [path.name for path in tmp_path.iterdir()] == ["in.json"]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("cleanup_dataset", ["--limit", "0"], "--limit"),
        ("cleanup_dataset", ["--max-bad-fraction", "2"], "between 0 and 1"),
        ("cleanup_dataset", ["--executor", "slurm"], "--slurm-partition"),
        ("cleanup_dataset", ["--executor", "local", "--limit", "3"], "--limit"),
        ("find_duplicates", ["--min-jaccard", "0"], "--min-jaccard"),
        ("split_dataset", ["--split", "x"], "--split"),
        ("download_urls", ["--page-seconds", "nan"], "--page-seconds"),
        ("group_duplicate_url", [], "name the one pairs.jsonl"),
        ("filter_ngrams", [], "--evaluation"),
        ("filter_ngrams", ["--evaluation", "nowhere.txt"], "nowhere.txt"),
        ("cleanup_dataset", ["--unknown"], "--unknown"),
    ],
)
def test_bad_input_ends_in_one_line(
    python: WarmPython, texts: Path, tmp_path: Path, name: str, arguments: list[str], words: str
):
    found = run(python.python, name, texts, tmp_path / "out", *arguments)
    assert found.returncode == 2 and found.stderr.startswith("error: ") and found.stderr.count("\n") == 1
    assert words in found.stderr and not (tmp_path / "out").exists()


def test_no_network_is_not_remembered(python: WarmPython, tmp_path: Path):
    pytest.importorskip("trafilatura", reason="the extra [curate] is not installed")
    (tmp_path / "urls.txt").write_text("http://a.invalid/1\nhttp://b.invalid/2\n")
    found = run(
        python.python,
        "download_urls",
        tmp_path / "urls.txt",
        tmp_path / "out",
        environment={"http_proxy": "", "HTTP_PROXY": ""},
    )
    assert found.returncode == 2 and "is there a network?" in found.stderr
    assert not list((tmp_path / "out").rglob("*.json*"))


def content(folder: Path) -> dict[str, str]:
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items() if not name.startswith(".")
    }


@pytest.fixture
def shards(texts: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(3):
        (folder / f"{shard}.jsonl").write_text(
            "".join(json.dumps({"text": f"Tale {shard}, {number}. {STORY}"}) + "\n" for number in range(3))
        )
    return folder


@pytest.mark.parametrize("executor", ["local", "ray"])
def test_executors_make_the_same_bytes(shards: Path, tmp_path: Path, executor: str):
    pytest.importorskip("datatrove", reason="the extra [curate] is not installed")
    if executor == "ray":
        pytest.importorskip("ray")
    assert run(sys.executable, "cleanup_dataset", shards, tmp_path / "alone").returncode == 0
    found = run(sys.executable, "cleanup_dataset", shards, tmp_path / "cluster", "--executor", executor, "--tasks", "2")
    assert found.returncode == 0, found.stderr
    assert "Processing done" in "".join(path.read_text() for path in tmp_path.glob("cluster/.datatrove/logs/*"))
    assert content(tmp_path / "cluster") == content(tmp_path / "alone") and "9 in, 9 out" in found.stdout


def test_slurm(python: WarmPython, shards: Path, tmp_path: Path):
    """A stand-in for Slurm runs the job that datatrove hands in, as its array says."""
    pytest.importorskip("datatrove", reason="the extra [curate] is not installed")
    programs = {
        "sbatch": 'cat "${@: -1}" > job; last=$(sed -n "s/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p" job)\n'
        "if grep -q launch_pickled job; then for rank in $(seq 0 $last); do\n"
        "SLURM_ARRAY_TASK_ID=$rank SLURM_NODELIST=here RUN_OFFSET=0 bash job >&2; done; fi\n"
        "echo Submitted batch job 7\n",
        "srun": 'shift 3; exec "$@"\n',
        "scontrol": "echo here\n",
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / "bin" / name).chmod(0o755)
    command = [
        sys.executable,
        str(TOOLS / "cleanup_dataset.py"),
        str(shards),
        str(tmp_path / "out"),
        "--executor",
        "slurm",
        "--slurm-partition",
        "cpu",
        "--tasks",
        "2",
    ]
    found = subprocess.run(
        command,
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=240,
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
    )
    assert found.returncode == 0 and "handed to Slurm" in found.stdout, found.stderr
    assert sorted(path.name for path in (tmp_path / "out").glob("*.jsonl")) == ["0.jsonl", "1.jsonl", "2.jsonl"]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.jsonl")}
    found = run(python.python, "cleanup_dataset", shards, tmp_path / "out")
    assert found.returncode == 0 and "9 in, 9 out" in found.stdout
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_names_of_2019_are_there():
    assert {path.name for path in TOOLS.glob("*.py")} >= {
        "blacklist_urls.py",
        "cleanup_dataset.py",
        "find_duplicates.py",
        "group_duplicate_url.py",
        "merge_jsons.py",
        "remove_group_duplicates.py",
    }
