"""The learning rates of published runs, points of each style, and the loss scaler: in fp16 all ranks overflow, skip and
recover together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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


def make_schedule(style: str, **changes: Any) -> Callable[[float], float]:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, lr_decay_style=style, lr_warmup_fraction=0.1)
    config = dataclasses.replace(config, **changes)
    return lambda n: float(learning_rates(config, 100, 8, np.array([float(n)]))[0])


@pytest.mark.parametrize(
    "style, half_way, end",
    [
        ("constant", 1.0, 1.0),
        ("linear", 0.55, 0.1),
        ("cosine", 0.55, 0.1),
        ("exponential", 0.5**0.5, 0.5),
        ("WSD", 1.0, 0.1),
        ("cosine-2019", 0.5 * (np.cos(np.pi * 0.45) + 1), 0.1),
    ],
)
def test_styles(style, half_way, end):
    rate = make_schedule(style)
    assert [rate(n) for n in (0, 5, 10)] == [0.0, 0.5, 1.0]  # During the warm-up the rate may be below the floor.
    assert rate(55) == pytest.approx(half_way, rel=1e-12)
    assert rate(100) == pytest.approx(end, rel=1e-12) and rate(1000) == rate(100)
    config = OptimizerConfig(lr=1.0, min_lr=0.1, lr_decay_style=style, lr_warmup_fraction=0.1)
    table = learning_rates(config, 100, 8, np.arange(121.0))
    assert table.dtype == np.float64 and table.tolist() == [rate(n) for n in range(121)]
    assert np.all(np.diff(table[10:]) <= 0)


def test_wsd_decays_only_at_the_end():
    rate = make_schedule("WSD", lr_wsd_decay_iters=20)
    assert rate(80) == 1.0 > rate(81) and rate(90) == pytest.approx(0.1 + 0.9 * (2**0.5 - 1))


def test_warmup_in_iterations_and_none():
    assert make_schedule("linear", lr_warmup_iters=4)(2) == 0.5
    assert make_schedule("linear", lr_warmup_iters=0)(0) == make_schedule("linear", lr_warmup_fraction=0.0)(0) == 1.0
    assert make_schedule("cosine", lr_warmup_fraction=1.0)(50) == 0.5 and make_schedule(
        "cosine", lr_warmup_fraction=1.0
    )(101) == pytest.approx(0.1)


def test_the_decay_may_have_a_separate_length():
    for length in ({"lr_decay_iters": 50}, {"lr_decay_samples": 400}):
        rate = make_schedule("linear", **length)
        assert rate(5) == 1.0 and rate(50) == rate(100) == pytest.approx(0.1)


def test_samples_need_not_be_whole_iterations():
    rate = make_schedule("linear", lr_decay_samples=404, lr_warmup_samples=12)
    assert rate(1) == 1 / 1.5 and rate(1.5) == 1.0 and rate(26) == 0.1 + 0.9 * (1 - (26 - 1.5) / (50.5 - 1.5))
    assert rate(50) > rate(50.5) == pytest.approx(0.1)


def test_cosine_today_reaches_the_floor_that_2019_missed():
    today, then = (make_schedule(style, min_lr=0.0) for style in ("cosine", "cosine-2019"))
    assert today(100) == pytest.approx(0.0, abs=1e-15) and then(100) > 0.09
    assert then(90) == then(100) and make_schedule("cosine-2019", min_lr=0.2)(100) == 0.2


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
        make_schedule(style, **changes)(0)


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
        # The first update has rate 0.
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
