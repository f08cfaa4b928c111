from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from data_utils import build_tokenizer
from tests.conftest import ROOT

TOOL = str(ROOT / "tools" / "train_tokenizer.py")


def test_a_bpe_in_gpt2s_format_is_lossless_and_what_hf_makes_of_the_same_files(tmp_path: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    text = "The quick brown fox — naïve 漢字 😀 — jumps over <|endoftext|> and 12345 lazy dogs.\n\n  'tis it's\t"
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"body": text * 3 + str(number)}) + "\n" for number in range(200))
    )
    files = [str(tmp_path / "new" / name) for name in ("encoder.json", "vocab.bpe")]
    words = [
        sys.executable,
        TOOL,
        "bpe",
        "--vocab-file",
        files[0],
        "--merge-file",
        files[1],
        "--train-data",
        str(tmp_path / "a.jsonl"),
        "--text-key",
        "body",
        "--vocab-size",
    ]
    subprocess.run([*words, "400"], check=True, capture_output=True, timeout=240)
    tokenizer = build_tokenizer("GPT2BPETokenizer", vocab_file=files[0], merge_file=files[1])
    ids = list(tokenizer.encode(text))
    assert tokenizer.decode(ids) == text and tokenizer.eod == tokenizer.vocab_size - 1 not in ids
    assert ids == ByteLevelBPETokenizer(*files).encode(text).ids and len(ids) < len(text) / 1.5
    small = subprocess.run([*words, "200"], capture_output=True, text=True, timeout=240)
    assert small.returncode == 2 and "--vocab-size must be at least 257" in small.stderr
