"""ZeRO stage 2: between micro-batches a rank holds the gradients that it owns, and the run is that of stage 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.gpt2.train.run import Run
from megatron.gpt2.train.train_step import train_step
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, start, state, steps, write_text

SHARDED = "--use-distributed-optimizer --ddp-bucket-size 40000 --hidden-dropout 0.1".split()


def held(run: Run) -> int:
    """Bytes of gradients that exist."""
    flat = run.engine.flat
    return sum(grads.nbytes for grads in (*flat._grads, *flat._owned_grads) if grads is not None)


def gradients_in_a_step(run: Run) -> tuple[list[int], int]:
    """What is held when each forward begins, and the most while backward runs."""
    begun: list[int] = []
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, held(run))

    hooks = [run.engine.model.register_forward_pre_hook(lambda *_: begun.append(held(run)))]
    hooks += [p.register_post_accumulate_grad_hook(look) for p in run.engine.model.parameters()]
    train_step(run)
    for hook in hooks:
        hook.remove()
    return begun, most


def both_stages(rank: int, world_size: int, folder: str, flags: list[str]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    more: list[str]
    for stage, more in ((1, []), (2, ["--shard-gradients"])):
        run = start(rank, world_size, folder, [*SHARDED, *flags, *more, "--save", f"{folder}/{len(flags)}_{stage}"])
        seen = steps(run, 3)
        weights = state(run)
        whole = 4 * run.engine.flat.params.numel()
        found[stage] = seen["loss"], seen["norm"], weights, gradients_in_a_step(run), whole
        finish(run)
    return found


def test_with_one_micro_batch_it_is_stage_1_to_the_bit(tmp_path: Path):
    write_text(tmp_path)
    for flags in ([], ["--grad-reduce-in-bf16"]):
        for found in run_ranks(both_stages, 2, str(tmp_path), ["--micro-batch-size", "4", *flags]):
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
def test_between_micro_batches_a_rank_holds_what_it_owns(tmp_path: Path, ranks: int, flags: list[str]):
    write_text(tmp_path)
    batch = "--micro-batch-size 2 --global-batch-size 12".split()
    for found in run_ranks(both_stages, ranks, str(tmp_path), [*batch, *flags]):
        (loss, norm, _, (begun_1, _), whole), (loss_2, norm_2, _, (begun, _), _) = found[1], found[2]
        assert loss_2 == pytest.approx(loss, rel=1e-5) and norm_2 == pytest.approx(norm, rel=1e-4)
        assert begun_1 == [0, whole, whole] and begun == [0, whole // 2, whole // 2]
