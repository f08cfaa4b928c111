"""The statistics of masks are near what chance gives, and see a mask that is not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import dropout


def test_a_million_elements_are_within_the_limit_and_a_repeated_sample_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dropout.measure(1, 0.1)
    assert len(found) == 10 and all(abs(value) < dropout.LIMIT for value in found.values()), found
    mask = dropout.mask
    monkeypatch.setattr(dropout, "mask", lambda sample, p, **which: mask(0, p))
    same = dropout.measure(1, 0.1)
    assert same["next sample"] > 100 and same["next layer"] > 100


@pytest.mark.slow
def test_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dropout.py", "cost", "--smoke", "--output", str(tmp_path)])
    assert dropout.main() == 0
    (written,) = tmp_path.glob("dropout_cost_*_threads.json")
    (row,) = json.loads(written.read_text())["rows"].values()
    assert all(row[kind]["ratio"]["median"] > 0.1 for kind in ("clock", "processor"))
