"""Test that between log lines, training reads only values from the device that are a few steps old."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.gpt2.optimizer.optimizer import READ_DELAY
from megatron.gpt2.train.loop import train
from tests.megatron.gpt2.train.training_runs import finish, start, write_text


def test_too_many_skipped_steps_end_the_run_between_log_lines(tmp_path: Path) -> None:
    write_text(tmp_path)
    flags = "--precision fp16 --loss-scale 2e9 --max-skipped-steps 3 --log-interval 1000 --train-iters 40"
    trainer = start(0, 1, tmp_path, flags)
    with pytest.raises(FloatingPointError, match="^3 steps in a row had a gradient that is not finite"):
        train(trainer)
    assert trainer.progress.iteration == 3 + READ_DELAY
    finish(trainer)
