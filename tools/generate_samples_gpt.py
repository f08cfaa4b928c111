#!/usr/bin/env python3
"""`gpt2 generate-text` under its name in Megatron v2."""

from checkout import run

if __name__ == "__main__":
    run("generate-text")
