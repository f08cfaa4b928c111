#!/usr/bin/env python3
"""Run `gpt2 remove-group-duplicates`, also if the project is not installed."""

from checkout import run

if __name__ == "__main__":
    run("remove-group-duplicates")
