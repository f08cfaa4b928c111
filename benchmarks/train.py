#!/usr/bin/env python3
"""Training steps of GPT-2 against its peers, on one machine in one run:

    python benchmarks/train.py --preset cpu --nanogpt DIR            # GPT-2 124M, s 1,024, b 2, bf16
    python benchmarks/train.py --preset gpu --part 2 --nanogpt DIR   # parts 2 to 5, each under 9 minutes on one H200
    python benchmarks/train.py --preset blocks                       # tensor-parallel blocks: benchmarks/blocks.py
    python benchmarks/train.py --preset gpu --part 2 --smoke --output DIR    # a tiny model on the CPU: does it run?

The parts are those of benchmarks/gpu.sh, whose first is benchmarks/first_minutes.py. Part 2: 345M with all arms. Parts
3 and 4: 774M and 1.5B, ours compiled against the fastest peer of part 2. Part 5: ours alone at 345M with dropout,
recomputation and 2019's settings, and one of the 8 ranks of 8.3B.

A gate first proves that all models compute the same. Then every arm runs in a fresh process, in mirrored order
(A B C C B A), on the same tokens; JSON is written after each, and the same command goes on after it unless --again is
given. A nanoGPT checkout is imported, never copied.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import numpy as np

from benchmarks import report
from benchmarks.flops import PEAK, published
from benchmarks.problem import ALONE, ARMS, MODELS, PARTS, SMOKE_COMPILER, Arm, Problem
from benchmarks.processes import run_limited
from benchmarks.report import ROOT
from benchmarks.training_report import close_to, finish
from data_utils.indexed_dataset import IndexedDatasetBuilder, token_dtype

GOALS = {"cpu": [("nanoGPT as shipped", 3.0), ("fastest peer in bf16", 1.10), ("Hugging Face, its faster", 1.3)]}
TOKENS = 1 << 22  # in the file, at most; arms that need more begin again
GATE = 1e-4  # relative, of the fp32 models; they differ by 2e-6, and the two forms of GELU by 7e-4


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=("cpu", "gpu", "blocks"), required=True)
    parser.add_argument("--part", type=int, choices=tuple(PARTS), default=2, help="of the preset gpu")
    parser.add_argument("--nanogpt", metavar="DIR", default="", help="a nanoGPT checkout; without it no such arm")
    parser.add_argument("--output", metavar="DIR", help="folder of the results (default: benchmarks/results)")
    parser.add_argument(
        "--rounds",
        type=int,
        help="repetitions of the mirrored order; 0: each arm once (default: 1; 0 with --preset gpu --smoke)",
    )
    parser.add_argument("--arms", metavar="NAME,NAME", help="these alone")
    parser.add_argument("--peer", metavar="NAME", help="of parts 3 and 4 (default: the fastest in part 2's JSON)")
    parser.add_argument("--steps", type=int, help="timed steps of a visit (default: 5 on a CPU, 30 on a GPU)")
    parser.add_argument("--micro-batch-size", type=int, metavar="B")
    parser.add_argument(
        "--gelu",
        choices=("erf", "tanh"),
        default="erf",
        help="of ours and Hugging Face; nanoGPT's is erf, so with tanh its arms stay out",
    )
    parser.add_argument(
        "--arm-timeout", type=float, metavar="S", help="of one visit (default: 900; on a GPU 150, parts 3 and 4 260)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="S",
        help="of the whole run: visits that no longer fit are left out (default on a GPU: 500)",
    )
    parser.add_argument(
        "--again", action="store_true", help="of the preset gpu: measure also what the JSON in the folder holds already"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model, 2 steps, on the CPU: proves the script")
    chosen, rest = parser.parse_known_args(argv)
    if rest and chosen.preset != "blocks":
        parser.error(f"unknown: {' '.join(rest)}")
    if chosen.smoke and not chosen.output:
        parser.error("--smoke needs --output DIR: its figures are no results")
    chosen.rest = rest
    return chosen


def problem_of(chosen: argparse.Namespace, scratch: Path) -> Problem:
    name, b, accumulation = ("124M", 2, 1) if chosen.preset == "cpu" else PARTS[chosen.part]
    layers, hidden, heads = MODELS[name]
    problem = Problem(
        layers,
        hidden,
        heads,
        1024,
        chosen.micro_batch_size or b,
        accumulation,
        gelu=chosen.gelu,
        device="cpu" if chosen.preset == "cpu" or chosen.smoke else "cuda",
        scratch=str(scratch),
        tokens=str(scratch / "tokens"),
    )
    if chosen.smoke:
        problem = dataclasses.replace(
            problem,
            num_layers=2,
            hidden_size=64,
            num_attention_heads=8,
            seq_length=64,
            micro_batch_size=2,
            vocab_size=500,
            compiler=SMOKE_COMPILER,
        )
    return problem


def arms_of(chosen: argparse.Namespace, output: Path) -> list[Arm]:
    arms = [arm for arm in ARMS if chosen.preset == "cpu" or not arm.shipped]  # on a GPU it ships compiled bf16
    if chosen.preset == "gpu" and chosen.part == 5:
        arms = ALONE
        if chosen.smoke:
            arms = [
                dataclasses.replace(arm, changes={k: v for k, v in arm.changes.items() if k == "dropout"})
                for arm in arms
            ]
    elif chosen.preset == "gpu" and chosen.part in (3, 4):
        peer = chosen.peer or fastest_peer(output) or ("nanoGPT compiled" if chosen.nanogpt else "HF compiled")
        arms = [arm for arm in arms if arm.name in ("ours compiled", peer)]
        print(f"the peer: {peer}", flush=True)
    if chosen.arms:
        names = chosen.arms.split(",")
        unknown = set(names) - {arm.name for arm in arms}
        if unknown:
            raise SystemExit(f"no such arm: {', '.join(sorted(unknown))}; there are {[arm.name for arm in arms]}")
        arms = [arm for arm in arms if arm.name in names]
    without = (
        "--nanogpt DIR was not given"
        if not chosen.nanogpt
        else "its GELU is erf, not --gelu tanh"
        if chosen.gelu == "tanh"
        else ""
    )
    if without and any(arm.kind == "nanogpt" for arm in arms):
        print(f"NO ARM OF nanoGPT: {without}", flush=True)
        arms = [arm for arm in arms if arm.kind != "nanogpt"]
    return arms


def fastest_peer(output: Path) -> str | None:
    """Of part 2's results in the same folder, where they are."""
    path = output / "train_gpu_part2.json"
    arms = json.loads(path.read_text())["arms"] if path.exists() else {}
    speeds = {
        name: arm["summary"]["tokens_per_s"]["median"]
        for name, arm in arms.items()
        if not name.startswith("ours") and arm.get("summary")
    }
    return max(speeds, key=lambda name: speeds[name]) if speeds else None


def write_tokens(problem: Problem, samples: int) -> None:
    """The seeded tokens of all arms, p(id) ∝ 1/(id + 1), and a small pair of bytes for the plan of ours."""
    draw = np.random.default_rng(problem.seed)
    count = min(samples * problem.seq_length + 1, TOKENS)
    for prefix, size, length in (
        (problem.tokens, problem.vocab_size, count),
        (f"{problem.scratch}/bytes", 256, problem.seq_length + 1),
    ):
        builder = IndexedDatasetBuilder(prefix, token_dtype(size))
        builder.add((np.exp(draw.random(length) * np.log(size + 1)) - 1).astype(np.int64).clip(0, size - 1))
        builder.end_document()
        builder.finish()


def run_arm(spec: dict[str, Any], scratch: Path, timeout: float) -> dict[str, Any]:
    """One arm in a fresh process; {"failed": its last line} where it ended badly or took too long."""
    (scratch / "spec.json").write_text(json.dumps(spec))
    result, log = scratch / "result.json", scratch / "arm.log"
    result.unlink(missing_ok=True)
    # Compiled code is kept from visit to visit of this run, and never taken from an earlier one.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"), "HF_HUB_OFFLINE": "1"}
    code = run_limited(
        [sys.executable, str(ROOT / "benchmarks" / "arms.py"), str(scratch / "spec.json"), str(result)],
        log,
        timeout,
        environment=environment,
    )
    if code == 0 and result.exists():
        return dict(json.loads(result.read_text()))
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    print("\n".join(lines[-12:]), file=sys.stderr, flush=True)
    problem = f"no result after {timeout:.0f} s; last: " if code is None else "" if lines else f"exit code {code}"
    return {"failed": problem + report.last_line("\n".join(lines))}


def campaign(chosen: argparse.Namespace, output: Path, scratch: Path) -> int:
    began, gpu = time.monotonic(), chosen.preset == "gpu" and not chosen.smoke
    problem, arms = problem_of(chosen, scratch), arms_of(chosen, output)
    # The first step, which compiles, comes before these and warms up a CPU too.
    warmup, steps = (1, 2) if chosen.smoke else (10, 30) if gpu else (1, 5)
    steps = chosen.steps or steps
    # A large peer compiles whole for minutes; there are two arms then.
    timeout = chosen.arm_timeout or (900 if not gpu else 260 if chosen.part in (3, 4) else 150)
    budget = chosen.budget or (500 if gpu else float("inf"))
    what = "cpu" if chosen.preset == "cpu" else f"gpu_part{chosen.part}"
    path = output / f"train_{what}.json"
    write_tokens(problem, (1 + warmup + steps) * problem.micro_batch_size * problem.accumulation)
    shown = {k: v for k, v in dataclasses.asdict(problem).items() if k not in ("tokens", "scratch")}
    result: dict[str, Any] = {
        **report.header(f"train {what}"),
        "smoke": chosen.smoke,
        "problem": shown,
        "warm_up_steps": 1 + warmup,
        "timed_steps": steps,
        "nanogpt_commit": report.commit(chosen.nanogpt) if chosen.nanogpt else None,
        "peak_flops": PEAK if gpu else None,
        "published": published(PARTS[chosen.part][0]) if chosen.preset == "gpu" else [],
        "allocator_environment": sorted(
            name
            for name in os.environ
            if name.startswith("MALLOC_") or name in ("LD_PRELOAD", "GLIBC_TUNABLES", "PYTORCH_ALLOC_CONF")
        ),
        "gate": {},
        "gate_tolerance": GATE,
        "arms": {
            arm.name: {
                "kind": arm.kind,
                "compiled": arm.compiled,
                "precision": arm.precision,
                "note": arm.note,
                "changes": arm.changes,
                "flags": list(arm.flags),
                "visits": [],
            }
            for arm in arms
        },
    }

    known = (
        None
        if chosen.again or chosen.preset != "gpu"
        else report.earlier(path, result, "smoke", "problem", "warm_up_steps", "timed_steps", "nanogpt_commit")
    )
    for name, entry in result["arms"].items():
        before = known["arms"].get(name, {}) if known else {}
        if all(before.get(key) == value for key, value in json.loads(json.dumps(entry)).items() if key != "visits"):
            entry["visits"] = [visit for visit in before["visits"] if "failed" not in visit]
            print(f"{name}: visits that are there already: {len(entry['visits'])}", flush=True)

    def start(task: str, arm: Arm, **more: Any) -> dict[str, Any]:
        return run_arm(
            {
                "task": task,
                "problem": dataclasses.asdict(problem),
                "arm": dataclasses.asdict(arm),
                "nanogpt": str(Path(chosen.nanogpt).resolve()) if chosen.nanogpt else "",
                **more,
            },
            scratch,
            max(10.0, min(timeout, budget - (time.monotonic() - began))),
        )

    bad: list[str] = []
    for kind in sorted({arm.kind for arm in arms} - {"ours", "rank"}):
        errors = known["gate"].get(kind) if known else None
        if not errors or "failed" in errors:
            errors = start("gate", Arm("gate", "ours", precision="fp32"), kind=kind)
        result["gate"][kind] = errors
        report.write(path, result)
        if "failed" not in errors and all(error <= GATE for error in errors.values()):
            print(
                f"gate: {kind} against ours, fp32, weights of std 0.1: loss, gradient norm and every gradient within "
                f"{max(errors.values()):.1e}",
                flush=True,
            )
            continue
        print(
            f"\nTHE GATE FAILED: {kind} does not compute what ours does, so it is not timed: {json.dumps(errors)}\n",
            flush=True,
        )
        bad += [arm.name for arm in arms if arm.kind == kind]
        arms = [arm for arm in arms if arm.kind != kind]
    if not gpu:
        result["ceiling"] = start("ceiling", Arm("ceiling", "ours"), seconds=0.02 if chosen.smoke else 1.0)
        report.write(path, result)

    rounds = (0 if chosen.smoke and chosen.preset == "gpu" else 1) if chosen.rounds is None else chosen.rounds
    bad += visit_all(
        arms,
        result,
        path,
        rounds,
        lambda: budget - (time.monotonic() - began),
        lambda arm: start("measure", arm, warmup=warmup, steps=steps),
    )
    return finish(result, path, GOALS.get(chosen.preset, []), bad)


def visit_all(
    arms: list[Arm],
    result: dict[str, Any],
    path: Path,
    rounds: int,
    left: Callable[[], float],
    measure: Callable[[Arm], dict[str, Any]],
) -> list[str]:
    """A B C C B A, `rounds` times; A B C where that is 0. Visits that `result` has already are not repeated. Returns
    the arms that failed, or failed the gate.

    left(): seconds of the budget that remain. A second visit that no longer fits is left out, those of the last arms
    of the list first. measure(arm): one visit.
    """
    bad: list[str] = []
    took: dict[str, float] = {}  # seconds that a further visit takes, about
    there = Counter({arm.name: len(result["arms"][arm.name]["visits"]) for arm in arms})  # of an earlier call
    pending = []
    for arm in [arm for _ in range(rounds) for arm in [*arms, *reversed(arms)]] or arms:
        if there[arm.name] > 0:
            there[arm.name] -= 1
        else:
            pending.append(arm)
    while pending:
        while (known := [arm for arm in pending if arm.name in took]) and sum(
            1.1 * took.get(arm.name, 0.0) for arm in pending
        ) > left():
            dropped = max(known, key=arms.index)
            pending.remove(dropped)
            print(f"{dropped.name}: a visit is left out, the time is short", flush=True)
        if not pending:
            break
        arm = pending.pop(0)
        if left() < min(took.values(), default=10.0):
            print(f"{arm.name}: a visit is left out, the time is short", flush=True)
            continue
        entry = result["arms"][arm.name]
        if entry["visits"] and "failed" in entry["visits"][-1]:
            continue  # it would fail again
        load, start = os.getloadavg()[0], time.monotonic()
        visit = {**measure(arm), "load_before": load, "order": sum(len(a["visits"]) for a in result["arms"].values())}
        seconds = time.monotonic() - start
        # What was compiled is found on the disk the next time, which saves most of the first step.
        took[arm.name] = seconds - (0.6 * visit["first_step_s"] if arm.compiled and "failed" not in visit else 0.0)
        entry["visits"].append(visit)
        if "failed" in visit:
            bad.append(arm.name)
            print(f"{arm.name}: FAILED: {visit['failed']}", flush=True)
        else:
            entry["gate"] = verdict = close_to(result, arm)
            if verdict.startswith("FAILED"):
                bad.append(arm.name)
            ms = 1000 * report.spread(visit["step_s"])["median"]
            print(
                f"{arm.name}: {ms:,.1f} ms a step, first step {visit['first_step_s']:.1f} s, "
                f"loss {visit['loss']:.5f}, gradient norm {visit['grad_norm']:.4f}; gate: {verdict} "
                f"({seconds:.0f} s)",
                flush=True,
            )
        report.write(path, result)
    return bad


def main(argv: list[str] | None = None) -> int:
    chosen = options(argv)
    output = Path(chosen.output) if chosen.output else report.RESULTS
    output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the arm under way is ended as well
    if chosen.preset == "blocks":
        from benchmarks.blocks import main as compare_blocks

        return compare_blocks([*chosen.rest, "--output", str(output), *(["--smoke"] if chosen.smoke else [])])
    if chosen.nanogpt and not (Path(chosen.nanogpt) / "model.py").is_file():
        print("--nanogpt: that folder holds no model.py: give a checkout of nanoGPT", file=sys.stderr)
        return 2
    if chosen.preset == "gpu" and not chosen.smoke:
        import torch

        if not torch.cuda.is_available():
            print("--preset gpu: torch sees no GPU; --smoke tries the script on the CPU", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory() as scratch:
        return campaign(chosen, output, Path(scratch))


if __name__ == "__main__":
    raise SystemExit(main())
