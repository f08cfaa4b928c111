from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from data_utils import build_tokenizer

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "download_gpt2_vocab.sh"

pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="file: addresses need curl")


def download(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=240,
        env={"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(folder), "GPT2_VOCAB_URL": source.resolve().as_uri()},
    )


def test_what_is_downloaded_is_found_and_kept(test_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert download(test_data / "gpt2", tmp_path).returncode == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build_tokenizer("GPT2BPETokenizer").vocab_size == 50257
    again = download(tmp_path / "nowhere", tmp_path)  # the files are right: nothing is fetched
    assert again.returncode == 0 and "is there" in again.stdout


def test_a_failure_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "encoder.json").write_text("{}")
    for source, words in (("nowhere", "cannot be downloaded"), ("wrong", "sha256 differs")):
        done = download(tmp_path / source, tmp_path / "cache")
        assert done.returncode == 2 and words in done.stderr
        assert list((tmp_path / "cache" / "gpt2-model-parallel").iterdir()) == []
