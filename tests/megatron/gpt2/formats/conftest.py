"""The tests of formats run on one rank, unless a test starts more ranks."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpu
from tests.megatron.gpt2.formats.sample_checkpoints import ARCHIVE, CASES


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    mpu.initialize_model_parallel(1)
    yield
    mpu.destroy_model_parallel()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Unpack the checkpoints that megatron-core wrote, and return their folders by name."""
    base = tmp_path_factory.mktemp("torch_dist")
    shutil.unpack_archive(ARCHIVE, base, filter="data")
    return {name: base / name for name in CASES}
