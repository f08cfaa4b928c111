"""Layouts, and small runs that are saved under one and continued under another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.gpt2.train.run import Run
from tests.megatron.gpt2.train.training_runs import finish, start, steps

BEFORE, AFTER = 5, 5  # steps
# The bytes tokenizer's 257 ids are padded to 258 and 516 rows: of 4 ranks two hold padding alone.
FLAGS = (
    "--num-layers 4 --hidden-size 48 --make-vocab-size-divisible-by 129 --ddp-bucket-size 10000 --global-batch-size 8 "
    "--micro-batch-size 2 --attention-dropout 0.1 --hidden-dropout 0.1"
).split()


class Layout(NamedTuple):
    model_parallel: int
    data_parallel: int
    sharded: bool = False
    pipeline: int = 1
    chunks: int = 1  # of layers per rank

    def __str__(self) -> str:
        stages = f"_pp{self.pipeline}" + f"v{self.chunks}" * (self.chunks > 1) if self.pipeline > 1 else ""
        return f"{self.model_parallel}x{self.data_parallel}{stages}{'_sharded' if self.sharded else ''}"

    @property
    def world_size(self) -> int:
        return self.model_parallel * self.data_parallel * self.pipeline

    @property
    def flags(self) -> list[str]:
        flags = f"--model-parallel-size {self.model_parallel} --pipeline-model-parallel-size {self.pipeline}"
        flags += " --use-distributed-optimizer" * self.sharded
        return (flags + f" --num-virtual-stages-per-pipeline-rank {self.chunks}" * (self.chunks > 1)).split()


LAYOUTS = [Layout(mp, dp, sharded) for mp in (1, 2, 4) for dp in (1, 2) for sharded in (False, True)]
PIPELINES = [
    Layout(1, 1, False, 2),
    Layout(1, 1, False, 2, 2),
    Layout(2, 1, False, 2),
    Layout(1, 2, True, 2),
    Layout(1, 1, False, 4),
    Layout(2, 2, True, 2, 2),
    Layout(1, 1, False, 3),
    Layout(2, 1, False, 3),
]


class Seen(NamedTuple):
    """Of one rank: the losses of its last steps, what came before, and the tokens that it would train on next."""

    losses: list[float]
    consumed_samples: int
    tokens: Tensor  # [micro-batches, samples of each, s + 1]


def begin(rank: int, world_size: int, folder: str, layouts: Sequence[Layout]) -> list[Seen]:
    """Under each layout of this world: some steps, a checkpoint in `folder`/<layout>, and the steps after it."""
    seen = []
    for layout in layouts:
        run = start(rank, world_size, folder, [*FLAGS, *layout.flags, "--save", f"{folder}/{layout}"])
        steps(run, BEFORE)
        assert run.save() is not None
        seen.append(go_on(run, layout))
    return seen


def move(rank: int, world_size: int, folder: str, moves: Sequence[tuple[Layout, Layout]], *more: str) -> list[Seen]:
    """For each (source, target of this world): the steps after the source's checkpoint."""
    seen = []
    for source, target in moves:
        run = start(
            rank,
            world_size,
            folder,
            [*FLAGS, *target.flags, "--load", f"{folder}/{source}", "--save", f"{folder}/{source}-{target}", *more],
        )
        seen.append(go_on(run, target))
    return seen


def go_on(run: Run, layout: Layout) -> Seen:
    parallel = run.parallel
    assert (parallel.tensor_model_parallel_size, parallel.data_parallel_size) == layout[:2]
    assert parallel.pipeline_model_parallel_size == layout.pipeline
    assert run.engine.flat.is_sharded == (layout.sharded and layout.data_parallel > 1)
    assert run.progress.iteration == BEFORE
    consumed = run.progress.consumed_samples
    losses = steps(run, AFTER)["loss"]
    tokens, _ = next(run.data.loader)
    finish(run)
    return Seen(losses, consumed, tokens.view(run.prepared.micro_batches, -1, tokens.size(1)))


def global_batch(seen: Sequence[Seen], layout: Layout) -> Tensor:
    """What all ranks would train on next, in the order of the global samples, [samples, s + 1]."""
    first_stage = seen[: layout.model_parallel * layout.data_parallel]
    return torch.stack([of_rank.tokens for of_rank in first_stage[:: layout.model_parallel]], dim=1).flatten(0, 2)


def difference(moved: Sequence[Any], unmoved: Sequence[Any]) -> float:
    """The greatest difference of a loss, over all ranks."""
    assert len({len(of_rank.losses) for of_rank in (*moved, *unmoved)}) == 1
    return max(abs(a - b) for of_rank in moved for a, b in zip(of_rank.losses, unmoved[0].losses, strict=True))
