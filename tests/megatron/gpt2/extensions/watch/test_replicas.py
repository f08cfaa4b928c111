"""A flipped bit in weights, masters or moments is found before the next update, with its rank and tensor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.gpt2.extensions.watch.replicas import ROW, StateCorrupted, hash_ranges, minority
from megatron.gpt2.train.train_step import train_step
from tests.distributed import run_ranks
from tests.faults.injector import flip
from tests.megatron.gpt2.train.training_runs import finish, start, write_text

FLAGS = (
    "--num-layers 1 --hidden-size 32 --micro-batch-size 1 --global-batch-size 6 --check-replicas-interval 2"
).split()
UP, NORM = "transformer.layers.0.mlp.dense_h_to_4h.weight", "transformer.final_layernorm.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_bit_changes_only_the_hash_of_its_range(dtype: torch.dtype) -> None:
    buffer = torch.randn(4 * ROW).to(dtype)
    parts = [(0, 70), (2 * ROW, 2 * ROW), (2 * ROW, 4 * ROW)]
    before = hash_ranges(buffer, parts)
    assert before[1] == 0 and before[0] != before[2]
    bits = buffer.view(torch.int32 if dtype == torch.float32 else torch.int16)
    size = 8 * dtype.itemsize
    for place, part in ((0, 0), (69, 0), (2 * ROW, 2), (4 * ROW - 1, 2)):
        for bit in range(size):
            mask = 1 << bit if bit < size - 1 else -(1 << bit)
            bits[place] ^= mask
            assert (hash_ranges(buffer, parts) != before).nonzero().view(-1).tolist() == [part]
            bits[place] ^= mask
    assert minority([3, 3, 4]) == [2] and minority([3, 4]) == [0, 1] and minority([5]) == [] == minority([5, 5])


def step(trainer: Any) -> None:
    train_step(trainer)
    trainer.progress.count_step(trainer.current_global_batch_size)
    for hook in trainer.hooks:
        hook.after_step(trainer)


def errors_of_flips(
    rank: int, world: int, folder: str, flags: list[str], cases: list[tuple[int, int, str, str]]
) -> list[str]:
    """Return the error of each case (rank, iteration after which a bit flips, kind, name)."""
    lines = []
    for number, (bad, iteration, kind, name) in enumerate(cases):
        trainer = start(rank, world, folder, [*FLAGS, "--save", f"{folder}/save-{world}-{number}", *flags])
        line = ""
        try:
            for done in range(6):
                if rank == bad and done == iteration:
                    flip(trainer, kind, name)
                step(trainer)
        except StateCorrupted as error:
            line = f"{trainer.progress.iteration}: {error}"
        lines.append(line)
        finish(trainer)
    return lines


def test_one_process_names_the_tensor(tmp_path: Path) -> None:
    write_text(tmp_path, 1000)
    lines = errors_of_flips(
        0,
        1,
        str(tmp_path),
        ["--precision", "bf16"],
        [(0, 2, kind, UP) for kind in ("weight", "master", "exp_avg", "exp_avg_sq")] + [(9, 0, "", "")],
    )
    for line, kind in zip(lines, ("weight", "master", "exp_avg", "exp_avg_sq"), strict=False):
        assert line.startswith(
            f"2: rank 0 holds a different {kind} of {UP} than the update of iteration 2 left, the last "
            "clean hash: the memory of a rank has changed by itself"
        ), lines
    assert lines[4] == ""  # no bit flipped


def test_replicas_name_the_rank(tmp_path: Path) -> None:
    """The replicas find a bit that flips while the rank's own state is not hashed."""
    write_text(tmp_path, 1000)
    three = run_ranks(errors_of_flips, 3, str(tmp_path), [], [(1, 3, "exp_avg", UP), (2, 2, "weight", NORM)])
    assert three[0] == three[1] == three[2]
    of_others, of_itself = three[0]
    assert of_others.startswith(
        f"4: rank 1 holds a different weight of {UP} and 1 other than the other replicas, since "
        "iteration 2, the last clean hash: "
    ), of_others  # the update of iteration 4 used the flipped moment
    assert of_itself.startswith(f"2: rank 2 holds a different weight of {NORM} than the update of iteration 2"), (
        of_itself
    )


def errors_of_layouts(rank: int, world: int, folder: str) -> list[str]:
    tensor = ["--model-parallel-size", "2", "--sequence-parallel"]
    lines = errors_of_flips(rank, world, f"{folder}", tensor, [(1, 3, "weight", NORM), (1, 2, "exp_avg", UP)])
    sharded = [*"--use-distributed-optimizer --precision bf16 --save".split(), f"{folder}/sharded"]
    lines += errors_of_flips(rank, world, folder, sharded, [(1, 2, "master", ""), (0, 3, "weight", "")])
    stages = [*"--num-layers 2 --pipeline-model-parallel-size 2 --save".split(), f"{folder}/stages"]
    return lines + errors_of_flips(rank, world, folder, stages, [(1, 2, "exp_avg_sq", NORM)])


def test_split_sharded_and_staged_state(tmp_path: Path) -> None:
    write_text(tmp_path, 1000)
    first, second = run_ranks(errors_of_layouts, 2, str(tmp_path))
    assert first == second
    norm_apart, up, master, weight, staged = first
    assert norm_apart.startswith(f"4: ranks 0-1 hold a different weight of {NORM}"), norm_apart
    assert " than each other, since iteration 2" in norm_apart
    assert up.startswith(f"2: rank 1 holds a different exp_avg of {UP} than the update"), up
    assert re.match(r"2: rank 1 holds a different master of \S+ than the update", master), master
    assert weight == "", weight  # the update of iteration 4 has rounded it from its master again
    assert staged.startswith(f"2: rank 1 holds a different exp_avg_sq of {NORM} than the update"), staged
