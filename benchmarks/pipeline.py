#!/usr/bin/env python3
"""How long a step of a pipeline takes, and what its ranks keep, beside what is published of the schedule:

    python benchmarks/pipeline.py                        # about 5 minutes on any number of cores
    chrt -f 1 python benchmarks/pipeline.py              # as root, beside other work: who has slept wakes at once
    python benchmarks/pipeline.py --smoke --output DIR   # two ranks, four micro-batches: does it run?

The ranks are processes that run training's own schedules, interpreter and exchanges over gloo. Only the layers are
stand-ins: they sleep, so that the ranks do not share the cores. The chunks of a rank sleep 50 ms together for each of
F, B and W of a micro-batch. A step is as long as the published length if exchanges and waking up take no time. JSON is
written after every case.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import mpu
from benchmarks import report
from megatron.gpt2.monitor.timers import Timers
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from megatron.gpt2.optimizer.gradient_reducer import GradientReducer
from megatron.gpt2.pipeline.schedule import SCHEDULES, Schedule, build_schedule
from megatron.gpt2.pipeline.timetable import kept, published_length
from megatron.gpt2.train.schedule_runner import ScheduleRunner

SECONDS = 0.05  # of F, B and W, each, of all chunks of a rank for one micro-batch
HIDDEN = 8
BOUND = {"1f1b": 0.05, "interleaved": 0.05, "zero-bubble": 0.10}


@dataclass(frozen=True)
class Case:
    schedule: str
    p: int
    v: int
    m: int

    def build(self) -> Schedule:
        return build_schedule(self.schedule, self.p, self.v, self.m)


def cases(smoke: bool) -> list[Case]:
    return [
        Case(name, p, 2 if name == "interleaved" else 1, m)
        for p in ((2,) if smoke else (2, 4))
        for m in ((4,) if smoke else (4, 8, 16))
        for name in SCHEDULES
    ]


class SleepingStage(nn.Module):
    """The chunks of one rank: each is a small linear layer, which sleeps in forward, and in backward before it gives
    the gradient of its input. `SleepingReducer` sleeps for that of its weight.

    slept: seconds in all, as the clock has it. kept, most_kept: micro-batches of one chunk whose weight gradient is
    still to come, now and at most.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        super().__init__()
        stages = [schedule.stage(rank, chunk) for chunk in range(schedule.chunks)]
        self.chunks = [range(stage, stage + 1) for stage in stages]
        self.layers = nn.ModuleDict(
            {str(stage): mpu.ColumnParallelLinear(HIDDEN, HIDDEN, bias=False) for stage in stages}
        )
        self._seconds = SECONDS / schedule.chunks
        self._is_last = stages[-1] == schedule.stages - 1
        self.slept, self.kept, self.most_kept = 0.0, 0, 0

    def forward(self, tokens: Tensor, chunk: range, hidden: Tensor | None) -> Tensor:
        x = self.empty_hidden(*tokens.shape).zero_() if hidden is None else hidden
        self.sleep()
        self.kept += 1
        self.most_kept = max(self.most_kept, self.kept)
        y: Tensor = _SleepsInBackward.apply(self.layers[str(chunk.start)](x), self)
        return y.sum() if self._is_last and chunk == self.chunks[-1] else y

    def empty_hidden(self, b: int, s: int) -> Tensor:
        return torch.empty(s, b, HIDDEN)

    def sleep(self) -> None:
        start = time.perf_counter()
        time.sleep(self._seconds)
        self.slept += time.perf_counter() - start


class _SleepsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: SleepingStage) -> Tensor:
        ctx.stage = stage
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.stage.sleep()
        return grad, None


class SleepingReducer(GradientReducer):
    """Sleeps when it is given a weight gradient: at the end of a backward, or where the schedule has its W."""

    def __init__(self, stage: SleepingStage) -> None:
        super().__init__(FlatParameters(stage, torch.float32, bucket_size=1 << 20), None)
        self._stage = stage

    def add(self, name: str, gradient: Tensor) -> None:
        self._stage.sleep()
        super().add(name, gradient)
        self._stage.kept -= 1


def run_rank(rank: int, p: int, chosen: Sequence[Case], steps: int, results: Any, rendezvous: str) -> None:
    """One rank of a pipeline of p, in all of its cases. Rank 0 puts what was found of each case into `results`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=p)
    parallel = mpu.initialize_model_parallel(1, p)
    for case in chosen:
        schedule = case.build()
        stage = SleepingStage(schedule, rank)
        reducer = SleepingReducer(stage)
        engine: Any = SimpleNamespace(model=stage, forward=stage, reducer=reducer, flat=reducer._flat)
        schedules = dict.fromkeys((1, case.m), schedule)  # by micro-batches; of 1 it asks for the number of chunks
        runner = ScheduleRunner(schedules.__getitem__, engine, parallel, Timers(torch.device("cpu")))
        micro_batches = [{"tokens": torch.zeros(1, 1, dtype=torch.int64)}] * case.m
        times = [one_step(runner, micro_batches) for _ in range(steps + 1)][1:]  # the first one connects the ranks
        own = {"times": times, "slept": stage.slept / (steps + 1), "kept": stage.most_kept / case.v}
        everyone: list[Any] = [None] * p
        dist.all_gather_object(everyone, own)
        if rank == 0:
            results.put(everyone)
    dist.barrier()
    dist.destroy_process_group()


def one_step(runner: ScheduleRunner, micro_batches: Sequence[dict[str, Tensor]]) -> tuple[float, float]:
    """When this rank began and ended a step that all ranks begin together, by a clock that all of them read."""
    dist.barrier()
    start = time.monotonic()
    runner(micro_batches)
    return start, time.monotonic()


def found_of(case: Case, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks of one case measured, beside what is published. A step is from the beginning of rank 0, which
    alone has something to do then, to the end of the last rank."""
    schedule = case.build()
    lengths = report.spread(
        [
            max(rank["times"][step][1] for rank in ranks) - ranks[0]["times"][step][0]
            for step in range(len(ranks[0]["times"]))
        ]
    )
    published = published_length(schedule, SECONDS, SECONDS, SECONDS)
    asked = 3 * SECONDS * case.m
    return {
        "schedule": case.schedule,
        "p": case.p,
        "v": case.v,
        "m": case.m,
        "seconds": lengths,
        "published_s": published,
        "ratio": lengths["median"] / published,
        "bubble": 1 - asked / lengths["median"],
        "published_bubble": 1 - asked / published,
        "slept_over_asked": max(rank["slept"] for rank in ranks) / asked,
        "kept": [rank["kept"] for rank in ranks],
        "expected_kept": [most / case.v for most in kept(schedule)],
        "load": os.getloadavg()[0],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="DIR", help="folder of pipeline.json (default: benchmarks/results)")
    parser.add_argument("--smoke", action="store_true", help="two ranks, four micro-batches, two steps")
    parser.add_argument("--steps", type=int, default=7, help="that are measured in each case (default: 7)")
    chosen = parser.parse_args(argv)
    if chosen.smoke and not chosen.output:
        parser.error("--smoke needs --output DIR: its figures are no results")
    path = (Path(chosen.output) if chosen.output else report.RESULTS) / "pipeline.json"
    result: dict[str, Any] = {
        **report.header("pipeline"),
        "smoke": chosen.smoke,
        "stage_seconds": SECONDS,
        "real_time": os.sched_getscheduler(0) == os.SCHED_FIFO,
        "runs": [],
    }
    every, steps = cases(chosen.smoke), 2 if chosen.smoke else chosen.steps
    for p in sorted({case.p for case in every}):
        of_p = [case for case in every if case.p == p]
        results = multiprocessing.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as scratch:
            ranks = spawn(run_rank, (p, of_p, steps, results, f"{scratch}/rendezvous"), nprocs=p, join=False)
            for case in of_p:
                while results.empty():
                    ranks.join(0.1)  # raises what a rank has raised
                result["runs"].append(found_of(case, results.get()))
                report.write(path, result)
            while not ranks.join():
                pass
    print(report.machine_line(result))
    print(
        report.table(
            ["schedule", "p", "m", "step, s", "published", "ratio", "bubble", "published", "kept", "load"],
            [
                [
                    run["schedule"],
                    str(run["p"]),
                    str(run["m"]),
                    f"{run['seconds']['median']:.3f}",
                    f"{run['published_s']:.3f}",
                    f"{run['ratio']:.3f}",
                    f"{run['bubble']:.1%}",
                    f"{run['published_bubble']:.1%}",
                    " ".join(f"{most:g}" for most in run["kept"]),
                    f"{run['load']:.1f}",
                ]
                for run in result["runs"]
            ],
        )
    )
    far = [run for run in result["runs"] if abs(run["ratio"] - 1) > BOUND[run["schedule"]]]
    print(
        f"{len(result['runs']) - len(far)} of {len(result['runs'])} within 5 % of the published length "
        "(zero-bubble: 10 %)"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
