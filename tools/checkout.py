"""Let the programs in this folder run also if the project is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron.gpt2.__main__ import run

__all__ = ["run"]
