"""Training steps of two command lines in turns, in one run: which takes longer, and by how much."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from benchmarks import arms, report
from benchmarks.problem import Arm, Problem
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.train.build import build_run
from megatron.gpt2.train.train_step import train_step
from tests.megatron.gpt2.pipeline.test_communication import BytesSent


def steps_in_turns(
    rank: int,
    world_size: int,
    problem: Problem,
    ways: Mapping[str, tuple[str, ...]],
    pairs: int,
    precision: str = "bf16",
) -> dict[str, dict[str, list[float]]]:
    """Of each of two `ways`, a name and its flags: "clock" and "processor", the seconds of `pairs` steps by the clock
    and of this rank's processors, and "sent", the bytes that this rank sends in one step."""
    steps, found = {}, {}
    for name, flags in ways.items():
        arm = Arm(name, "ours", precision=precision, flags=(*flags, "--save", f"{problem.scratch}/{name}"))
        run = build_run(arms.our_run(problem, arm, Ranks(rank, world_size, rank, world_size)), lambda line: None)
        steps[name] = arms.trainer(run).step
        with BytesSent(run.parallel) as counted:
            train_step(run)
        found[name] = {"clock": [], "processor": [], "sent": [float(sum(counted.sent.values()))]}
    for number in range(pairs):
        for name in list(ways)[:: (1, -1)[number % 2]]:
            used, clock = time.process_time(), time.perf_counter()
            steps[name]()
            found[name]["clock"].append(time.perf_counter() - clock)
            found[name]["processor"].append(time.process_time() - used)
    return found


def beside(found: Mapping[str, Mapping[str, list[float]]], kind: str) -> dict[str, Any]:
    """The second way's steps over the first one's, pair by pair, and the fastest of each. kind: "clock" or
    "processor"."""
    (first, a), (second, b) = ((name, values[kind]) for name, values in found.items())
    return {
        f"{first}_seconds": report.spread(a),
        f"{second}_seconds": report.spread(b),
        "ratio": report.spread([y / x for x, y in zip(a, b, strict=True)]),
        "of_best": min(b) / min(a),
    }
