"""--partition-activations and its like: the same run to the bit, and a line where they change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.config import without_effect
from megatron.gpt2.config.arguments import parse
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, start, steps, write_text

FULL = "--recompute-granularity full --hidden-dropout 0.1 --global-batch-size 8"


def trained(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    """What three steps show, with whole inputs and with split ones."""
    found = []
    for number, flag in enumerate(("", "--partition-activations")):
        flags = f"{FULL} --model-parallel-size {world_size} --save {folder}/{number} {flag}"
        run = start(rank, world_size, folder, flags)
        found.append(steps(run, 3))
        finish(run)
    return found


def test_split_inputs_change_no_bit(tmp_path: Path):
    write_text(tmp_path)
    for whole, split in run_ranks(trained, 2, str(tmp_path)):
        assert whole == split and whole["loss"][0] > whole["loss"][-1]


@pytest.mark.parametrize(
    "line, device, said",
    [
        ("--checkpoint-activations --partition-activations", "cuda", ["there is one model-parallel rank"]),
        ("--partition-activations --model-parallel-size 2", "cuda", ["no layer is recomputed"]),
        (
            "--checkpoint-activations --distribute-saved-activations --sequence-parallel --model-parallel-size 2",
            "cuda",
            ["--sequence-parallel has split it"],
        ),
        ("--checkpoint-activations --partition-activations --checkpoint-in-cpu --model-parallel-size 2", "cuda", []),
        ("--checkpoint-activations --checkpoint-in-cpu", "cpu", ["the device's memory is the host's"]),
        ("--checkpoint-in-cpu", "cuda", ["no layer is recomputed"]),
        ("--cpu-offloading-num-layers 2", "cpu", ["the device's memory is the host's"]),
        ("--cpu-offloading-num-layers 2", "cuda", []),
    ],
)
def test_what_changes_nothing_is_said(line: str, device: str, said: list[str]):
    lines = list(without_effect(parse(line.split()).config, device))
    assert len(lines) == len(said)
    for words, expected in zip(lines, said, strict=True):
        assert words.startswith("--") and ": without effect, since " in words and expected in words
