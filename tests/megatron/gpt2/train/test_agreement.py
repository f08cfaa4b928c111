"""Test that a run with different flags or files on its ranks is refused, and that it ends if a rank later reads
different data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from data_utils import DamagedData
from megatron.gpt2 import device as devices
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.train.loop import train
from megatron.gpt2.train.setup import RunContext, check_settings_match
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, make_context, start, write_text

# (setting that differs, its value on rank 0, its value on rank 1)
CASES = [
    ("--lr", "0.00015", "0.001"),
    ("checkpoint to start from", "iteration 0, none", "iteration 4, found"),
    ("fingerprint of the training data", "", ""),
    ("fingerprint of the validation and test files", "", ""),
    ("number of threads (OMP_NUM_THREADS)", "1", "2"),
    ("", "", ""),
]


def errors_of_different_ranks(rank: int, world_size: int, folder: Path) -> list[str]:
    """Return the error message of each case. Only --exact-layouts needs equal numbers of threads."""

    def decided(flags: str = "") -> RunContext:
        return make_context(folder, f"--save {folder}/save{rank} {flags}", RankInfo(rank, world_size, rank, world_size))

    same = decided()
    of_rank_1 = (
        decided("--lr 1e-3"),
        dataclasses.replace(same, source="s", resume_metadata={"iteration": 4}),
        decided(f"--train-data {__file__}"),
    )
    lines: list[str] = []
    with mock.patch.object(devices, "code_hash", lambda: str(rank)):
        check_settings_match(same, lines.append)
    assert lines == [
        "WARNING: the source files of rank 1 are not those of rank 0: install the same version on every machine"
    ]
    said = []
    cases = [(1, case if rank else same) for case in of_rank_1]
    valid_data = __file__ if rank else folder / "text.txt"
    cases.append((1, decided(f"--eval-iters 1 --valid-data {valid_data}")))
    for threads, case in [*cases, (1 + rank, decided("--exact-layouts 4")), (1 + rank, same)]:
        torch.set_num_threads(threads)
        try:
            check_settings_match(case, print)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_ranks_with_different_settings_are_refused(tmp_path: Path) -> None:
    write_text(tmp_path)
    for rank, said in enumerate(run_ranks(errors_of_different_ranks, 2, tmp_path)):
        for line, (name, *values) in zip(said, CASES, strict=True):
            expected = f"rank 1 has a different {name} than rank 0 (on rank {rank} it is {values[rank]}"
            assert line.startswith(expected) and "): start every rank with" in line if name else not line, line


def one_rank_reads_different_data(rank: int, world_size: int, folder: Path) -> tuple[str, int]:
    """Give rank 3 a different third batch than rank 2, which is in its model-parallel group. Return the error message
    and the last iteration."""
    trainer = start(rank, world_size, folder, "--model-parallel-size 2 --log-interval 2 --train-iters 8")
    loader = trainer.data.loader

    def other_third_batch() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number, (text, samples) in enumerate(loader):
            yield text.flip(0) if number == 2 else text, samples

    if rank == 3:
        trainer.data.loader = other_third_batch()  # type: ignore[assignment]
    try:
        train(trainer)
    except DamagedData as error:
        return str(error), trainer.progress.iteration
    finally:
        trainer.data.loader = loader
        finish(trainer)
    return "", trainer.progress.iteration


def test_a_rank_with_different_data_ends_the_run(tmp_path: Path) -> None:
    """The run ends on every rank at the next log line, with one line that names the rank."""
    write_text(tmp_path)
    for said, iteration in run_ranks(one_rank_reads_different_data, 4, tmp_path):
        assert said.startswith(
            "by iteration 4 rank 3 has read different data than rank 2 of its model-parallel group: every machine "
            "needs the same files"
        ), said
        assert iteration == 4 and "\n" not in said
