"""Training goes on under another layout as if it had not moved. All pairs of layouts: 371f5f5:benchmarks/layouts.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed import run_ranks
from tests.megatron.gpt2.checkpoint.moved_runs import AFTER, BEFORE, Layout, Seen, begin, difference, global_batch, move
from tests.megatron.gpt2.train.training_runs import write_text

ONE, TWO, FOUR = Layout(1, 1), Layout(2, 1), Layout(4, 1)
STAGES, STAGES_SHARDED = Layout(1, 1, False, 2), Layout(1, 2, True, 2)
TWO_SHARDED, SQUARE, SQUARE_SHARDED = Layout(1, 2, True), Layout(2, 2), Layout(2, 2, True)
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
def unmoved(folder: Path) -> Unmoved:
    return Unmoved(folder)


class Unmoved:
    """What each rank of a run sees that stays where it was. The runs of a world size are made when the first of them is
    asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[Layout, list[Seen]] = {}

    def __getitem__(self, layout: Layout) -> list[Seen]:
        if layout not in self._seen:
            world_size = layout.world_size
            layouts = sorted({source for source, _ in MOVES if source.world_size == world_size})
            by_rank = run_ranks(begin, world_size, str(self._folder), layouts)
            self._seen.update(zip(layouts, map(list, zip(*by_rank, strict=True)), strict=True))
        return self._seen[layout]


@pytest.mark.parametrize(
    ("ranks_before", "ranks_after"),
    [(1, 4), (2, 1), (2, 2), *(pytest.param(*ranks, marks=pytest.mark.wide) for ranks in ((2, 4), (4, 1), (4, 4)))],
)
def test_the_losses_are_those_of_the_unmoved_run(
    folder: Path, unmoved: Unmoved, ranks_before: int, ranks_after: int
) -> None:
    world_size = ranks_after
    moves = [
        (source, target)
        for source, target in MOVES
        if (source.world_size, target.world_size) == (ranks_before, ranks_after)
    ]
    assert moves and {source: unmoved[source] for source, _ in moves}
    by_rank = run_ranks(move, world_size, str(folder), moves)
    for (source, target), seen in zip(moves, map(list, zip(*by_rank, strict=True)), strict=True):
        assert len(seen) == world_size and len(seen[0].losses) == AFTER
        assert difference(seen, unmoved[source]) < 1e-5, (source, target)
        assert {of_rank.consumed_samples for of_rank in seen} == {8 * BEFORE}
        # The losses are of the same samples, and so will the next one be: the order is global.
        expected = global_batch(unmoved[source], source)
        assert expected.shape == (8, 33)
        assert torch.equal(global_batch(seen, target), expected), (source, target)


def test_the_comparison_would_see_a_lost_moment(folder: Path, unmoved: Unmoved) -> None:
    losses = unmoved[ONE][0].losses
    assert losses[0] - losses[-1] > 0.01, "the run must learn something, or equality shows nothing"
    forgetful = move(0, 1, str(folder), [(ONE, ONE)], "--no-load-optim")
    assert difference(forgetful, unmoved[ONE]) > 1e-3
