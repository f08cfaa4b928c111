#!/usr/bin/env python3
"""`remove_group_duplicates` of megatron/gpt2/extensions/webtext/commands.py, also in a clone that is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.gpt2.extensions.webtext.commands import cli

if __name__ == "__main__":  # not in the processes that a stage spawns, which import this file
    cli("remove_group_duplicates")
