"""Trials with seeds, one or some at a time, and a JSON file that an interrupted call goes on with."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from tests.megatron.gpt2.train.training_runs import write_text

Trial = dict[str, Any]


def campaign(
    what: str, path: Path, chunks: Sequence[Sequence[int]], do: Callable[[Path, Sequence[int]], list[Trial]]
) -> bool:
    """The trials of all seeds in `chunks`, from where an earlier call was interrupted; whether all are good.

    do: the trials of a chunk, given a folder with a text in it; what it returns is written after each chunk.
    """
    result: dict[str, Any] = {**report.header(what), "trials": []}
    wanted = {seed for seeds in chunks for seed in seeds}
    if kept := report.earlier(path, result, "what"):
        result["trials"] = kept["trials"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.utime(write_text(folder, 1000), (1e9, 1e9))  # one that is just written is hashed by each rank
        for seeds in chunks:
            left, began = sorted(set(seeds) - {trial["seed"] for trial in result["trials"]}), time.monotonic()
            if not left:
                continue
            found = do(folder, left)
            took = round((time.monotonic() - began) / len(left), 1)
            result["trials"] += [{**trial, "seconds_of_trial": took} for trial in found]
            result["trials"].sort(key=lambda trial: trial["seed"])
            report.write(path, result)
            done = len(wanted & {trial["seed"] for trial in result["trials"]})
            for trial in found:
                print(f"{done:>4} of {len(wanted)}  {json.dumps(trial)}  {took} s", flush=True)
    good = sum(bool(trial["good"]) for trial in result["trials"] if trial["seed"] in wanted)
    print(f"{what}: {good} of {len(wanted)} good; {path.name}")
    return good == len(wanted)


def of_each(trial: Callable[[Path, int], Trial]) -> Callable[[Path, Sequence[int]], list[Trial]]:
    """Chunks of one trial at a time."""
    return lambda folder, seeds: [{"seed": seed, **trial(folder, seed)} for seed in seeds]
