from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron.gpt2.checkpoint.writer import Piece, write_checkpoint
from tests.megatron.gpt2.checkpoint.crafted import FILES, WHOLE
from tests.megatron.gpt2.checkpoint.versions import make_version_1


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save folder of one iteration: a matrix of 8 x 6, a half of its rows in each of two files, of two ranks."""
    save = tmp_path_factory.mktemp("written") / "save"
    for rank in (1, 0):
        write_checkpoint(
            save,
            1,
            files={FILES[rank]: {"x": Piece(WHOLE[4 * rank : 4 * rank + 4], (8, 6), (4 * rank, 0))}},
            facts={},
            rank=rank,
            world_size=2,
            attempt="a",
            timeout_s=5,
        )
    return save


@pytest.fixture
def newest(written: Path, tmp_path: Path) -> Path:
    """The iteration in a copy of its own, to be changed."""
    return shutil.copytree(written, tmp_path / "save") / "iter_0000001"


@pytest.fixture(params=[1, 2])
def folder(newest: Path, request: pytest.FixtureRequest) -> Path:
    """The same, of each version of the format."""
    if request.param == 1:
        make_version_1(newest)
    return newest
