"""Tests of the programs in tools/, which no package holds."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from tests.conftest import ROOT


def tool(name: str) -> ModuleType:
    """tools/`name`.py as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
