"""tools/inspect_data.py: what it shows, and that --verify finds every flipped bit."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from data_utils import IndexedDatasetBuilder
from tests.megatron.gpt2.commands import tool

inspect, maker, merger = tool("inspect_data"), tool("preprocess_data"), tool("merge_datasets")


@pytest.fixture
def prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"document {number} " * (number + 1)}) + "\n" for number in range(20))
    )
    maker.main(
        [
            "--input",
            str(tmp_path / "a.jsonl"),
            "--output-prefix",
            str(tmp_path / "a"),
            "--tokenizer-type",
            "bytes",
            "--append-eod",
        ]
    )
    capsys.readouterr()
    return f"{tmp_path}/a_text_document"


def test_what_it_shows(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--documents", "0", "2", "--tokenizer-type", "bytes", "--plot", f"{tmp_path}/a.png"]
    assert inspect.main([prefix, *words]) == 0
    out = capsys.readouterr().out
    assert "indexed, 20 documents, 2,485 tokens (uint16)" in out and "tokenizer: bytes of 257 ids" in out
    assert "2,465 bytes of text, 1.00 a token" in out and "--- document 2: 34 tokens\ndocument 2 document 2" in out
    assert sum(line.endswith("#") for line in out.splitlines()) == 5
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert inspect.main([prefix + ".bin", "--verify"]) == 0 and "every byte" in capsys.readouterr().out


def test_every_flipped_bit_is_found(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(3)
    for suffix in (".bin", ".idx", ".json"):
        path = Path(f"{prefix}{suffix}")
        whole = path.read_bytes()
        for place in draw.sample(range(8 * len(whole)), 150):
            flipped = bytearray(whole)
            flipped[place // 8] ^= 1 << place % 8
            path.write_bytes(flipped)
            try:
                found = inspect.main([prefix, "--verify"]) == 1 and "DAMAGED" in capsys.readouterr().out
            except ValueError as error:  # refused at opening
                found = "is damaged" in str(error)
            assert found, (suffix, place)
        path.write_bytes(whole[:-2])
        with pytest.raises(ValueError, match="is damaged"):
            inspect.main([prefix, "--verify"])
        path.write_bytes(whole)
    assert inspect.main([prefix, "--verify"]) == 0


def test_ids_outside_the_vocabulary_are_found_without_a_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "a", np.dtype("<u2"))
    builder.add([1, 300])
    builder.end_document()
    builder.finish()
    assert inspect.main([f"{tmp_path}/a", "--verify", "--tokenizer-type", "bytes"]) == 1
    assert "ids from 1 to 300, but the vocabulary has 257" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match="no hashes to compare"):
        inspect.main([f"{tmp_path}/a", "--verify"])


def test_bad_input(prefix: str, tmp_path: Path) -> None:
    for words, reason in (
        ([prefix, "--documents", "20", "--tokenizer-type", "bytes"], "there are documents 0 to 19"),
        ([prefix, "--documents", "0"], "--documents needs --tokenizer-type"),
        ([prefix, "--tokenizer-type", "builtin"], "names another tokenizer"),
        ([prefix, "--plot", f"{tmp_path}/a.xyz"], "--plot .*a.xyz: give a file"),
        ([prefix, "--plt"], "unrecognized"),
        ([f"{tmp_path}/none"], "no such file"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=reason):
            inspect.main(words)


def test_merging_checks_the_manifests(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merger.main(["--input", prefix, prefix, "--output-prefix", f"{tmp_path}/twice"])
    assert "40 documents and 4,970 tokens" in capsys.readouterr().out
    assert inspect.main([f"{tmp_path}/twice", "--verify"]) == 0
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match="holds no .idx"):
        merger.main(["--input", str(folder), "--output-prefix", f"{tmp_path}/x"])
    whole = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes(b"\x05" + whole[1:])
    with pytest.raises(ValueError, match="is damaged: its tokens are not those of its manifest"):
        merger.main(["--input", prefix, "--output-prefix", f"{tmp_path}/x"])
    assert not list(tmp_path.glob("x*"))
