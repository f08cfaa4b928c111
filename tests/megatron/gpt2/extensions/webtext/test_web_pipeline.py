"""Run the whole pipeline on a small web. The right documents remain; a run with kills gives identical files."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, needs
from tests.megatron.gpt2.extensions.webtext.web_pages import EVALUATION, address_lists, build, web

pytestmark = needs("trafilatura", extra="curate")

PAGES, GOOD = build()
FLAGS = {
    "URLS_FLAGS": "--urls-per-file 70",
    "SPLIT_FLAGS": "--split 80,10,10",
    "DOWNLOAD_FLAGS": "--max-bytes 1000000 --page-seconds 60 --extract-seconds 120 --threads 16 --per-host 8",
}


def start(folder: Path, output: str, proxy: str) -> subprocess.Popen[str]:
    """Start scripts/prepare_openwebtext.sh in a new process group."""
    environment = {**os.environ, **FLAGS, "OMP_NUM_THREADS": "1", "http_proxy": proxy, "no_proxy": ""}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment.pop("HTTP_PROXY", None)
    flags = f"--urls urls --output {output} --evaluation evaluation.jsonl --workers 1"
    command = ["bash", str(ROOT / "scripts/prepare_openwebtext.sh"), *flags.split()]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return said


def kill_when(process: subprocess.Popen[str], moment: Callable[[], bool]) -> None:
    """Kill the process group with SIGKILL as soon as `moment()` is true."""
    deadline = time.monotonic() + 240
    while not moment():
        assert process.poll() is None, f"it ended too early:\n{process.communicate()[0]}"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def file_hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file, including manifests, except the empty locks."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the pipeline into once/; return the folder and the output."""
    folder = tmp_path_factory.mktemp("web")
    (folder / "urls").mkdir()
    for name, text in address_lists(PAGES).items():
        (folder / "urls" / name).write_text(text)
    (folder / "evaluation.jsonl").write_text(json.dumps({"text": f"Before. {EVALUATION}, after."}) + "\n")
    with web(PAGES) as proxy:
        return folder, finish(start(folder, "once", proxy))


def test_the_right_documents_survive(once: tuple[Path, str]):
    folder, said = once
    found = {
        document["url"]: document["text"]
        for line in (folder / "once/8-merged/corpus.jsonl").open()
        for document in [json.loads(line)]
    }
    assert set(found) == set(GOOD)
    for url, part in GOOD.items():
        assert part in found[url], url
        assert "newsletter" not in found[url] and "Section" not in found[url] and "tracker" not in found[url]
    records = [json.loads(line) for path in (folder / "once/2-pages/records").iterdir() for line in path.open()]
    results = {record["url"].partition(".com/")[2]: record["result"] for record in records}
    assert len(results) == 189
    expected = {
        "large/0": "too large",
        "inside/0": "redirected: malformed",
        "gone/1": "status 404",
        "binary/0": "no page of text",
    }
    assert {name: results[name] for name in expected} == expected
    for line in ("  duplicate ", "  site without text ", "  status 404 ", "  not en ", "  in an evaluation set "):
        assert line in said
    splits = {
        name: sum(1 for _ in (folder / f"once/9-split/{name}.jsonl").open()) for name in ("train", "valid", "test")
    }
    assert sum(splits.values()) == len(GOOD) and splits["train"] > 60
    assert said.rstrip().endswith(
        "bash scripts/pretrain_gpt2.sh --train-data once/9-split/train.jsonl --valid-data "
        "once/9-split/valid.jsonl --test-data once/9-split/test.jsonl"
    )


@pytest.mark.wide
def test_it_goes_on_after_kills_to_the_same_result(once: tuple[Path, str]):
    folder, _ = once
    requests: list[str] = []
    again = folder / "again"

    def has(*names: str) -> Callable[[], bool]:
        return lambda: any((again / name).exists() for name in names)

    with web(PAGES, requests.append) as proxy:
        for moment in (
            lambda: len(requests) > 30,  # inside the first shard of the download
            has("3-clean/.urls_00001.jsonl.tmp", "3-clean/urls_00001.jsonl"),  # inside the cleanup
            has("6-unique/urls_00001.jsonl"),  # before its manifest
            has("8-merged/manifests/corpus.json"),
        ):  # between two stages
            kill_when(start(folder, "again", proxy), moment)
        before = len(requests)
        finish(start(folder, "again", proxy))
    assert len(requests) == before, "a page was downloaded again"
    assert file_hashes(again) == file_hashes(folder / "once")
