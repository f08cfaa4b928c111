"""The learning rates of published runs, points of each style, and the loss scaler: in fp16 all ranks overflow, skip and
recover together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.gpt2.config import OptimizerConfig
from megatron.gpt2.optimizer.optimizer import LossScaler, learning_rates
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, snapshot, start, steps, write_text


@pytest.mark.parametrize(
    "iterations, final_scale, skipped, logged",
    [
        (320_000, 131_072, 16, ["3.937E-06", "8.625E-06"]),
        (300, 32_768, 18, ["1.258E-04", "5.257E-05", "1.806E-06"]),
        (600, 8_192, 20, ["1.444E-04", "1.210E-04", "8.518E-05", "4.666E-05", "1.574E-05", "6.939E-07"]),
    ],
)
def test_published_runs(iterations, final_scale, skipped, logged):
    """The run is Megatron's 345M in fp16. Every step overflows until the scale is small enough. Skipped steps do not
    count."""
    config = OptimizerConfig(lr=1.5e-4, lr_decay_style="cosine-2019", lr_warmup_fraction=0.01)
    scaler = LossScaler(config, torch.float16, "cpu")
    n, shown = 0, []
    for iteration in range(1, 100 * len(logged) + 1):
        overflow = scaler.scale.item() > final_scale
        scaler.update(torch.tensor(float(overflow)))
        n += not overflow
        if iteration % 100 == 0:
            shown.append(f"{learning_rates(config, iterations, 1, np.array([float(n)]))[0]:.3E}")
    assert scaler.scale.item() == final_scale and iteration - n == skipped
    assert shown == logged


def rates_after(style: str, changes: dict[str, Any], *n: float) -> list[float]:
    config = OptimizerConfig(**{"lr": 1.0, "min_lr": 0.1, "lr_warmup_fraction": 0.1, **changes}, lr_decay_style=style)
    return learning_rates(config, 100, 8, np.array(n)).tolist()


HALF_WAY_IN_2019, END_OF_2019 = (0.5 * (np.cos(np.pi * r) + 1) for r in (0.45, 0.8))


@pytest.mark.parametrize(
    "style, changes, rates",
    [
        ("constant", {}, {0: 0, 5: 0.5, 10: 1, 55: 1, 100: 1}),
        ("linear", {}, {0: 0, 5: 0.5, 10: 1, 55: 0.55, 100: 0.1, 1000: 0.1}),
        ("cosine", {}, {0: 0, 5: 0.5, 10: 1, 55: 0.55, 100: 0.1, 1000: 0.1}),
        ("exponential", {}, {0: 0, 5: 0.5, 10: 1, 55: 0.5**0.5, 100: 0.5, 1000: 0.5}),
        ("WSD", {}, {0: 0, 5: 0.5, 10: 1, 55: 1, 100: 0.1, 1000: 0.1}),
        ("WSD", {"lr_wsd_decay_iters": 20}, {80: 1, 90: 0.1 + 0.9 * (2**0.5 - 1), 100: 0.1}),
        # Megatron's schedule of 2019 ends above min_lr.
        ("cosine-2019", {"min_lr": 0.0}, {55: HALF_WAY_IN_2019, 90: END_OF_2019, 100: END_OF_2019}),
        ("cosine-2019", {"min_lr": 0.2}, {100: 0.2}),
        ("linear", {"lr_warmup_iters": 4}, {2: 0.5}),
        ("linear", {"lr_warmup_iters": 0}, {0: 1}),
        ("cosine", {"lr_warmup_fraction": 1.0}, {50: 0.5, 101: 0.1}),
        ("linear", {"lr_decay_iters": 50}, {5: 1, 50: 0.1, 100: 0.1}),
        ("linear", {"lr_decay_samples": 400}, {5: 1, 50: 0.1, 100: 0.1}),
        # 404 and 12 samples are not whole iterations of 8 samples.
        (
            "linear",
            {"lr_decay_samples": 404, "lr_warmup_samples": 12},
            {1: 1 / 1.5, 1.5: 1, 26: 0.1 + 0.9 * (1 - (26 - 1.5) / (50.5 - 1.5)), 50.5: 0.1},
        ),
    ],
)
def test_learning_rates(style: str, changes: dict[str, Any], rates: dict[float, float]) -> None:
    assert rates_after(style, changes, *rates) == pytest.approx(list(rates.values()), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    "style, changes, message",
    [
        (
            "linear",
            {"lr_warmup_iters": 101},
            r"the warm-up of 101 iterations \(--lr-warmup-iters\) is more than the 100",
        ),
        ("WSD", {"lr_wsd_decay_iters": 95}, "--lr-wsd-decay-iters 95 does not fit"),
    ],
)
def test_impossible_schedules(style, changes, message):
    with pytest.raises(ValueError, match=message):
        rates_after(style, changes, 0)


def overflow(rank: int, world_size: int, folder: Path, flags: str) -> dict[str, Any]:
    """In steps 2, 3 and 4 one gradient on one rank is not finite. The scale may double after 3 clean steps."""
    fp16 = "--precision fp16 --initial-loss-scale 1024 --loss-scale-window 3"
    schedule = "--lr-decay-style linear --warmup 0.01 --lr 1e-3"
    trainer = start(rank, world_size, folder, f"{fp16} {schedule} --save {folder}/overflow {flags}")
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
    for result in run_ranks(overflow, world_size, tmp_path, flags):
        assert result["skipped"] == [False, False, True, True, True, False, False, False, False, False]
        # With hysteresis 2, the first overflow only skips, the next two halve the scale, and three clean steps double
        # it.
        assert result["scale"] == [1024, 1024, 1024, 1024, 512, 256, 256, 256, 512, 512]
        # The first update has the learning rate 0.
        assert result["moved"] == [False, True, False, False, False, True, True, True, True]
        assert result["counted"] == (3, 7)
        assert result["rate"][2:6] == [result["rate"][2]] * 4, "a skipped step does not move the schedule"
        assert result["finite"]


def test_the_scale_has_a_minimum_and_may_be_constant():
    scaler = LossScaler(OptimizerConfig(initial_loss_scale=2.0, hysteresis=1), torch.float16, "cpu")
    for _ in range(5):
        scaler.update(torch.ones(()))
    assert scaler.scale.item() == 1.0
    constant = LossScaler(OptimizerConfig(loss_scale=128.0), torch.float16, "cpu")
    constant.load_state_dict(scaler.state_dict())
    assert constant.scale.item() == 128.0
