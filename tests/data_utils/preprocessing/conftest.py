from __future__ import annotations

import pytest

from data_utils.preprocessing import inputs


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "LEAST_SHARD_BYTES", 5000)
