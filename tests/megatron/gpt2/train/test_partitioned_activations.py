"""Test that runs with recomputed and with partitioned activations are bit-identical, and that a flag without effect is
logged."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.gpt2.config import ignored_flags
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.train.train_step import train_step
from megatron.gpt2.train.trainer import Trainer
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, snapshot, start, steps, write_text

WAYS = ("", "--checkpoint-num-layers 2", "--partition-activations")


def collect_grads(trainer: Trainer, grads: list[torch.Tensor]) -> None:
    grads.append(torch.cat(trainer.state.buffer.owned_grads()))


def with_and_without_recompute(rank: int, world_size: int, folder: Path, precision: str) -> list[Any]:
    results: list[Any] = []
    for recompute in ("", "--recompute-granularity selective", *(f"--checkpoint-activations {way}" for way in WAYS)):
        flags = (
            f"--num-layers 3 --attention-dropout 0.1 --hidden-dropout 0.1 --precision {precision} {recompute} "
            f"--model-parallel-size {world_size} --save {folder}/recompute{len(results)}"
        )
        trainer = start(rank, world_size, folder, flags)
        seen = steps(trainer, 3)
        grads: list[torch.Tensor] = []  # the gradients of one more step without its optimizer step
        with mock.patch.object(trainer.state.optimizer, "step", partial(collect_grads, trainer, grads)):
            train_step(trainer)
        results.append((seen, grads[0], snapshot(trainer)))
        finish(trainer)
    return results


@pytest.mark.parametrize("world_size, precision", [(2, "fp32"), (1, "bf16")])
def test_recomputation_is_bit_identical(tmp_path: Path, world_size: int, precision: str):
    write_text(tmp_path)
    for plain, *others in run_ranks(with_and_without_recompute, world_size, tmp_path, precision):
        for other in others:
            assert other[0] == plain[0]
            assert torch.equal(other[1], plain[1]) and plain[1].any()
            assert all(torch.equal(other[2][name], tensor) for name, tensor in plain[2].items())


@pytest.mark.parametrize(
    "line, device, said",
    [
        ("--checkpoint-activations --partition-activations", "cuda", ["there is one tensor-parallel rank"]),
        ("--partition-activations --model-parallel-size 2", "cuda", ["it needs --recompute-granularity full"]),
        (
            "--checkpoint-activations --distribute-saved-activations --sequence-parallel --model-parallel-size 2",
            "cuda",
            ["--sequence-parallel splits these inputs already"],
        ),
        ("--checkpoint-activations --partition-activations --checkpoint-in-cpu --model-parallel-size 2", "cuda", []),
        ("--checkpoint-activations --checkpoint-in-cpu --attention-backend flash", "cpu", ["it needs a GPU"] * 2),
        ("--recompute-granularity selective", "cuda", ["Megatron's: the core of attention"]),
    ],
)
def test_flags_without_effect_are_logged(line: str, device: str, said: list[str]):
    lines = list(ignored_flags(parse(line.split()).config, device))
    assert len(lines) == len(said)
    for words, expected in zip(lines, said, strict=True):
        assert words.startswith("--") and expected in words
