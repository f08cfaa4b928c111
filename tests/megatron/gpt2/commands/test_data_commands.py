"""Run tools/preprocess_data.py, inspect_data.py, merge_datasets.py and train_tokenizer.py."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_utils import build_tokenizer
from tests.conftest import ROOT, error_line, tool
from tests.data_utils.data_files import write_lines, write_pair

inspect, maker, merger = tool("inspect_data"), tool("preprocess_data"), tool("merge_datasets")


def run(name: str, line: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *line.split()]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=240)


# --- preprocess_data


def flags(path: str | Path, prefix: str | Path) -> str:
    return f"--input {path} --output-prefix {prefix} --tokenizer-type bytes --append-eod"


def test_a_megatron_command_line(tmp_path: Path, test_data: Path) -> None:
    """The command line is that of Megatron's README."""
    shutil.copy(test_data / "lambada" / "lambada_test.jsonl", tmp_path / "my-corpus.json")
    vocab, merges = (str(test_data / "gpt2" / name) for name in ("encoder.json", "vocab.bpe"))
    done = run(
        "preprocess_data",
        f"--input my-corpus.json --output-prefix my-gpt2 --vocab-file {vocab} --tokenizer-type GPT2BPETokenizer "
        f"--merge-file {merges} --append-eod --json-keys text --workers 2 --partitions 2 --log-interval 100",
        tmp_path,
    )
    counted = r"(?s)5,153 documents, 435,383 tokens \(uint16\).*1,688,837 bytes of text, 3\.93 a token"
    assert done.returncode == 0 and re.search(counted, done.stdout), done.stdout + done.stderr


def test_killed_and_started_again(tmp_path: Path) -> None:
    # The file has about 42 MB, which are five shards.
    texts = (f"document {number} of some length, which is padded here " * 20 for number in range(40_000))
    path = write_lines(tmp_path / "a.jsonl", texts)
    assert run("preprocess_data", flags(path, tmp_path / "whole")).returncode == 0
    line = f"{sys.executable} {ROOT}/tools/preprocess_data.py {flags(path, tmp_path / 'out')} --workers 2"
    process = subprocess.Popen(line.split(), stdout=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob("out.shards/?????.json")):
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert len(list(tmp_path.glob("out.shards/?????.json"))) < 5
    again = run("preprocess_data", flags(path, tmp_path / "out"))
    assert again.returncode == 0, again.stderr
    names = [[f"{name}_text_document{suffix}" for suffix in (".bin", ".idx", ".json")] for name in ("out", "whole")]
    for resumed, whole in zip(*names, strict=True):
        assert (tmp_path / resumed).read_bytes() == (tmp_path / whole).read_bytes(), resumed
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", *names[0], *names[1]]


# --- inspect_data and merge_datasets


@pytest.fixture
def prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    write_lines(tmp_path / "a.jsonl", [f"document {number} " * (number + 1) for number in range(20)])
    maker.main(flags(tmp_path / "a.jsonl", tmp_path / "a").split())
    capsys.readouterr()
    return f"{tmp_path}/a_text_document"


def test_inspect_prints_and_plots(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect.main(f"{prefix} --documents 0 2 --tokenizer-type bytes --plot {tmp_path}/a.png".split())
    out = capsys.readouterr().out
    for part in (
        "indexed, 20 documents, 2,485 tokens (uint16)",
        "tokenizer: bytes of 257 ids",
        "2,465 bytes of text, 1.00 a token; 0 bad lines",
        "--- document 2: 34 tokens\ndocument 2 document 2",
    ):
        assert part in out
    assert "longest" in out and sum(line.endswith("#") for line in out.splitlines()) == 5
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert inspect.main([prefix + ".bin", "--verify"]) == 0 and "all hashes match" in capsys.readouterr().out


def test_every_flipped_bit_is_found(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(3)
    for suffix in (".bin", ".idx", ".json"):
        path = Path(f"{prefix}{suffix}")
        whole = path.read_bytes()
        for bit in draw.sample(range(8 * len(whole)), 40):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            try:
                found = inspect.main([prefix, "--verify"]) == 1 and "DAMAGED" in capsys.readouterr().out
            except ValueError as error:  # Opening the damaged file raises the error.
                found = "is damaged" in str(error)
            assert found, (suffix, bit)
        path.write_bytes(whole)
    assert inspect.main([prefix, "--verify"]) == 0


def test_ids_are_checked_without_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main([write_pair(tmp_path / "a", [[1, 300]]), "--verify", "--tokenizer-type", "bytes"]) == 1
    assert "ids from 1 to 300, but the vocabulary has 257" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, reason",
    {
        "--documents 20 --tokenizer-type bytes": "there are documents 0 to 19",
        "--documents 0": "--documents needs --tokenizer-type",
        "--tokenizer-type builtin": "was made by another tokenizer, bytes of 257",
        "--plot a.xyz": "--plot a.xyz: give a file",
    }.items(),
)
def test_bad_input_of_inspect_data(prefix: str, flags: str, reason: str) -> None:
    assert reason in error_line(lambda: inspect.main([prefix, *flags.split()]))


def test_merging_checks_the_manifests(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merger.main(f"--input {prefix} {prefix} --output-prefix {tmp_path}/twice".split())
    assert "40 documents and 4,970 tokens" in capsys.readouterr().out
    assert inspect.main([f"{tmp_path}/twice", "--verify"]) == 0
    line = f"--input {ROOT}/tools --output-prefix {tmp_path}/x"
    assert "holds no .idx" in error_line(lambda: merger.main(line.split()))
    whole = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes(b"\x05" + whole[1:])
    with pytest.raises(ValueError, match="is damaged: its tokens do not match the hashes in its manifest"):
        merger.main(f"--input {prefix} --output-prefix {tmp_path}/x".split())
    assert not list(tmp_path.glob("x*"))


# --- train_tokenizer


def test_a_bpe_in_gpt2s_format_is_lossless_and_what_hf_makes_of_the_same_files(tmp_path: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    text = "The quick brown fox — naïve 漢字 😀 — jumps over <|endoftext|> and 12345 lazy dogs.\n\n  'tis it's\t"
    write_lines(tmp_path / "a.jsonl", [text * 3 + str(number) for number in range(200)], "body")
    files = [str(tmp_path / "new" / name) for name in ("encoder.json", "vocab.bpe")]
    line = f"bpe --vocab-file {files[0]} --merge-file {files[1]} --train-data {tmp_path}/a.jsonl --text-key body"
    assert run("train_tokenizer", f"{line} --vocab-size 400").returncode == 0
    tokenizer = build_tokenizer("GPT2BPETokenizer", vocab_file=files[0], merge_file=files[1])
    ids = list(tokenizer.encode(text))
    assert tokenizer.decode(ids) == text and tokenizer.eod == tokenizer.vocab_size - 1 not in ids
    assert ids == ByteLevelBPETokenizer(*files).encode(text).ids and len(ids) < len(text) / 1.5
