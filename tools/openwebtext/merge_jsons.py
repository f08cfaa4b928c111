#!/usr/bin/env python3
"""`python -m megatron.gpt2.extensions.webtext.commands.merge_jsons`, also in a clone that is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.gpt2.extensions.webtext.commands.merge_jsons import cli

if __name__ == "__main__":  # not in the ranks of --nproc-per-node, which import this file
    cli()
