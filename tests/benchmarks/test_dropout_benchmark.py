"""The statistics of masks are near what chance gives, and see a mask that is not."""

from __future__ import annotations

import pytest

from benchmarks import dropout


def test_a_million_elements_are_within_the_limit_and_a_repeated_sample_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dropout.measure(1, 0.1)
    assert len(found) == 10 and all(abs(value) < dropout.LIMIT for value in found.values()), found
    mask = dropout.mask
    monkeypatch.setattr(dropout, "mask", lambda sample, p, **which: mask(0, p))
    same = dropout.measure(1, 0.1)
    assert same["next sample"] > 100 and same["next layer"] > 100
