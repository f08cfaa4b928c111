"""Train and export a small model of ordinary words for tests of evaluation."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from data_utils import load_tokenizer
from megatron.gpt2.checkpoint.save_folder import find_checkpoint
from megatron.gpt2.commands.pretrain_gpt2 import main as pretrain
from megatron.gpt2.formats.huggingface import write_huggingface
from tests.conftest import made_once

ITERATIONS = 80
LENGTH = 32  # number of positions
SHAPE = (
    f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length {LENGTH} --max-position-embeddings {LENGTH} "
    "--tokenizer-type builtin"
).split()
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact"
).split()


def word_model(shared_folder: Path, folder: Path) -> list[str]:
    """Put the checkpoint into `folder`/save, the export into `folder`/exported and the text into `folder`/text.txt.
    Return the words of the text. Most words are determined by the word before. The model is trained once for all test
    processes."""
    shutil.copytree(made_once(shared_folder / "word_model", train), folder, dirs_exist_ok=True)
    return (folder / "text.txt").read_text().split()


def train(folder: Path) -> None:
    draw, words, at = random.Random(0), [], 0
    for _ in range(8000):
        at = draw.randrange(len(WORDS)) if draw.random() < 0.3 else (7 * at + 3) % len(WORDS)
        words.append(WORDS[at])
    (folder / "text.txt").write_text(" ".join(words))
    files = ["--train-data", f"{folder}/text.txt", "--save", f"{folder}/save", "--data-cache-path", f"{folder}/cache"]
    how = f"--lr 5e-3 --micro-batch-size 16 --train-iters {ITERATIONS} --eval-iters 0 --device cpu --precision fp32"
    assert pretrain([*files, *SHAPE, *how.split()]) == 0
    write_huggingface(
        find_checkpoint(folder / "save", log=pytest.fail),
        folder / "exported",
        tokenizer=load_tokenizer(folder / "save" / "tokenizer"),
        log=pytest.fail,
    )
