"""What it costs that a run watches itself: the seconds that it adds to a step of 124M, over a step without it.

Nothing that watches depends on the tokens of a step. So the seconds are measured on short steps, many pairs of which
fit into the time, and a difference of milliseconds does not drown in the noise of long ones.
"""

from __future__ import annotations

import dataclasses
import statistics
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
from benchmarks.train import write_tokens
from megatron.gpt2.dist.heartbeat import BEAT, Heartbeat
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.train.build import build_run
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.train_step import train_step
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
        for name in list(runs)[:: (1, -1)[number % 2]]:
            work_class.wait = waits[list(runs).index(name)]
            used, clock = time.process_time(), time.perf_counter()
            one_step(runs[name])
            found[name]["clock"].append(time.perf_counter() - clock)
            found[name]["processor"].append(time.process_time() - used)
    work_class.wait = waits[0]
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


def whole_step(rank: int, world: int, shape: Problem, flags: Sequence[str]) -> float:
    """The seconds of a step without anything: the median of three."""
    arm = Arm("whole", "ours", flags=(*flags, "--save", f"{shape.scratch}/whole"))
    run = build_run(arms.our_run(shape, arm, Ranks(rank, world, rank, world)), lambda line: None)
    run.engine.model.train()
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        one_step(run)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


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
    """The short steps in turns show what is done in each step. A hundredth of a hash, the log line's part of comparing
    ranks, and a sign of life per second are measured by themselves and added. The step that all of it is compared with
    has 2 x 1,024 tokens, few for a model of this size."""
    result: dict[str, Any] = {
        **report.header("state faults: cost"),
        "threads": torch.get_num_threads(),
        "goal": GOAL,
        "beat_seconds": beat_seconds(),
        "rows": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        shape = dataclasses.replace(problem(Path(scratch), smoke), micro_batch_size=2)
        short = dataclasses.replace(shape, seq_length=16)
        write_tokens(shape, 64)
        for name, world, flags in (("1 rank", 1, ()), ("2 replicas", 2, ("--micro-batch-size", "1"))):
            one = run_ranks(both_ways, world, short, flags, pairs, timeout=3000)[0]
            step = run_ranks(whole_step, world, shape, flags, timeout=3000)[0]
            in_each = {
                kind: report.spread([b - a for a, b in zip(*(way[kind] for way in one["steps"].values()), strict=True)])
                for kind in ("clock", "processor")
            }
            at_times = (
                one["parts"]["hash"] / 100
                + one["parts"]["slow ranks"] / one["log_interval"]
                + result["beat_seconds"] / BEAT * step
            )
            ratio = 1 + (in_each["clock"]["median"] + at_times) / step
            result["rows"][name] = {
                "step_seconds": step,
                "short_step_seconds": report.spread(one["steps"]["without"]["clock"]),
                "added_to_each_step_seconds": in_each,
                "parts_seconds": one["parts"],
                "added_at_times_seconds_per_step": at_times,
                "ratio": ratio,
            }
            report.write(path, result)
            print(
                f"{name}: {ratio:.4f} of a step of {step:.2f} s: {1000 * in_each['clock']['median']:.2f} ms in each "
                f"step, and {1000 * at_times:.2f} ms of what comes every so many steps",
                flush=True,
            )
    return smoke or all(row["ratio"] <= GOAL for row in result["rows"].values())
