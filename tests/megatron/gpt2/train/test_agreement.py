"""Ranks with different flags or files are refused before they train. If a rank later reads different data, the run
ends."""

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


def errors_of_different_ranks(rank: int, world_size: int, folder: Path) -> list[str]:
    """Return the error message of each case. In the first two cases the ranks agree. Then rank 1 has a different flag,
    precision or checkpoint. The last cases are about the number of threads, with and without --exact-layouts."""

    def decided(flags: str = "") -> RunContext:
        return make_context(folder, f"--save {folder}/save{rank} {flags}", RankInfo(rank, world_size, rank, world_size))

    same = decided()
    cases = [
        same,
        same,
        decided("--lr 1e-3") if rank else same,
        decided("--seed 7 --log-interval 3") if rank else same,
        dataclasses.replace(same, dtype=torch.bfloat16) if rank else same,
        dataclasses.replace(same, source="s", resume_metadata={"iteration": 4}) if rank else same,
    ]
    exact = decided("--exact-layouts 4")
    said = []
    lines: list[str] = []
    with mock.patch.object(devices, "code_hash", lambda: str(rank)):
        check_settings_match(same, lines.append)
    assert lines == [
        "WARNING: the source files of rank 1 are not those of rank 0: install the same version on every machine"
    ]
    for threads, case in [*((1, case) for case in cases), (1, exact), (1 + rank, exact), (1 + rank, same)]:
        torch.set_num_threads(threads)
        try:
            check_settings_match(case, print)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_ranks_with_different_settings_are_refused(tmp_path: Path) -> None:
    write_text(tmp_path)
    ours, theirs = run_ranks(errors_of_different_ranks, 2, tmp_path)
    assert ours[:2] == theirs[:2] == ["", ""]
    for rank, said in enumerate((ours, theirs)):
        assert said[6] == said[8] == ""
        assert said[7].startswith(
            "rank 1 has a different number of threads (OMP_NUM_THREADS) than rank 0 (on rank "
            f"{rank} it is {1 + rank}): start every rank with the same command line and env"
        )
        for line, name, values in zip(
            said[2:6],
            ("--lr", "--seed", "precision", "checkpoint to start from"),
            (
                ("0.00015", "0.001"),
                ("1234", "7"),
                ("torch.float32", "torch.bfloat16"),
                ("iteration 0, none", "iteration 4, found"),
            ),
            strict=True,
        ):
            expected = (
                f"rank 1 has a different {name} than rank 0 (on rank {rank} it is {values[rank]}): start every rank"
            )
            assert line.startswith(expected), line


def one_rank_reads_different_data(rank: int, world_size: int, folder: Path) -> tuple[str, int]:
    """Model-parallel ranks (0,1) and (2,3): rank 3 gets a different third batch. Return the error and the iteration."""
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
