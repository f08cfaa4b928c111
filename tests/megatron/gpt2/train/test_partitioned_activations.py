"""Runs with --partition-activations and similar flags are bit-identical. A line is printed if a flag has no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.config import ignored_flags
from megatron.gpt2.config.arguments import parse
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, start, steps, write_text

FULL = "--recompute-granularity full --hidden-dropout 0.1 --global-batch-size 8"


def trained(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    """Return the results of three steps, with whole and with partitioned inputs."""
    found = []
    for number, flag in enumerate(("", "--partition-activations")):
        flags = f"{FULL} --model-parallel-size {world_size} --save {folder}/{number} {flag}"
        trainer = start(rank, world_size, folder, flags)
        found.append(steps(trainer, 3))
        finish(trainer)
    return found


def test_split_inputs_change_no_bit(tmp_path: Path):
    write_text(tmp_path)
    for whole, split in run_ranks(trained, 2, str(tmp_path)):
        assert whole == split and whole["loss"][0] > whole["loss"][-1]


@pytest.mark.parametrize(
    "line, device, said",
    [
        ("--checkpoint-activations --partition-activations", "cuda", ["there is one model-parallel rank"]),
        ("--partition-activations --model-parallel-size 2", "cuda", ["it needs --recompute-granularity full"]),
        (
            "--checkpoint-activations --distribute-saved-activations --sequence-parallel --model-parallel-size 2",
            "cuda",
            ["--sequence-parallel splits these inputs already"],
        ),
        ("--checkpoint-activations --partition-activations --checkpoint-in-cpu --model-parallel-size 2", "cuda", []),
        ("--checkpoint-activations --checkpoint-in-cpu", "cpu", ["it needs a GPU"]),
        ("--checkpoint-in-cpu", "cuda", ["it needs --recompute-granularity full"]),
        ("--cpu-offloading-num-layers 2", "cpu", ["it needs a GPU"]),
        ("--cpu-offloading-num-layers 2", "cuda", []),
    ],
)
def test_flags_without_effect_are_logged(line: str, device: str, said: list[str]):
    lines = list(ignored_flags(parse(line.split()).config, device))
    assert len(lines) == len(said)
    for words, expected in zip(lines, said, strict=True):
        assert words.startswith("--") and ": ignored: " in words and expected in words
