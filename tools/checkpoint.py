#!/usr/bin/env python3
"""Run `gpt2 checkpoint`, also if the project is not installed."""

import sys

if __name__ == "__main__":  # false in child processes, which import this file
    sys.path.insert(0, sys.path[0].removesuffix("tools"))
    from megatron.gpt2.__main__ import run

    run("checkpoint")
