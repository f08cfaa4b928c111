"""Test that in fp16 all ranks overflow, skip and recover together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.gpt2.optimizer.optimizer import LossScaler
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, snapshot, start, steps, write_text


def overflow(rank: int, world_size: int, folder: str, flags: str) -> dict[str, Any]:
    """In steps 2, 3 and 4 one gradient on one rank is not finite. The scale may double after 3 clean steps."""
    fp16 = "--precision fp16 --initial-loss-scale 1024 --loss-scale-window 3"
    schedule = "--lr-decay-style linear --warmup 0.01 --lr 1e-3"
    trainer = start(rank, world_size, folder, f"{fp16} {schedule} --save {folder}/overflow {flags}".split())
    weights: list[torch.Tensor] = []
    if rank == world_size - 1:
        poison = {2: torch.inf, 3: torch.nan, 4: -torch.inf}
        bias = next(p for name, p in trainer.state.model.named_parameters() if name.endswith("dense_h_to_4h.bias"))
        bias.register_hook(lambda grad: grad + poison.get(len(weights), 0.0))
    step = trainer.state.optimizer.step

    def watched() -> None:
        weights.append(torch.cat(trainer.state.buffer.masters))
        step()

    trainer.state.optimizer.step = watched  # type: ignore[method-assign]
    seen = steps(trainer, 10)
    seen["moved"] = [not torch.equal(a, b) for a, b in zip(weights, weights[1:], strict=False)]
    seen["finite"] = all(torch.isfinite(t).all() for t in snapshot(trainer).values())
    seen["counted"] = int(trainer.state.optimizer.skipped_steps), int(trainer.state.optimizer.num_updates)
    finish(trainer)
    return seen


@pytest.mark.parametrize(
    "world_size, flags",
    [
        (2, "--pipeline-model-parallel-size 2"),
        (4, "--model-parallel-size 2"),
        (2, "--use-distributed-optimizer"),
    ],
)
def test_fp16_overflow_is_agreed_and_survived(tmp_path: Path, world_size: int, flags: str):
    write_text(tmp_path)
    for result in run_ranks(overflow, world_size, str(tmp_path), flags):
        assert result["skipped"] == [False, False, True, True, True, False, False, False, False, False]
        # With hysteresis 2, the first overflow only skips, the next two halve the scale, and three clean steps double
        # it.
        assert result["scale"] == [1024, 1024, 1024, 1024, 512, 256, 256, 256, 512, 512]
        assert result["moved"] == [False, True, False, False, False, True, True, True, True]  # The first rate is 0.
        assert result["counted"] == (3, 7)
        assert result["rate"][2:6] == [result["rate"][2]] * 4, "a skipped step does not move the schedule"
        assert result["finite"]


def test_the_scale_has_a_minimum_and_may_be_constant():
    scaler = LossScaler(2.0, dynamic=True, minimum=1.0, hysteresis=1)
    for _ in range(5):
        scaler.update(torch.ones(()))
    assert scaler.scale.item() == 1.0
    constant = LossScaler(128.0)
    constant.load_state_dict(scaler.state_dict())
    assert constant.scale.item() == 128.0
