"""The campaign of deaths goes from end to end, for two of its twenty kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import post_mortem


@pytest.mark.slow
def test_smoke(tmp_path: Path) -> None:
    assert len(post_mortem.DEATHS) == 20
    assert post_mortem.main(["--smoke", "--output", str(tmp_path)]) == 0
    trials = json.loads((tmp_path / "post_mortem.json").read_text())["trials"]
    assert [trial["found"] for trial in trials] == ["killed rank", "killed rank"]
