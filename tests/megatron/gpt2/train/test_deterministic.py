"""--deterministic: the same command gives the same bits again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, start, state, steps, write_text

FLAGS = (
    "--deterministic --precision bf16 --attention-dropout 0.1 --hidden-dropout 0.1 "
    "--use-distributed-optimizer --global-batch-size 8 --micro-batch-size 2"
).split()


def trained(rank: int, world_size: int, folder: str) -> list[tuple[bool, dict[str, Any], dict[str, torch.Tensor]]]:
    """Twice the same run, and one with another seed: whether torch's deterministic algorithms were on, what three
    steps show, and this rank's state after them."""
    found = []
    for number, seed in enumerate((1234, 1234, 1235)):
        run = start(rank, world_size, folder, [*FLAGS, "--seed", str(seed), "--save", f"{folder}/{number}"])
        is_on = torch.are_deterministic_algorithms_enabled()
        found.append((is_on, steps(run, 3), state(run)))
        finish(run)
    return found


def test_two_runs_are_equal_to_the_bit(tmp_path: Path) -> None:
    write_text(tmp_path)
    for (is_on, seen, tensors), (_, seen_again, again), (_, of_other_seed, _) in run_ranks(trained, 2, str(tmp_path)):
        assert is_on and seen == seen_again and seen["loss"] != of_other_seed["loss"]
        assert any(name.startswith("exp_avg.") for name in tensors) and tensors.keys() == again.keys()
        assert [name for name, tensor in tensors.items() if not torch.equal(tensor, again[name])] == []
