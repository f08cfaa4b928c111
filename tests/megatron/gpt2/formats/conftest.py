"""Every test of the formats makes its models on one rank, unless it starts others."""

from collections.abc import Iterator

import pytest

import mpu


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    mpu.initialize_model_parallel(1)
    yield
    mpu.destroy_model_parallel()
