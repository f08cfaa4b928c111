"""The table of targets: everything that is read from outside."""

from __future__ import annotations

from tests.fuzz import checkpoint_targets, data_targets, run_targets
from tests.fuzz.target import Target

TARGETS = {target.name: target for target in (*checkpoint_targets.TARGETS, *data_targets.TARGETS, *run_targets.TARGETS)}


def target_of(name: str) -> Target:
    """The target of this name."""
    return TARGETS[name]
