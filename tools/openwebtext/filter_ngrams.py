#!/usr/bin/env python3
"""Run `gpt2 filter-ngrams`, also if the project is not installed."""

from checkout import run

if __name__ == "__main__":
    run("filter-ngrams")
