"""The tests of formats run on one rank, unless they start more."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import mpu
from tests.megatron.gpt2.formats.sample_checkpoints import CASES, FIXTURES, unpack


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    mpu.initialize_model_parallel(1)
    yield
    mpu.destroy_model_parallel()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints that megatron-core wrote, unpacked, by name."""
    base = unpack(FIXTURES / "checkpoints.tar.xz", tmp_path_factory.mktemp("torch_dist"))
    return {name: base / name for name in CASES}
