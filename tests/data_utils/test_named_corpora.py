"""Names for corpora: where the entries are, what they stand for, and what is said where a file is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_utils.named_corpora import find_corpora, read_corpora

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEGATRON_CORPORA", raising=False)


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def train(*names: str, text_key: str | None = None) -> tuple[tuple[str, ...], str | None]:
    files, key = find_corpora({"--train-data": names}, text_key)
    return files[0], key


def test_the_corpora_of_2019_have_its_paths():
    assert read_corpora(ROOT / "data" / "corpora.json") == {
        "wikipedia": (("data/wikipedia/wikidump_lines.json",), "text"),
        "webtext": (("data/webtext/data.json",), "text"),
    }


def test_a_name_stands_for_its_files_in_their_place(tmp_path: Path):
    write(tmp_path / "data/wikipedia/wikidump_lines.json", {"text": "a"})
    write(tmp_path / "own.json", {"text": "a"})
    assert train("own.json", "wikipedia", "builtin") == (
        ("own.json", "data/wikipedia/wikidump_lines.json", "builtin"),
        "text",
    )
    assert train("wikipedia", text_key="body")[1] == "body"
    assert train("own.json") == (("own.json",), None)
    assert find_corpora({"--train-data": (), "--test-data": ("wikipedia",)}, None) == (
        [(), ("data/wikipedia/wikidump_lines.json",)],
        "text",
    )


def test_a_missing_file_names_the_entry_and_the_line_to_write():
    with pytest.raises(FileNotFoundError) as error:
        train("webtext")
    assert str(error.value).startswith("--train-data webtext: there is no file data/webtext/data.json, which ")
    assert '"webtext": {"files": ["PATH"], "text_key": "text"} into' in str(error.value)
    with pytest.raises(FileNotFoundError, match='no such file: mycorpus; nor is it a corpus, which "mycorpus": '):
        train("mycorpus")
    assert train("none.txt") == (("none.txt",), None)  # a path, of which others say that it is missing


def test_the_current_folders_file_and_the_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = write(tmp_path / "a.jsonl", {"body": "a"})
    write(
        tmp_path / "data/corpora.json",
        {"mine": {"files": ["a.jsonl"], "text_key": "body"}, "plain": {"files": [str(text)]}},
    )
    assert train("mine") == (("a.jsonl",), "body")
    assert train("plain") == ((str(text),), None)
    with pytest.raises(ValueError, match="mine and plain have their text in different fields: give --text-key"):
        train("mine", "plain")
    other = write(tmp_path / "elsewhere.json", {"mine": {"files": ["a.jsonl"]}})
    monkeypatch.setenv("MEGATRON_CORPORA", str(other))
    assert train("mine") == (("a.jsonl",), None)
    monkeypatch.setenv("MEGATRON_CORPORA", "nowhere.json")
    with pytest.raises(FileNotFoundError, match=r"\$MEGATRON_CORPORA: no such file: nowhere.json"):
        train("a.jsonl")


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"x": []},
        {"x": {"files": "a"}},
        {"x": {"files": []}},
        {"x": {"files": ["a"], "key": "b"}},
        {"x": {"files": ["a"], "text_key": 1}},
        {"x": {"text_key": "a"}},
    ],
)
def test_a_file_that_is_not_of_this_form(tmp_path: Path, content: object):
    with pytest.raises(ValueError) as error:
        read_corpora(write(tmp_path / "c.json", content))
    assert "c.json" in str(error.value) and '"files": ["PATH"]' in str(error.value)
