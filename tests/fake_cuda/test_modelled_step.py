"""The model of a GPU step: the figures that were worked out before it, and the program of today."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks.modelled_step import Assumptions, model
from benchmarks.report import RESULTS

# An audit of this program worked out the MFU of a compiled step in its own way, in percent.
AUDITED = {"345M": 45.2, "774M": 47.6, "1.5B": 51.0}


def test_the_committed_figures_are_of_these_assumptions_and_of_this_program():
    committed = json.loads((RESULTS / "modelled_step.json").read_text())
    assert committed["assumptions"] == dataclasses.asdict(Assumptions())
    assert {name: 100 * committed["steps"][f"{name} compiled"]["mfu"] for name in AUDITED} == pytest.approx(
        AUDITED, abs=0.25
    )
    whole, two_layers = (
        committed["steps"]["345M compiled"]["milliseconds"],
        model("345M", compiled=True, num_layers=2)["milliseconds"],
    )
    for part in ("layer products", "attention", "compiled layer"):
        assert two_layers[part] * 12 == pytest.approx(whole[part], rel=0.01), part
    for part in ("cross-entropy", "head products"):
        assert two_layers[part] == pytest.approx(whole[part], rel=0.01), part
