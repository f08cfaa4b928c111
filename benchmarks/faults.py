#!/usr/bin/env python3
"""Faults at random moments, and what the runs are worth after them.

    python benchmarks/faults.py               # all parts: hours on two cores; a call that is interrupted goes on
    python benchmarks/faults.py kills         # 100 runs of 4 ranks, a rank of which is killed, and started again
    python benchmarks/faults.py nodes         # 50 runs on two "machines", one of which is lost, and comes back in half
    python benchmarks/faults.py stops         # 20 runs that SIGTERM stops at a random moment, and that are continued
    python benchmarks/faults.py kills --trials 3 --output DIR

A trial of `kills`, `nodes` and `stops` is good where every loss and every bit of the last checkpoint, weights and
optimizer, are those of the run that nothing disturbed. The exit code is 1 where a trial is not good.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch

from benchmarks import report
from megatron.gpt2.checkpoint.folder import find_checkpoint
from megatron.gpt2.monitor.incidents import read_incidents
from tests.faults.injector import inject
from tests.megatron.gpt2.dist.started_ranks import Rank, losses
from tests.megatron.gpt2.train.training_runs import write_text

STEPS, SAVE_INTERVAL = 7, 2
LAYOUTS = (
    ("--model-parallel-size", "2"),
    ("--model-parallel-size", "2"),
    ("--pipeline-model-parallel-size", "2"),
)  # each with two data-parallel ranks: a third with a pipeline
FLAGS = (
    "--nproc-per-node",
    "4",
    "--num-layers",
    "2",
    "--exit-interval",
    str(STEPS),
    "--save-interval",
    str(SAVE_INTERVAL),
)


def run(folder: Path, save: Path, *words: str, faults: Sequence[str] = (), machine: str = "") -> Rank:
    named = {"SLURMD_NODENAME": machine} if machine else {}
    return Rank(folder, [*FLAGS, "--save", str(save), *words], named, before=functools.partial(inject, faults))


def differing(save: Path, other: Path) -> list[str]:
    """What of two runs is not equal to the bit: losses, and tensors of the last checkpoint."""
    found, expected = (find_checkpoint(folder, log=print) for folder in (save, other))
    assert found is not None and expected is not None and expected.iteration == STEPS
    said = ["losses"] * (losses(save) != losses(other)) + ["iteration"] * (found.iteration != expected.iteration)
    names = [name for name in expected.names() if not name.startswith("rng")]
    return said + [name for name in names if not torch.equal(found.read(name), expected.read(name))]


@functools.cache
def undisturbed(folder: Path, layout: tuple[str, ...]) -> Path:
    """The --save folder of a run of this layout that nothing disturbs."""
    save = folder / "-".join(("undisturbed", *layout))
    code, output = run(folder, save, *layout).end()
    assert code == 0, output
    return save


def kill(folder: Path, seed: int) -> dict[str, Any]:
    """A rank is killed, in a third of the trials inside a save, and the run is started again by --max-restarts."""
    chance = random.Random(seed)
    layout, inside = LAYOUTS[seed % 3], seed // 3 % 3 == 0
    rank, step = chance.randrange(4), chance.randrange(STEPS)
    fault = f"kill:rank={rank}:step={step}"
    if inside:
        step = chance.choice(range(SAVE_INTERVAL, STEPS, SAVE_INTERVAL))
        fault = f"kill:rank={rank}:step={step}:inside=save:event={chance.randint(1, 4)}"
    other, save = undisturbed(folder, layout), folder / f"kill_{seed}"
    code, output = run(folder, save, *layout, "--max-restarts", "3", faults=[fault]).end()
    killed = [one for one in read_incidents(save) if one["kind"] == "restart"]
    return {
        "layout": " ".join(layout),
        "fault": fault,
        "exit_code": code,
        "restarts": len(killed),
        "differing": differing(save, other) if code == 0 else [output[-400:]],
        "good": code == 0 and len(killed) == 1 and not differing(save, other),
    }


def node(folder: Path, seed: int) -> dict[str, Any]:
    """Of two launchers with two ranks each the second is lost with its ranks. The run goes on with the other, at half the
    data-parallel size. In the half of the trials the machine comes back, and the run grows again."""
    chance = random.Random(seed)
    layout = ("--model-parallel-size", "2", "--exact-layouts", "2")
    other, save = undisturbed(folder, layout), folder / f"node_{seed}"
    lost, step, returns = 1, chance.randrange(STEPS - 2), seed % 2 == 1  # the first machine serves the store

    def machine(number: int, *faults: str) -> Rank:
        words = (
            *layout,
            "--nproc-per-node",
            "2",
            "--nnodes",
            "2",
            "--node-rank",
            f"{number}",
            "--elastic",
            "--max-restarts",
            "3",
            "--init-timeout",
            "10",
            "--init-method",
            f"file://{folder}/place_{seed}",
        )
        return run(folder, save, *words, faults=faults, machine=f"127.0.0.{number + 1}")

    saved = step // SAVE_INTERVAL * SAVE_INTERVAL
    hold = (f"hold:rank=0:step={saved}:attempt=1",) * returns  # until it is back: the run is short
    stays, gone = machine(1 - lost, *hold), machine(lost, f"machine:rank=any:step={step}")
    gone.end()
    began = time.monotonic()
    while sizes_of(save)[1:] != [1]:
        assert stays.process.is_alive(), stays.end()[1]
        time.sleep(0.1)
    back = machine(lost) if returns else None
    code, output = stays.end()
    code_back, said = back.end() if back else (0, "")
    sizes = sizes_of(save)
    found = differing(save, other) if code == 0 else [output[-400:]]
    return {
        "lost": f"machine {lost} before step {step}",
        "returns": returns,
        "exit_codes": [code, code_back],
        "data_parallel_sizes": sizes,
        "seconds_after_the_loss": round(time.monotonic() - began, 1),
        "differing": found or [said[-400:]] * (code_back != 0),
        "good": code == code_back == 0 and not found and sizes == [2, 1] + [2] * returns,
    }


def sizes_of(save: Path) -> list[int]:
    """The data-parallel sizes of a run, one after the other. A rank may be killed before it has noted its start."""
    starts = [one["layout"]["data"] for one in read_incidents(save) if one["kind"] == "start"]
    return [size for size, _ in itertools.groupby(starts)]


def stop(folder: Path, seed: int) -> dict[str, Any]:
    """SIGTERM at a random moment after the first step, in the half of the trials with --async-save."""
    chance = random.Random(seed)
    layout, asynchronous = LAYOUTS[seed % 3], ("--async-save",) * (seed % 2)
    other, save = undisturbed(folder, layout), folder / f"stop_{seed}"
    wanted = chance.randint(1, STEPS - 2)
    started = run(folder, save, *layout, *asynchronous)
    end = time.monotonic() + 240
    while not (started.output.exists() and f"iteration        {wanted}/" in started.output.read_text()):
        assert time.monotonic() < end and started.process.is_alive(), started.end()[1]
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.1))
    assert started.process.pid is not None
    os.kill(started.process.pid, signal.SIGTERM)
    asked = time.monotonic()
    code, output = started.end()
    seconds, ended = time.monotonic() - asked, json.loads((save / "ended.json").read_text())
    if ended["iteration"] < STEPS:
        again, said = run(folder, save, *layout).end()
        code, output = code or again, output + said
    return {
        "layout": " ".join(layout),
        "asynchronous": bool(asynchronous),
        "exit_code": code,
        "stopped_at": ended["iteration"],
        "reason": ended["reason"],
        "seconds_to_exit": round(seconds, 2),
        "differing": (found := differing(save, other) if code == 0 else [output[-400:]]),
        "good": code == 0 and not found,
    }


# The trial of each part, and how many there are.
PARTS: dict[str, tuple[Callable[[Path, int], dict[str, Any]], int]] = {
    "kills": (kill, 100),
    "nodes": (node, 50),
    "stops": (stop, 20),
}


def campaign(part: str, trials: int, output: Path) -> bool:
    """The trials of a part, from where an earlier call was interrupted; whether all are good."""
    path = output / f"faults_{part}.json"
    result: dict[str, Any] = {**report.header(f"faults: {part}"), "steps": STEPS, "trials": []}
    if kept := report.earlier(path, result, "what", "steps"):
        result["trials"] = kept["trials"][:trials]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.utime(write_text(folder, 1000), (1e9, 1e9))  # one that is just written is hashed by each rank
        for seed in range(len(result["trials"]), trials):
            began = time.monotonic()
            result["trials"].append(
                {"seed": seed, **PARTS[part][0](folder, seed), "seconds": round(time.monotonic() - began, 1)}
            )
            report.write(path, result)
            print(f"{seed + 1:>4} of {trials}  {json.dumps(result['trials'][-1])}", flush=True)
    good = sum(trial["good"] for trial in result["trials"])
    print(f"{part}: {good} of {trials} good; {path}")
    return bool(good == trials)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, help="how many (default: those of the campaign)")
    parser.add_argument("--output", metavar="DIR", type=Path, default=report.RESULTS)
    parser.add_argument("part", nargs="?", choices=tuple(PARTS), help="default: all")
    chosen = parser.parse_args(argv)
    good = [
        campaign(part, chosen.trials or PARTS[part][1], chosen.output)
        for part in ([chosen.part] if chosen.part else PARTS)
    ]
    return int(not all(good))


if __name__ == "__main__":
    raise SystemExit(main())
