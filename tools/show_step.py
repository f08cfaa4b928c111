#!/usr/bin/env python3
"""Run `gpt2 show-step`, also if the project is not installed."""

import sys

if __name__ == "__main__":  # not in the ranks of --nproc-per-node, which import this file
    sys.path.insert(0, sys.path[0].removesuffix("tools"))
    from megatron.gpt2.__main__ import run

    run("show-step")
