"""The drawings of the docs are those that their scripts make."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

FIGURES = sorted((ROOT / "docs" / "figures").glob("draw_*.py"))


@pytest.mark.parametrize("script", FIGURES, ids=lambda path: path.stem)
def test_a_figure_is_what_its_script_draws(script):
    drawn = subprocess.run(
        [sys.executable, str(script)], text=True, capture_output=True, check=True, timeout=240
    ).stdout
    assert drawn.startswith("<svg ")
    assert script.with_name(f"{script.stem.removeprefix('draw_')}.svg").read_text(encoding="utf-8") == drawn
