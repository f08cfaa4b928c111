#!/usr/bin/env python3
"""`python -m megatron.gpt2.commands.evaluate_gpt2` under its name in Megatron v1 and v2, whose tasks WIKITEXT103 and
LAMBADA it has."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.gpt2.commands.evaluate_gpt2 import cli

if __name__ == "__main__":  # not in the ranks of --nproc-per-node, which import this file
    cli()
