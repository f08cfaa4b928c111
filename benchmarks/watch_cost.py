"""What it costs that a run watches itself: a step of 124M with everything on, over one without."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks import arms, report
from benchmarks.exact_layouts import problem
from benchmarks.problem import Arm, Problem
from benchmarks.step_pairs import beside
from benchmarks.train import write_tokens
from megatron.gpt2.launch.heartbeat import BEAT, Heartbeat
from megatron.gpt2.launch.ranks import Ranks
from megatron.gpt2.training.build import build_run
from megatron.gpt2.training.run import Run
from megatron.gpt2.training.train_step import train_step
from tests.distributed import run_ranks

EVERYTHING = ("--check-replicas-interval", "100", "--log-straggler", "--rewind-on-spike")
GOAL = 1.02


def one_step(run: Run) -> None:
    """As the training loop does it."""
    run.watch.before_step()
    train_step(run)
    run.progress.step(run.samples_of_step)
    run.watch.after_step(run.progress.iteration)


def both_ways(rank: int, world: int, shape: Problem, flags: Sequence[str], pairs: int) -> dict[str, Any]:
    """Steps with and without EVERYTHING, in turns, and the seconds of what comes every so many steps, by itself."""
    work_class: Any = dist.Work
    waits, runs = [], {}
    for name, more in (("without", ()), ("everything", EVERYTHING)):
        arm = Arm(name, "ours", flags=(*flags, *more, "--save", f"{shape.scratch}/{name}"))
        runs[name] = build_run(arms.our_run(shape, arm, Ranks(rank, world, rank, world)), lambda line: None)
        runs[name].engine.model.train()
        waits.append(work_class.wait)  # --log-straggler counts them, for all of the process
        one_step(runs[name])
    found: dict[str, Any] = {name: {"clock": [], "processor": []} for name in runs}
    for number in range(pairs):
        for name in list(runs)[::(1, -1)[number % 2]]:
            work_class.wait = waits[list(runs).index(name)]
            used, clock = time.process_time(), time.perf_counter()
            one_step(runs[name])
            found[name]["clock"].append(time.perf_counter() - clock)
            found[name]["processor"].append(time.process_time() - used)
    watch, parts = runs["everything"].watch, {"hash": 0.0, "slow ranks": 0.0}
    assert watch.replicas is not None
    for _ in range(3):  # the last counts
        began = time.perf_counter()
        watch.replicas.after_update(100)
        watch.before_update()
        parts["hash"], began = time.perf_counter() - began, time.perf_counter()
        watch.slow({"forward": 1.0}, 2.0)
        parts["slow ranks"] = time.perf_counter() - began
    return {"steps": found, "parts": parts, "log_interval": runs["everything"].config.train.log_interval}


def beat_seconds() -> float:
    """Of one sign of life, which reads that of one other rank."""
    store = TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
    for other in range(2):
        store.set(f"beat/{other}", "0")
    heartbeat = Heartbeat(store, 0, 2, watched=(1,), warn=None)
    began = time.perf_counter()
    for _ in range(100):
        heartbeat.beat()
    seconds = (time.perf_counter() - began) / 100
    heartbeat.stop()
    return seconds


def cost(path: Path, smoke: bool, pairs: int) -> bool:
    """The steps in turns show what is done in each of them; they are short, of 2 x 1,024 tokens, since watching costs
    the same in a longer one. A hundredth of a hash, the log line's part of comparing ranks, and a sign of life per
    second are measured by themselves and added."""
    result: dict[str, Any] = {**report.header("state faults: cost"), "threads": torch.get_num_threads(), "goal": GOAL,
                              "beat_seconds": beat_seconds(), "rows": {}}
    with tempfile.TemporaryDirectory() as scratch:
        shape = dataclasses.replace(problem(Path(scratch), smoke), micro_batch_size=2)
        write_tokens(shape, 64)
        for name, world, flags in (("1 rank", 1, ()), ("2 replicas", 2, ("--micro-batch-size", "1"))):
            of_ranks = run_ranks(both_ways, world, shape, flags, pairs, timeout=3000)
            one, steps_of = of_ranks[0], beside(of_ranks[0]["steps"], "clock")
            step = steps_of["without_seconds"]["median"]
            added = (one["parts"]["hash"] / 100 + one["parts"]["slow ranks"] / one["log_interval"]) / step \
                + result["beat_seconds"] / BEAT
            ratio = steps_of["ratio"]["median"] + added
            result["rows"][name] = {"clock": steps_of, "processor": beside(one["steps"], "processor"),
                                    "seconds": one["parts"], "added": added, "ratio": ratio,
                                    "of_best": steps_of["of_best"] + added}
            report.write(path, result)
            print(f"{name}: {ratio:.4f} of a step of {step:.2f} s (of the best steps {steps_of['of_best'] + added:.4f}"
                  f"; {added:.5f} of it every so many steps; a hash takes {one['parts']['hash']:.3f} s)", flush=True)
    return smoke or all(row["ratio"] <= GOAL for row in result["rows"].values())
