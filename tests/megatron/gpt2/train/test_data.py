"""Ranks that share layers read their batches themselves: one that reads other data ends the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from data_utils import DamagedData
from megatron.gpt2.train.loop import train
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, start, write_text


def one_rank_reads_other_data(rank: int, world_size: int, folder: str) -> tuple[str, int]:
    """Model-parallel ranks (0,1) and (2,3): rank 3 has another third batch. What it ends in, and after how many steps."""
    run = start(rank, world_size, folder, ["--model-parallel-size", "2", "--log-interval", "2", "--train-iters", "8"])
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
