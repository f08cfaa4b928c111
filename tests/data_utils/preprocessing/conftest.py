from __future__ import annotations

import pytest

from data_utils.preprocessing import plan


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LEAST_SHARD_BYTES", 5000)
