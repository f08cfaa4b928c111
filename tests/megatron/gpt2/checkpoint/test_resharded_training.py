"""Training continues with the same losses after a change of the layout. 371f5f5:benchmarks/layouts.py tests all
pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed import run_ranks
from tests.megatron.gpt2.checkpoint.resharded_runs import (
    AFTER,
    BEFORE,
    ParallelLayout,
    RunResult,
    difference,
    global_batch,
    resume_runs,
    train_and_save,
)
from tests.megatron.gpt2.train.training_runs import write_text

ONE, TWO, FOUR = ParallelLayout(1, 1), ParallelLayout(2, 1), ParallelLayout(4, 1)
STAGES, STAGES_SHARDED = ParallelLayout(1, 1, False, 2), ParallelLayout(1, 2, True, 2)
TWO_SHARDED, SQUARE, SQUARE_SHARDED = ParallelLayout(1, 2, True), ParallelLayout(2, 2), ParallelLayout(2, 2, True)
MOVES = [
    (ONE, FOUR),
    (ONE, SQUARE_SHARDED),
    (TWO, ONE),
    (TWO, TWO_SHARDED),
    (TWO_SHARDED, TWO),
    (TWO_SHARDED, FOUR),
    (SQUARE_SHARDED, ONE),
    (FOUR, SQUARE),
    (TWO_SHARDED, STAGES),
    (STAGES, ONE),
    (STAGES_SHARDED, TWO),
    (ONE, STAGES_SHARDED),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moved")
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def reference_runs(folder: Path) -> ReferenceRuns:
    return ReferenceRuns(folder)


class ReferenceRuns:
    """Results of runs without a change of the layout. The runs of a world size start when a test first needs one of
    them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[ParallelLayout, list[RunResult]] = {}

    def __getitem__(self, layout: ParallelLayout) -> list[RunResult]:
        if layout not in self._seen:
            world_size = layout.world_size
            layouts = sorted({source for source, _ in MOVES if source.world_size == world_size})
            by_rank = run_ranks(train_and_save, world_size, str(self._folder), layouts)
            self._seen.update(zip(layouts, map(list, zip(*by_rank, strict=True)), strict=True))
        return self._seen[layout]


@pytest.mark.parametrize(
    ("ranks_before", "ranks_after"),
    [(1, 4), (2, 1), (2, 2), *(pytest.param(*ranks, marks=pytest.mark.wide) for ranks in ((2, 4), (4, 1), (4, 4)))],
)
def test_the_losses_are_those_of_the_unmoved_run(
    folder: Path, reference_runs: ReferenceRuns, ranks_before: int, ranks_after: int
) -> None:
    world_size = ranks_after
    moves = [
        (source, target)
        for source, target in MOVES
        if (source.world_size, target.world_size) == (ranks_before, ranks_after)
    ]
    assert moves and {source: reference_runs[source] for source, _ in moves}
    by_rank = run_ranks(resume_runs, world_size, str(folder), moves)
    for (source, target), seen in zip(moves, map(list, zip(*by_rank, strict=True)), strict=True):
        assert len(seen) == world_size and len(seen[0].losses) == AFTER
        assert difference(seen, reference_runs[source]) < 1e-5, (source, target)
        assert {of_rank.consumed_samples for of_rank in seen} == {8 * BEFORE}
        # The losses and the next batch are of the same samples, because the order of samples is global.
        expected = global_batch(reference_runs[source], source)
        assert expected.shape == (8, 33)
        assert torch.equal(global_batch(seen, target), expected), (source, target)


def test_the_comparison_would_see_a_lost_moment(folder: Path, reference_runs: ReferenceRuns) -> None:
    losses = reference_runs[ONE][0].losses
    assert losses[0] - losses[-1] > 0.01, "the run must learn something, or equality shows nothing"
    forgetful = resume_runs(0, 1, str(folder), [(ONE, ONE)], "--no-load-optim")
    assert difference(forgetful, reference_runs[ONE]) > 1e-3
