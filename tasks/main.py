#!/usr/bin/env python3
"""`gpt2 evaluate` under its name in Megatron v1 and v2."""

import sys

if __name__ == "__main__":
    sys.path.insert(0, sys.path[0].removesuffix("tasks"))
    from megatron.gpt2.__main__ import run

    run("evaluate")
