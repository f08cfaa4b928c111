"""Every test of the formats makes its models on one rank, unless it starts others."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import mpu
from tests.megatron.gpt2.formats.made import CASES, unpack


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    mpu.initialize_model_parallel(1)
    yield
    mpu.destroy_model_parallel()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every checkpoint that megatron-core wrote, unpacked, by its name."""
    base = tmp_path_factory.mktemp("torch_dist")
    for name in CASES:
        unpack(name, base / name)
    return {name: base / name for name in CASES}
