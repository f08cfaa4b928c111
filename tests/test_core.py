"""The core: CONTRIBUTING lists its files in their reading order, the README names them, and it stays small."""

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


def test_the_core_is_as_small_as_it_is_said_to_be() -> None:
    lines = sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for _, path in LISTED)
    assert lines < 4000
    for page in PAGES:
        text = (ROOT / page).read_text()
        files, printed = re.search(r"(\d+) files[^.]*?about (\d,\d00) lines", " ".join(text.split())).groups()
        assert int(files) == len(LISTED), page
        assert abs(int(printed.replace(",", "")) - lines) <= 50, f"{page} says {printed}, and it is {lines}"
