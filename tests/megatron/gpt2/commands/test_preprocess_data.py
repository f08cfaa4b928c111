"""tools/preprocess_data.py as a user runs it: Megatron's flags, a kill at any moment, a disk that fills up."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_utils import IndexedDataset, build_tokenizer
from tests.conftest import ROOT

TOOL = str(ROOT / "tools" / "preprocess_data.py")


def write(path: Path, count: int) -> str:
    with open(path, "w") as file:
        for number in range(count):
            file.write(json.dumps({"text": f"document {number} of some length, which is padded here " * 20}) + "\n")
    return str(path)


def command(path: str, prefix: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        TOOL,
        "--input",
        path,
        "--output-prefix",
        str(prefix),
        "--tokenizer-type",
        "bytes",
        "--append-eod",
        *more,
    ]


def test_a_megatron_command_line(tmp_path: Path, test_data: Path) -> None:
    """As Megatron's README has it."""
    shutil.copy(test_data / "lambada" / "lambada_test.jsonl", tmp_path / "my-corpus.json")
    run = subprocess.run(
        [
            sys.executable,
            TOOL,
            "--input",
            "my-corpus.json",
            "--output-prefix",
            "my-gpt2",
            "--vocab-file",
            str(test_data / "gpt2" / "encoder.json"),
            "--tokenizer-type",
            "GPT2BPETokenizer",
            "--merge-file",
            str(test_data / "gpt2" / "vocab.bpe"),
            "--append-eod",
            "--json-keys",
            "text",
            "--workers",
            "2",
            "--partitions",
            "2",
            "--log-interval",
            "100",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    assert re.search(
        r"5,153 documents, 435,383 tokens \(uint16\), 1,688,837 bytes of text, 3\.93 bytes per token", run.stdout
    ), run.stdout
    tokenizer = build_tokenizer(
        "GPT2BPETokenizer",
        vocab_file=str(test_data / "gpt2" / "encoder.json"),
        merge_file=str(test_data / "gpt2" / "vocab.bpe"),
    )
    data = IndexedDataset(tmp_path / "my-gpt2_text_document")
    lines = (tmp_path / "my-corpus.json").read_text(encoding="utf-8").splitlines()
    assert [tokenizer.decode(data[number][:-1]) for number in range(len(data))] == [
        json.loads(line)["text"] for line in lines
    ]


def test_bad_input_is_one_line_and_code_2(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 3)
    for words, reason in (
        (command(path, tmp_path / "out", "--json-keys", "body"), r"a\.jsonl:1: no field 'body'"),
        (command(path, tmp_path / "out", "--split-sentences"), "--split-sentences"),
        (command(str(tmp_path / "none"), tmp_path / "out"), "--input .*none: no such file"),
    ):
        run = subprocess.run(words, capture_output=True, text=True, timeout=240)
        assert run.returncode == 2 and re.fullmatch(rf"error: .*{reason}.*\n", run.stderr), run.stderr


def test_killed_at_any_moment_and_started_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 60_000)  # some 60 MB: seven shards
    subprocess.run(command(path, tmp_path / "whole"), check=True, capture_output=True, timeout=240)
    kept = 0
    for _ in range(3):  # each after one shard more, in the midst of others
        run = subprocess.Popen(
            command(path, tmp_path / "out", "--workers", "2"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        while run.poll() is None and len(list(tmp_path.glob("out.shards/?????.json"))) <= kept:
            time.sleep(0.002)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        kept = len(list(tmp_path.glob("out.shards/?????.json")))
    assert 3 <= kept < 7
    again = subprocess.run(command(path, tmp_path / "out"), capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stderr
    for suffix in (".bin", ".idx", ".json"):
        whole, resumed = (tmp_path / f"{name}_text_document{suffix}" for name in ("whole", "out"))
        assert whole.read_bytes() == resumed.read_bytes(), suffix
    assert sorted(os.listdir(tmp_path)) == [
        "a.jsonl",
        *(f"{name}_text_document{suffix}" for name in ("out", "whole") for suffix in (".bin", ".idx", ".json")),
    ]


def test_a_full_disk(tmp_path: Path) -> None:
    """Full from the start, in a shard, in the merge: one line, nothing half written, and with room it goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    path = write(tmp_path / "a.jsonl", 20_000)  # 21 MB: 2 shards, 42 MB of tokens in each of two copies
    mounted = f"mount -t tmpfs -o size=100m tmpfs {disk} && "
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*alone, mounted + "true"], capture_output=True).returncode:
        pytest.skip("no small filesystem can be mounted here")
    program = f"from tests.megatron.gpt2.commands.test_preprocess_data import fill_up; fill_up({path!r}, {str(disk)!r})"
    run = subprocess.run(
        [*alone, f'{mounted} exec "$0" -c "$1"', sys.executable, program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr


def fill_up(path: str, disk: str) -> None:
    """In a mount namespace of its own: with less and less ballast on a disk of 100 MB."""
    unchecked = (
        "import sys; sys.argv = sys.argv[1:]; import data_utils.preprocessing.preprocess as p; "
        "p._check_room = lambda *_: None; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    kept = []
    for ballast in (95, 70, 40, 0):
        Path(disk, "ballast").write_bytes(bytes(ballast << 20))
        words = command(path, Path(disk) / "out")
        run = subprocess.run([sys.executable, "-c", unchecked, *words[1:]], capture_output=True, text=True)
        left = sorted(entry.name for entry in Path(disk).rglob("*"))
        assert not any("tmp" in name for name in left), left
        if ballast:
            assert run.returncode == 2 and re.fullmatch(
                r"error: no room left on the disk of .*/out: nothing is half written; .*out\.shards keeps .*\n",
                run.stderr,
            ), run.stderr
            assert not any(name.startswith("out_") for name in left), left
            kept.append(sum(name.endswith(".json") for name in left))
            checked = subprocess.run(words, capture_output=True, text=True)
            assert checked.returncode == 2 and "GB are needed" in checked.stderr, checked.stderr
        else:
            assert run.returncode == 0, run.stderr
    assert kept[0] < kept[-1], kept
