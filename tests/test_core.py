"""The core: CONTRIBUTING lists its files in their reading order, and the README names them."""

from __future__ import annotations

import re

from tests.conftest import ROOT

LISTED = re.findall(r"^\| (\d+) \| `([\w/]+\.py)` \| .+ \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
PAGES = ("README.md", "CONTRIBUTING.md")


def test_the_core_is_there_in_its_reading_order() -> None:
    assert [int(number) for number, _ in LISTED] == list(range(1, len(LISTED) + 1)) and len(LISTED) > 15
    assert len({path for _, path in LISTED}) == len(LISTED)
    missing = [path for _, path in LISTED if not (ROOT / path).is_file()]
    assert not missing
    reading_order = (ROOT / "README.md").read_text().partition("The core can be read in an afternoon")[2]
    named = re.findall(r"`(\w+)`", reading_order.partition("\n\nNext:")[0])
    assert named == [path.rpartition("/")[2].removesuffix(".py") for _, path in LISTED]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_pages_count_the_core() -> None:
    for page in PAGES:
        counted = re.search(r"(?:These|afternoon:\*\*) (\d+) files", (ROOT / page).read_text())
        assert counted and int(counted[1]) == len(LISTED), page
