"""Test that verify, prove-order and preflight name each bug of tests/zoo/bugs.py, and report no harmless change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.zoo.bugs import BUGS, HARMLESS, Patch
from tests.zoo.score import CHANGES, score, tools_that_name

SOME = ("mean of the ranks' means", "all-reduce leaves elements out", "both stages send first", "small buckets")


def test_the_page_lists_the_bugs():
    page = (ROOT / "docs/how-to/bug-zoo.md").read_text()
    assert [name for name, change in BUGS.items() if f"|{name}|{change.source}|" not in page] == []
    assert len(BUGS) >= 30 and len(HARMLESS) >= 30 and all(change.named for change in BUGS.values())


def test_each_change_finds_what_it_changes():
    """If a function is renamed in the program, the change that patches it fails here."""
    for change in CHANGES.values():
        with Patch.context() as patch:
            change.plant(patch)


PARTS = [pytest.param([*CHANGES][part::4], marks=pytest.mark.wide) for part in range(4)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("names", [SOME, *PARTS])
def test_bugs_are_named_and_harmless_changes_are_not(names: Sequence[str], tmp_path: Path):
    scores = score(names, tmp_path)
    by = {name: tools_that_name(name, scores[name]) for name in names}
    assert [name for name in names if bool(by[name]) != (name in BUGS)] == []
