"""One bit that flips in weights, masters or moments is found before the next update, with rank and tensor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.gpt2.extensions.watch.replicas import ROW, StateChanged, hash_of_parts, minority
from megatron.gpt2.train.train_step import train_step
from tests.distributed import run_ranks
from tests.faults.injector import flip
from tests.megatron.gpt2.train.training_runs import finish, start, write_text

FLAGS = (
    "--num-layers 1 --hidden-size 32 --micro-batch-size 1 --global-batch-size 6 --check-replicas-interval 2"
).split()
UP, NORM = "transformer.layers.0.mlp.dense_h_to_4h.weight", "transformer.final_layernorm.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_single_bit_changes_the_hash_of_its_part_alone(dtype: torch.dtype) -> None:
    buffer = torch.randn(4 * ROW).to(dtype)
    parts = [(0, 70), (2 * ROW, 2 * ROW), (2 * ROW, 4 * ROW)]
    before = hash_of_parts(buffer, parts)
    assert before[1] == 0 and before[0] != before[2]
    bits = buffer.view(torch.int32 if dtype == torch.float32 else torch.int16)
    size = 8 * dtype.itemsize
    for place, part in ((0, 0), (69, 0), (2 * ROW, 2), (4 * ROW - 1, 2)):
        for bit in range(size):
            mask = 1 << bit if bit < size - 1 else -(1 << bit)
            bits[place] ^= mask
            assert (hash_of_parts(buffer, parts) != before).nonzero().view(-1).tolist() == [part]
            bits[place] ^= mask
    assert minority([3, 3, 4]) == [2] and minority([3, 4]) == [0, 1] and minority([5]) == [] == minority([5, 5])


def step(run: Any) -> None:
    train_step(run)
    run.progress.step(run.samples_of_step)
    for hook in run.hooks:
        hook.after_step(run)


def flipped(rank: int, world: int, folder: str, flags: list[str], cases: list[tuple[int, int, str, str]]) -> list[str]:
    """The line of each case: (rank, iteration after which a bit flips, kind, name)."""
    lines = []
    for number, (bad, iteration, kind, name) in enumerate(cases):
        run = start(rank, world, folder, [*FLAGS, "--save", f"{folder}/save-{world}-{number}", *flags])
        line = ""
        try:
            for done in range(6):
                if rank == bad and done == iteration:
                    flip(run, kind, name)
                step(run)
        except StateChanged as error:
            line = f"{run.progress.iteration}: {error}"
        lines.append(line)
        finish(run)
    return lines


def test_one_process_names_the_tensor(tmp_path: Path) -> None:
    write_text(tmp_path, 1000)
    lines = flipped(
        0,
        1,
        str(tmp_path),
        ["--precision", "bf16"],
        [(0, 2, kind, UP) for kind in ("weight", "master", "exp_avg", "exp_avg_sq")] + [(9, 0, "", "")],
    )
    for line, kind in zip(lines, ("weight", "master", "exp_avg", "exp_avg_sq"), strict=False):
        assert line.startswith(
            f"2: rank 0 holds another {kind} of {UP} than the update of iteration 2 left, the last "
            "clean hash: the memory of a rank has changed by itself"
        ), lines
    assert lines[4] == ""  # no bit flipped


def test_replicas_name_the_rank(tmp_path: Path) -> None:
    """What flips where the rank itself does not look, with the replicas: a majority, two, and parts of a tensor."""
    write_text(tmp_path, 1000)
    three = run_ranks(flipped, 3, str(tmp_path), [], [(1, 3, "exp_avg", UP), (2, 2, "weight", NORM)])
    assert three[0] == three[1] == three[2]
    of_others, of_itself = three[0]
    assert of_others.startswith(
        f"4: rank 1 holds another weight of {UP} and 1 other than the other replicas, since "
        "iteration 2, the last clean hash: "
    ), of_others  # the update of 4 has used the moment
    assert of_itself.startswith(f"2: rank 2 holds another weight of {NORM} than the update of iteration 2"), of_itself


def two_ways(rank: int, world: int, folder: str) -> list[str]:
    tensor = ["--model-parallel-size", "2", "--sequence-parallel"]
    lines = flipped(rank, world, f"{folder}", tensor, [(1, 3, "weight", NORM), (1, 2, "exp_avg", UP)])
    sharded = [*"--use-distributed-optimizer --precision bf16 --save".split(), f"{folder}/sharded"]
    lines += flipped(rank, world, folder, sharded, [(1, 2, "master", ""), (0, 3, "weight", "")])
    stages = [*"--num-layers 2 --pipeline-model-parallel-size 2 --save".split(), f"{folder}/stages"]
    return lines + flipped(rank, world, folder, stages, [(1, 2, "exp_avg_sq", NORM)])


def test_split_sharded_and_staged_state(tmp_path: Path) -> None:
    write_text(tmp_path, 1000)
    first, second = run_ranks(two_ways, 2, str(tmp_path))
    assert first == second
    norm_apart, up, master, weight, staged = first
    assert norm_apart.startswith(f"4: ranks 0-1 hold another weight of {NORM}"), norm_apart
    assert " than each other, since iteration 2" in norm_apart
    assert up.startswith(f"2: rank 1 holds another exp_avg of {UP} than the update"), up
    assert re.match(r"2: rank 1 holds another master of \S+ than the update", master), master
    assert weight == "", weight  # the update of 4 has rounded it from its master again
    assert staged.startswith(f"2: rank 1 holds another exp_avg_sq of {NORM} than the update"), staged
