#!/usr/bin/env python3
"""Run `gpt2 post-mortem`, also if the project is not installed."""

from checkout import run

if __name__ == "__main__":
    run("post-mortem")
