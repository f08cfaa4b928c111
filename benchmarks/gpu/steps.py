"""Stage `steps`: whole training steps of the three models, compiled, 4 micro-batches of 32: tokens a second, MFU by
both counts of FLOPs, and the peak of the memory beside what the planner expects of it.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.flops import utilisation
from benchmarks.gpu.cases import Cases
from benchmarks.gpu.setting import Setting
from benchmarks.problem import Arm
from benchmarks.train import run_arm
from megatron.gpt2.device import datasheet

TIMEOUT = 150.0  # seconds of a model, most of which are its compilation and the drawing of its weights
WARM_UP, STEPS = 1, 5


def run(setting: Setting, cases: Cases) -> None:
    """Its cases."""
    for name in setting.names:
        cases.run(name, functools.partial(steps_of, setting, name))


def steps_of(setting: Setting, name: str) -> dict[str, Any]:
    """Five steps in a process of their own. `visit` is what `benchmarks/arms.py` gives."""
    problem = setting.problem(name, 32, 4)
    arm = Arm("ours compiled", "ours", compiled=True)
    visit = run_arm(
        {
            "task": "measure",
            "problem": dataclasses.asdict(problem),
            "arm": dataclasses.asdict(arm),
            "nanogpt": "",
            "warmup": WARM_UP,
            "steps": 1 if setting.smoke else STEPS,
        },
        Path(setting.scratch),
        TIMEOUT,
    )
    if "failed" in visit:
        return visit
    seconds = report.spread(visit["step_s"])
    speed = visit["tokens_per_step"] / seconds["median"]
    gpu = report.machine()["gpu"]
    teraflops = None if gpu is None else datasheet(gpu)
    peak = 1e12 * teraflops if teraflops else None  # of a GPU that is not known there is no MFU
    found = {
        "tokens_per_s": speed,
        "step_s": seconds,
        "first_step_s": visit["first_step_s"],
        **utilisation(speed, visit, peak),
        "mfu_of_flops_per_s": peak,
        "expected_peak_gb": visit["expected_peak_bytes"] / 1e9,
    }
    if measured := visit["memory_bytes"].get("peak_allocated"):
        found |= {"peak_allocated_gb": measured / 1e9, "expected_over_peak": visit["expected_peak_bytes"] / measured}
    return {**found, "visit": visit}
