"""Small training runs that save under one parallel layout and resume under a different one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.gpt2.train.trainer import Trainer
from tests.megatron.gpt2.train.training_runs import finish, start, steps

BEFORE, AFTER = 5, 5  # steps
# The 257 ids of the bytes tokenizer are padded to 258 or 516 rows. With 4 ranks, two ranks have only padding.
FLAGS = (
    "--num-layers 4 --hidden-size 48 --make-vocab-size-divisible-by 129 --ddp-bucket-size 10000 --global-batch-size 8 "
    "--micro-batch-size 2 --attention-dropout 0.1 --hidden-dropout 0.1"
).split()


class ParallelLayout(NamedTuple):
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


LAYOUTS = [ParallelLayout(mp, dp, sharded) for mp in (1, 2, 4) for dp in (1, 2) for sharded in (False, True)]
PIPELINES = [
    ParallelLayout(1, 1, False, 2),
    ParallelLayout(1, 1, False, 2, 2),
    ParallelLayout(2, 1, False, 2),
    ParallelLayout(1, 2, True, 2),
    ParallelLayout(1, 1, False, 4),
    ParallelLayout(2, 2, True, 2, 2),
    ParallelLayout(1, 1, False, 3),
    ParallelLayout(2, 1, False, 3),
]


class RunResult(NamedTuple):
    """Results of one rank: the losses of its last steps, the samples consumed before, and its next tokens."""

    losses: list[float]
    consumed_samples: int
    tokens: Tensor  # [micro-batches, samples of each, s + 1]


def train_and_save(rank: int, world_size: int, folder: str, layouts: Sequence[ParallelLayout]) -> list[RunResult]:
    """Train under each layout of this world size, save a checkpoint in `folder`/<layout>, and continue training."""
    seen = []
    for layout in layouts:
        trainer = start(rank, world_size, folder, [*FLAGS, *layout.flags, "--save", f"{folder}/{layout}"])
        steps(trainer, BEFORE)
        assert trainer.save() is not None
        seen.append(continue_run(trainer, layout))
    return seen


def resume_runs(
    rank: int, world_size: int, folder: str, moves: Sequence[tuple[ParallelLayout, ParallelLayout]], *more: str
) -> list[RunResult]:
    """Resume the source's checkpoint under each target layout of this world size, and continue training."""
    seen = []
    for source, target in moves:
        trainer = start(
            rank,
            world_size,
            folder,
            [*FLAGS, *target.flags, "--load", f"{folder}/{source}", "--save", f"{folder}/{source}-{target}", *more],
        )
        seen.append(continue_run(trainer, target))
    return seen


def continue_run(trainer: Trainer, layout: ParallelLayout) -> RunResult:
    parallel = trainer.parallel
    assert (parallel.tensor_model_parallel_size, parallel.data_parallel_size) == layout[:2]
    assert parallel.pipeline_model_parallel_size == layout.pipeline
    assert trainer.state.buffer.is_sharded == (layout.sharded and layout.data_parallel > 1)
    assert trainer.progress.iteration == BEFORE
    consumed = trainer.progress.consumed_samples
    losses = steps(trainer, AFTER)["loss"]
    tokens, _ = next(trainer.data.loader)
    finish(trainer)
    return RunResult(losses, consumed, tokens.view(trainer.context.num_microbatches, -1, tokens.size(1)))


def global_batch(seen: Sequence[RunResult], layout: ParallelLayout) -> Tensor:
    """The next batch of all ranks, in the order of the global samples, [samples, s + 1]."""
    first_stage = seen[: layout.model_parallel * layout.data_parallel]
    return torch.stack([of_rank.tokens for of_rank in first_stage[:: layout.model_parallel]], dim=1).flatten(0, 2)


def difference(moved: Sequence[Any], reference_runs: Sequence[Any]) -> float:
    """The greatest difference of a loss on any rank."""
    assert len({len(of_rank.losses) for of_rank in (*moved, *reference_runs)}) == 1
    return max(abs(a - b) for of_rank in moved for a, b in zip(of_rank.losses, reference_runs[0].losses, strict=True))
