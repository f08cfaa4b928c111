"""benchmarks/data.py: its sections exist, and the arms of the one on preprocessing run."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import data, data_preprocessing


def test_every_section_has_its_module() -> None:
    assert all(find_spec(f"benchmarks.{module}") for module in data.SECTIONS.values())


def test_sections_are_written_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "data.json"
    output.write_text('{"loading": {"kept": 1}}')
    monkeypatch.setattr(data_preprocessing, "measure", lambda smoke: {"smoke": smoke})
    data.main(["--only", "preprocess", "--smoke", "--output", str(output)])
    results = json.loads(output.read_text())
    assert results["loading"] == {"kept": 1} and results["preprocess"]["smoke"] is True
    assert results["preprocess"]["what"] == "preprocess" and "cpu" in results["preprocess"]["machine"]


@pytest.mark.wide
def test_arms_of_preprocessing(tmp_path: Path, test_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPT2_VOCAB", str(test_data / "gpt2"))
    path = tmp_path / "corpus.jsonl"
    data_preprocessing.write_corpus(path, 300_000)
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert path.stat().st_size > 300_000 and max(map(len, texts)) == data_preprocessing.DOCUMENT
    for arm in ("json", "ours (tiktoken)", "hf"):
        elapsed, used = data_preprocessing.in_own_process(arm, path)
        assert 0 < elapsed < 60 and 0 < used < 60
