"""Test that with --exact-layouts all layouts are bit-identical, with dropout: losses, norms, weights and Adam's
state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.formats import open_checkpoint
from megatron.gpt2.formats.compare import compare_tensors
from megatron.gpt2.optimizer.optimizer import MOMENTS
from megatron.gpt2.train.evaluate import evaluate
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.test_layouts import (
    FULL,
    SELECTIVE,
    SEQUENCE,
    SHARDED,
    SPLIT_INPUTS,
    TWO_CHUNKS,
    ZERO_BUBBLE,
    LayoutCase,
)
from tests.megatron.gpt2.train.training_runs import finish, start, steps, write_text

FLAGS = "--exact-layouts 4 --global-batch-size 12 --clip-grad 0.5"
# The first steps overflow with this loss scale.
FP16 = f"--precision fp16 --initial-loss-scale {2**21} --loss-scale-window 3"


ONE = LayoutCase(1, 1, 1, 1)
QUICK = [
    LayoutCase(2, 1, 1, 1, SEQUENCE),
    LayoutCase(1, 1, 2, 1, f"{SHARDED} {SELECTIVE}"),
    LayoutCase(1, 2, 1, 1, f"{ZERO_BUBBLE} {FULL}"),
    LayoutCase(4, 1, 1, 1, f"{FULL} {SPLIT_INPUTS} --recompute-num-layers 2"),
    LayoutCase(1, 1, 3, 1, SHARDED),
]
WIDE = [
    LayoutCase(1, 1, 1, 1, FULL),
    LayoutCase(1, 2, 1, 1),
    LayoutCase(4, 1, 1, 1),
    LayoutCase(1, 2, 2, 1, SHARDED),
    LayoutCase(2, 1, 2, 1, f"{SEQUENCE} {SHARDED}"),
    LayoutCase(2, 2, 1, 1, TWO_CHUNKS),
    LayoutCase(2, 2, 1, 1, f"{SEQUENCE} {FULL}"),
    LayoutCase(1, 2, 3, 1),
]  # At commit 371f5f5, benchmarks/exact_layouts.py has layouts of 8 ranks.


def train(
    rank: int, world_size: int, folder: Path, name: str, layouts: list[LayoutCase], precision: str, count: int
) -> list[dict[str, Any]]:
    """Return for each layout the losses, norms and validation loss. Each run is saved in a separate folder."""
    found = []
    for number, layout in enumerate(layouts):
        save = f"--save {folder}/{name}_{number}"
        trainer = start(rank, world_size, folder, f"{layout.command} {FLAGS} {precision} {save}")
        seen = steps(trainer, count)
        seen["evaluation"] = evaluate(trainer, trainer.data.splits.train, "train", 12).lm_loss
        found.append(seen)
        assert trainer.checkpoints.save() is not None
        finish(trainer)
    return found


def continue_run(
    rank: int, world_size: int, folder: Path, layout: LayoutCase, precision: str, count: int, continues: bool
) -> list[float]:
    """Load the run that another layout has saved, train `count` steps in this layout, and save the run."""
    save = f"--save {folder}/moved" + (f" --load {folder}/moved" if continues else "")
    trainer = start(rank, world_size, folder, f"{layout.command} {FLAGS} {precision} {save}")
    losses: list[float] = steps(trainer, count)["loss"]
    trainer.checkpoints.save()
    finish(trainer)
    return losses


def assert_same_state(folder: Path, name: str) -> None:
    """Check that weights, masters and Adam's moments equal those of one process to the last bit."""
    found = compare_tensors(open_checkpoint(folder / "one_0"), open_checkpoint(folder / name))
    assert not found.not_compared and {row.name.partition(".")[0] for row in found.rows} == {
        "model",
        "master",
        *MOMENTS,
    }
    assert found.equal, [row for row in found.rows if row.max_difference != 0]


def assert_equal(folder: Path, layouts: list[LayoutCase], precision: str, count: int) -> None:
    write_text(folder)
    (one,) = run_ranks(train, 1, folder, "one", [ONE], precision, count)[0]
    learned = [loss for loss, skipped in zip(one["loss"], one["skipped"], strict=True) if not skipped]
    assert learned[0] > learned[-1] + 0.02, "the run must learn something, or equality shows nothing"
    assert (len(learned) < count) == (precision is FP16), "an overflow is a part of what must be equal"
    for world_size in sorted({layout.world_size for layout in layouts}):
        here = [layout for layout in layouts if layout.world_size == world_size]
        by_rank = run_ranks(train, world_size, folder, f"{world_size}", here, precision, count, timeout=480)
        for number, (layout, *results) in enumerate(zip(here, *by_rank, strict=True)):
            assert all(repr(result) == repr(one) for result in results), layout  # NaN is not equal to itself.
            assert_same_state(folder, f"{world_size}_{number}")


def test_no_bit_depends_on_the_layout(tmp_path: Path) -> None:
    assert_equal(tmp_path, QUICK, "--precision bf16 --global-batch-size 6 --num-layers 2", 3)


@pytest.mark.wide
@pytest.mark.parametrize("precision, layouts", [("--precision fp32", WIDE), (FP16, QUICK)], ids=["fp32", "fp16"])
def test_no_bit_depends_on_more_layouts(tmp_path: Path, precision: str, layouts: list[LayoutCase]) -> None:
    """At commit 371f5f5, benchmarks/exact_layouts.py has compared these layouts over 30 steps in fp32."""
    assert_equal(tmp_path, layouts, precision, 5)


def assert_moves(folder: Path, moves: list[tuple[LayoutCase, int]], flags: str) -> None:
    """Check that a run that changes its layout has the losses and the final state of a run of one process.

    moves: (layout, number of steps).
    """
    write_text(folder)
    (one,) = run_ranks(train, 1, folder, "one", [ONE], flags, sum(count for _, count in moves))[0]
    seen: list[float] = []
    for layout, count in moves:
        seen += run_ranks(continue_run, layout.world_size, folder, layout, flags, count, bool(seen))[0]
    assert seen == one["loss"]
    assert_same_state(folder, "moved")


@pytest.mark.wide
def test_a_run_that_changes_its_layout_stays_bit_identical(tmp_path: Path) -> None:
    """The batch size also grows during this run."""
    moves = [(QUICK[3], 2), (QUICK[1], 3), (QUICK[2], 1), (LayoutCase(1, 1, 1, 1, FULL), 3)]
    assert_moves(tmp_path, moves, "--precision bf16 --rampup-batch-size 4 8 12")
