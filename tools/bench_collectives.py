#!/usr/bin/env python3
"""Run `gpt2 bench-collectives`, also if the project is not installed."""

from checkout import run

if __name__ == "__main__":
    run("bench-collectives")
