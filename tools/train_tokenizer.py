#!/usr/bin/env python3
"""Run `gpt2 train-tokenizer`, also if the project is not installed."""

from checkout import run

if __name__ == "__main__":
    run("train-tokenizer")
