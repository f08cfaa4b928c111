"""The flags by which the batch grows: what they mean, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_utils import BatchSchedule
from megatron.gpt2.config.arguments import parse

RAMP = "--rampup-batch-size 4 4 9 --global-batch-size 8".split()


@pytest.mark.parametrize(
    "flags, stages",
    [
        ("--global-batch-size 8", ((0, 8),)),
        ("--gradient-accumulation-steps 3", ((0, 12),)),
        ("", ((0, 4),)),
        ("--rampup-batch-size 4 8 48 --global-batch-size 20", ((0, 4), (24, 12), (48, 20))),
        ("--rampup-batch-size 4 4 1e2 --gradient-accumulation-steps 2", ((0, 4), (100, 8))),
        ("--step-batch-size-schedule 0:16", ((0, 16),)),
        (
            "--step-batch-size-schedule 0:4,1.6k:.8K 2M:1200 --global-batch-size 1200",
            ((0, 4), (50, 800), (62500, 1200)),
        ),
    ],
)
def test_both_flags_and_none_make_one_schedule(flags: str, stages: tuple[tuple[int, int], ...]):
    config = parse(f"--micro-batch-size 2 --seq-length 32 {flags}".split()).config
    assert config.batch_schedule(2) == BatchSchedule(stages)


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--rampup-batch-size 4 2",
            "--rampup-batch-size 4 2: it takes START, INCREMENT and SAMPLES, the first two above ",
        ),
        (
            "--rampup-batch-size 4 3 9 --global-batch-size 8",
            "--rampup-batch-size 4 3 9: 3 samples at a time do not lead from 4 to --global-batch-size 8",
        ),
        (
            "--rampup-batch-size 4 2 9 --global-batch-size 8",
            "--rampup-batch-size 4 2 9: a batch of 6 is not divisible by --micro-batch-size 2 × 2 data-parallel ranks",
        ),
        (
            "--step-batch-size-schedule 0:4 1B:6",
            "--step-batch-size-schedule 0:4 1B:6: a batch of 6 is not divisible by ",
        ),
        ("--step-batch-size-schedule 0:x", "--step-batch-size-schedule 0:x: 0:x is no further TOKENS:SIZE"),
        ("--step-batch-size-schedule 0:4 31:8", "31:8 is no further TOKENS:SIZE"),  # the same sample
        ("--step-batch-size-schedule 0:4 inf:8", "inf:8 is no further TOKENS:SIZE"),
        ("--step-batch-size-schedule 1B:4", "1B:4: sizes go from 0 on, and never fall"),
        ("--step-batch-size-schedule 0:8 1B:4", "0:8 1B:4: sizes go from 0 on, and never fall"),
        (
            "--step-batch-size-schedule 0:4 1B:8 --global-batch-size 4",
            "--global-batch-size 4 is not the last size of --step-batch-size-schedule 0:4 1B:8",
        ),
        (
            "--step-batch-size-schedule 0:4 --rampup-batch-size 4 4 9",
            "give --rampup-batch-size or --step-batch-size-sched",
        ),
    ],
)
def test_impossible_schedules_are_one_line(flags: str, message: str):
    with pytest.raises(ValueError) as error:
        parse(f"--micro-batch-size 2 --seq-length 32 {flags}".split()).config.batch_schedule(2)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_sizes_that_are_past_may_be_too_small_for_more_ranks():
    config = parse(["--micro-batch-size", "2", *RAMP]).config
    assert config.batch_schedule(4, consumed_samples=12).final == 8
    with pytest.raises(ValueError, match="4 is not divisible"):
        config.batch_schedule(4, consumed_samples=8)


def test_a_flag_replaces_how_a_recipe_grows(tmp_path: Path):
    recipe = parse(RAMP)
    assert recipe.config.train.rampup_batch_size == (4, 4, 9)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"version": 1, "global_batch_size": 8, "config": recipe.config.as_dict()}))

    def stages(flags: str) -> tuple[tuple[int, int], ...]:
        return parse(["--config", str(file), *flags.split()]).config.batch_schedule(1).stages

    assert stages("--micro-batch-size 1") == ((0, 4), (9, 8))
    assert stages("--micro-batch-size 1 --global-batch-size 12") == ((0, 4), (5, 8), (9, 12))
    assert stages("--step-batch-size-schedule 0:16") == ((0, 16),)
    assert stages("--rampup-batch-size") == ((0, 8),)
