"""What the benchmark of near-duplicates plants, at a size for a test: nothing is missed and nothing invented."""

from __future__ import annotations

from benchmarks import data_duplicates


def test_planted_pairs_are_found_and_no_others():
    found = data_duplicates.planted(3000, 300)
    assert found["pairs"] == 300 and found["recall"] >= 0.99 and found["false"] == 0


def test_memory_of_a_search_is_linear():
    assert data_duplicates.memory(20_000) < 100  # bytes a document
