"""What every test shares."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; ranks that tests start inherit it

import pytest

ROOT = Path(__file__).resolve().parents[1]


TEST_DATA = Path(os.environ.get("MEGATRON_TEST_DATA", ROOT.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real test files: $MEGATRON_TEST_DATA, else shared/data beside the project's folder."""
    if not TEST_DATA.is_dir():
        pytest.skip(f"{TEST_DATA} is not there; MEGATRON_TEST_DATA names the folder of real test files")
    return TEST_DATA


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: with two workers nobody waits for it at the end."""
    items.sort(key=lambda item: not item.name.startswith("test_commands_run_in_the_order_of_each_page"))
