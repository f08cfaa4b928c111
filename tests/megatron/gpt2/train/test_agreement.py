"""Ranks that were started in different ways, or see different files, are refused before they train; one that reads
other data later ends the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from data_utils import DamagedData
from megatron.gpt2.config import fields
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.train.loop import train
from megatron.gpt2.train.setup import MAY_DIFFER, PreparedRun, check_ranks_agree
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, prepared, start, write_text


def unlike_ranks(rank: int, world_size: int, folder: str) -> list[str]:
    """What is said of ranks of which rank 1 has another flag, precision or checkpoint, after two that agree; then of
    --exact-layouts with the same number of threads and another, and of another one without."""

    def decided(*flags: str) -> PreparedRun:
        save = ["--save", f"{folder}/save{rank}"]
        return prepared(folder, [*save, *flags], Ranks(rank, world_size, rank, world_size))

    same = decided()
    cases = [
        same,
        same,
        decided("--lr", "1e-3") if rank else same,
        decided("--seed", "7", "--log-interval", "3") if rank else same,
        dataclasses.replace(same, dtype=torch.bfloat16) if rank else same,
        dataclasses.replace(same, source="s", start={"iteration": 4}) if rank else same,
    ]
    exact = decided("--exact-layouts", "4")
    said = []
    for threads, case in [*((1, case) for case in cases), (1, exact), (1 + rank, exact), (1 + rank, same)]:
        torch.set_num_threads(threads)
        try:
            check_ranks_agree(case)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_ranks_that_decide_otherwise_are_refused(tmp_path: Path) -> None:
    write_text(tmp_path)
    ours, theirs = run_ranks(unlike_ranks, 2, str(tmp_path))
    assert ours[:2] == theirs[:2] == ["", ""]
    for rank, said in enumerate((ours, theirs)):
        assert said[6] == said[8] == ""
        assert said[7].startswith(
            "rank 1 has another number of threads (OMP_NUM_THREADS) than rank 0 (on rank "
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
            expected = f"rank 1 has another {name} than rank 0 (on rank {rank} it is {values[rank]}): start every rank"
            assert line.startswith(expected), line


def test_only_fields_that_exist_may_differ() -> None:
    assert fields().keys() >= MAY_DIFFER


def one_rank_reads_other_data(rank: int, world_size: int, folder: str) -> tuple[str, int]:
    """Model-parallel ranks (0,1) and (2,3): rank 3 has another third batch. What it ends in, and after how many steps."""
    run = start(rank, world_size, folder, "--model-parallel-size 2 --log-interval 2 --train-iters 8".split())
    loader = run.data.loader

    def other_third_batch() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number, (text, samples) in enumerate(loader):
            yield text.flip(0) if number == 2 else text, samples

    if rank == 3:
        run.data.loader = other_third_batch()  # type: ignore[assignment]
    try:
        train(run)
    except DamagedData as error:
        return str(error), run.progress.iteration
    finally:
        run.data.loader = loader
        finish(run)
    return "", run.progress.iteration


def test_a_rank_that_reads_other_data_ends_the_run(tmp_path: Path) -> None:
    """On every rank, at the next log line, in one line that names it."""
    write_text(tmp_path)
    for said, iteration in run_ranks(one_rank_reads_other_data, 4, str(tmp_path)):
        assert said.startswith(
            "rank 3 has read other data than rank 2, with which it holds one model, by "
            "iteration 4: every machine needs the same files"
        ), said
        assert iteration == 4 and "\n" not in said
