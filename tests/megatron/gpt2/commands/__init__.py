"""Tests of the programs that tools/ opens."""

from __future__ import annotations

import importlib
from types import ModuleType


def tool(name: str) -> ModuleType:
    """The program behind tools/`name`.py."""
    return importlib.import_module(f"megatron.gpt2.commands.{name}")
