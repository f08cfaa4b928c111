"""ZeRO stage 2: between micro-batches a rank keeps only its shard of the gradients. The results equal those of stage
1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.gpt2.train.train_step import train_step
from megatron.gpt2.train.trainer import Trainer
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, snapshot, start, steps, write_text

SHARDED = "--use-distributed-optimizer --ddp-bucket-size 40000 --hidden-dropout 0.1".split()


def gradient_bytes(trainer: Trainer) -> int:
    """Return the bytes of all allocated gradients."""
    buffer = trainer.state.buffer
    return sum(grads.nbytes for grads in (*buffer._grads, *buffer._shard_grads) if grads is not None)


def gradients_in_a_step(trainer: Trainer) -> tuple[list[int], int]:
    """Return the bytes of gradients at the start of each forward, and the maximum during backward."""
    begun: list[int] = []
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, gradient_bytes(trainer))

    hooks = [trainer.state.model.register_forward_pre_hook(lambda *_: begun.append(gradient_bytes(trainer)))]
    hooks += [p.register_post_accumulate_grad_hook(look) for p in trainer.state.model.parameters()]
    train_step(trainer)
    for hook in hooks:
        hook.remove()
    return begun, most


def zero_1_and_zero_2(rank: int, world_size: int, folder: str, flags: list[str]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    more: list[str]
    for stage, more in ((1, []), (2, ["--shard-gradients"])):
        trainer = start(rank, world_size, folder, [*SHARDED, *flags, *more, "--save", f"{folder}/{len(flags)}_{stage}"])
        seen = steps(trainer, 3)
        weights = snapshot(trainer)
        whole = 4 * trainer.state.buffer.params.numel()
        found[stage] = seen["loss"], seen["norm"], weights, gradients_in_a_step(trainer), whole
        finish(trainer)
    return found


def test_with_one_micro_batch_it_is_bit_identical_to_stage_1(tmp_path: Path):
    write_text(tmp_path)
    for flags in ([], ["--grad-reduce-in-bf16"]):
        for found in run_ranks(zero_1_and_zero_2, 2, str(tmp_path), ["--micro-batch-size", "4", *flags]):
            (loss, norm, weights, _, whole), (loss_2, norm_2, weights_2, (_, most), _) = found[1], found[2]
            assert loss == loss_2 and norm == norm_2
            assert all(torch.equal(weights[name], weights_2[name]) for name in weights)
            assert most < 0.8 * whole, "whole buckets are freed as backward goes on"


@pytest.mark.parametrize(
    "ranks, flags",
    [
        (2, []),
        pytest.param(4, ["--model-parallel-size", "2", "--sequence-parallel"], marks=pytest.mark.wide),
        pytest.param(2, ["--cpu-offload-optimizer", "--recompute-granularity", "full"], marks=pytest.mark.wide),
    ],
)
def test_between_micro_batches_a_rank_keeps_only_its_shard(tmp_path: Path, ranks: int, flags: list[str]):
    write_text(tmp_path)
    batch = "--micro-batch-size 2 --global-batch-size 12".split()
    for found in run_ranks(zero_1_and_zero_2, ranks, str(tmp_path), [*batch, *flags]):
        (loss, norm, _, (begun_1, _), whole), (loss_2, norm_2, _, (begun, _), _) = found[1], found[2]
        assert loss_2 == pytest.approx(loss, rel=1e-5) and norm_2 == pytest.approx(norm, rel=1e-4)
        assert begun_1 == [0, whole, whole] and begun == [0, whole // 2, whole // 2]
