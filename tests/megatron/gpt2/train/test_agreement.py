"""Ranks that were started in different ways, or see different files, are refused before they train."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from megatron.gpt2.config import fields
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.train.setup import MAY_DIFFER, check_ranks_agree, prepare_run
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import SMALL, write_text


def unlike_ranks(rank: int, world_size: int, folder: str) -> list[str]:
    """What is said of ranks of which rank 1 has another flag, precision or checkpoint, after two that agree; then of
    --exact-layouts with the same number of threads and another, and of another one without."""

    def prepared(*flags: str):
        arguments = parse(
            [
                *SMALL,
                "--train-data",
                f"{folder}/text.txt",
                "--data-cache-path",
                f"{folder}/cache",
                "--save",
                f"{folder}/save{rank}",
                *flags,
            ]
        )
        return prepare_run(arguments, Ranks(rank, world_size, rank, world_size), lambda line: None)

    same = prepared()
    cases = [
        same,
        same,
        prepared("--lr", "1e-3") if rank else same,
        prepared("--seed", "7", "--log-interval", "3") if rank else same,
        dataclasses.replace(same, dtype=torch.bfloat16) if rank else same,
        dataclasses.replace(same, source="s", start={"iteration": 4}) if rank else same,
    ]
    exact = prepared("--exact-layouts", "4")
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
