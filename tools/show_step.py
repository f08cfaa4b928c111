#!/usr/bin/env python3
"""Run `gpt2 show-step`, also if the project is not installed."""

from checkout import run

if __name__ == "__main__":
    run("show-step")
