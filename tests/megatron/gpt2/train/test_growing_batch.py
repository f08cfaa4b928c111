"""A run with a growing batch equals a sequence of runs with constant batch sizes. In the middle of the growth, it
continues in any layout with the same losses. ../checkpoint/test_any_layout.py compares the state itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, start, steps, write_text

PEAK = 1e-3
COMMON = (
    "--hidden-size 32 --hidden-dropout 0.1 --attention-dropout 0.1 --micro-batch-size 2 "
    "--lr-decay-style linear --override-opt-param-scheduler"
)
# The run has 5 steps of 4 samples, 2 of 8, then 12. The size changes at 18 and 36 samples. The rate is linear over 11
# batches of 12.
GROWING = f"{COMMON} --rampup-batch-size 4 4 36 --global-batch-size 12 --lr {PEAK} --lr-decay-iters 11"
# Each case has steps, batch size, and the start and end of the same linear rate if all steps had this size.
SEGMENTS = [(5, 4, PEAK, 33), (2, 8, PEAK * 38 / 33, 19), (3, 12, PEAK * 15 / 11, 15)]
TENSOR, STAGES, SHARDED = "--model-parallel-size 2", "--pipeline-model-parallel-size 2", "--use-distributed-optimizer"
MOVED = {
    2: [SHARDED, TENSOR, f"{STAGES} --micro-batch-size 1"],
    4: [f"{TENSOR} {SHARDED}", "--model-parallel-size 4", f"{STAGES} {SHARDED}", f"{TENSOR} {STAGES}"],
}


def losses_after_resume(rank: int, world_size: int, folder: str, layouts: Sequence[str]) -> list[list[float]]:
    """Return the losses after a checkpoint from the ramp-up, for each layout of `world_size` ranks. Save each run after
    the first two steps."""
    losses = []
    for number, layout in enumerate(layouts):
        where = f"--load {folder}/growing --save {folder}/moved_{world_size}_{number}"
        trainer = start(rank, world_size, folder, f"{GROWING} {where} {layout}")
        progress = trainer.progress
        assert (progress.iteration, progress.consumed_samples, trainer.current_global_batch_size) == (6, 28, 8)
        first = steps(trainer, 2)["loss"]
        assert trainer.checkpoints.save() is not None
        losses.append([*first, *steps(trainer, 2)["loss"]])
        assert progress.consumed_samples == 72
        finish(trainer)
    return losses


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_a_growing_batch_equals_constant_runs_and_resumes_in_other_layouts(tmp_path: Path, world_size: int):
    write_text(tmp_path)
    trainer = start(0, 1, tmp_path, f"{GROWING} --save {tmp_path}/growing")
    assert (trainer.context.global_batch_size, trainer.context.num_microbatches) == (12, 6)
    seen = steps(trainer, 6)
    assert trainer.checkpoints.save() is not None
    seen = {key: seen[key] + after for key, after in steps(trainer, 4).items()}
    assert trainer.progress.consumed_samples == 5 * 4 + 2 * 8 + 3 * 12
    finish(trainer)
    before = [0, 4, 8, 12, 16, 20, 28, 36, 48, 60]
    assert seen["rate"] == pytest.approx([PEAK * (1 - consumed / 12 / 11) for consumed in before], rel=1e-6)

    by_hand = []
    for number, (count, size, lr, end) in enumerate(SEGMENTS):
        flags = f"{COMMON} --global-batch-size {size} --lr {lr} --lr-decay-iters {end} --save {tmp_path}/{number}"
        trainer = start(0, 1, tmp_path, flags + (f" --load {tmp_path}/{number - 1}" if number else ""))
        by_hand += steps(trainer, count)["loss"]
        assert trainer.checkpoints.save() is not None
        finish(trainer)
    assert seen["loss"] == pytest.approx(by_hand, rel=0, abs=1e-6)
    assert seen["loss"][-1] < seen["loss"][0] - 0.1

    again, forgetful = losses_after_resume(0, 1, str(tmp_path), ["", "--no-load-optim"])
    assert again == seen["loss"][6:]
    assert again[1:] != pytest.approx(forgetful[1:], rel=0, abs=1e-3), "a lost moment would be seen"
    for losses in run_ranks(losses_after_resume, world_size, str(tmp_path), MOVED[world_size]):
        for after in losses:
            assert after == pytest.approx(again, rel=0, abs=1e-5)
    for number in range(len(MOVED[world_size])):  # The run moves there and back.
        save = f"{tmp_path}/moved_{world_size}_{number}"
        trainer = start(0, 1, tmp_path, f"{GROWING} --load {save} --save {tmp_path}/back_{number}")
        assert steps(trainer, 2)["loss"] == pytest.approx(again[2:], rel=0, abs=1e-5)
        finish(trainer)
