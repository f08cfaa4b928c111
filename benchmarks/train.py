#!/usr/bin/env python3
"""Compare training steps of GPT-2 with nanoGPT and transformers on one machine:

    python benchmarks/train.py --preset cpu --nanogpt DIR            # GPT-2 124M, s 1,024, b 2, bf16
    python benchmarks/train.py --preset gpu --part 2 --nanogpt DIR   # parts 2 to 5, each under 9 minutes on one H200
    python benchmarks/train.py --preset gpu --part 2 --smoke --output DIR    # a quick check on the CPU

An arm is one program with one configuration. `benchmarks/gpu.sh` has five parts. Part 1 is gpu_first_minutes.py. Part 2
measures 345M with all arms. Parts 3 and 4 measure 774M and 1.5B with our compiled arm and the fastest peer of part 2.
Part 5 measures only our program: 345M with dropout, recomputation and the settings of Megatron's first release, and one
of 8 ranks of 8.3B.

First, a gate checks that all models compute the same values. Then every arm runs in a new process, in mirrored order (A
B C C B A), on the same tokens. A visit is one run of an arm. The results are written after each visit. A repeated
command continues after the last visit, unless --again is given. nanoGPT is imported from DIR.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # The project need not be installed.

from benchmarks import harness
from benchmarks.harness import ROOT
from benchmarks.workload import ARMS, MODELS, OURS_ONLY_ARMS, PARTS, PEAK_FLOPS, Arm, Workload

GATE = 1e-4  # largest relative difference in fp32: correct models differ by 2e-6, models with different GELUs by 7e-4
# The largest allowed relative differences of loss and gradient norm at the first step: between two fp32 arms, and
# between two arms of which at least one is bf16. nanoGPT's softmax has 47 padding rows, so log(50,304 / 50,257) nats
# are subtracted from its first loss.
TOLERANCE = {"fp32": (2e-4, 1e-3), "bf16": (1e-3, 2e-2)}
NOTES = (
    "all arms have the same weights (ours, converted), the same samples in the same order from the same loader, and "
    "tied embeddings; a step is batch, zero_grad, forward, backward, clip at 1.0, AdamW (decay 0.1 on matrices, betas "
    "0.9 and 0.95)",
    "peers have their best fair settings: bf16 by torch.autocast over fp32 weights, fused AdamW, scaled_dot_product_"
    "attention, no cache, erf GELU; torch.compile of the whole model (ours: of each block)",
    "on a CPU, all arms except `as shipped` use our setting of the allocator; `as shipped` has nanoGPT's defaults for "
    "a CPU: fp32, eager, its AdamW, the default allocator",
    "MFU refers to the dense bf16 of the datasheet, on a CPU to the model's matrix products (`ceiling`), by Megatron's "
    "formula with full attention and vocabulary 50,257; the bars and p10–p90 are of all timed steps",
)
Result = dict[str, Any]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    add = parser.add_argument
    add("--preset", choices=("cpu", "gpu"), required=True)
    add("--part", type=int, choices=tuple(PARTS), default=2, help="part of the preset gpu")
    add("--nanogpt", metavar="DIR", default="", help="a nanoGPT checkout; without it, nanoGPT is not measured")
    rounds = "repetitions of the mirrored order; 0: each arm once (default: 1; 0 with --preset gpu --smoke)"
    add("--rounds", type=int, help=rounds)
    add("--arms", metavar="NAME,NAME", help="only these")
    add("--again", action="store_true", help="with the preset gpu: measure recorded visits again")
    return harness.parse_args(parser, argv)


def make_workload(args: argparse.Namespace, scratch: Path) -> Workload:
    name, b, accumulation = ("124M", 2, 1) if args.preset == "cpu" else PARTS[args.part]
    device = "cpu" if args.preset == "cpu" or args.smoke else "cuda"
    workload = Workload(*MODELS[name], 1024, b, accumulation, device=device, scratch=str(scratch))
    return workload.small() if args.smoke else workload


def select_arms(args: argparse.Namespace) -> list[Arm]:
    """Return the arms of the preset that are selected and available."""
    gpu = args.preset == "gpu"
    # The arm with nanoGPT's own settings is only for CPUs: on a GPU nanoGPT's settings are compiled bf16.
    arms = [arm for arm in ARMS if not (gpu and arm.shipped)]
    if gpu and args.part == 5:
        arms = OURS_ONLY_ARMS
        if args.smoke:  # A smoke run changes only the dropout of a workload, not its size.
            dropout_changes = [
                {name: value for name, value in arm.changes.items() if name == "dropout"} for arm in arms
            ]
            arms = [
                dataclasses.replace(arm, changes=changes) for arm, changes in zip(arms, dropout_changes, strict=True)
            ]
    elif gpu and args.part in (3, 4):
        peer = fastest_peer(args.output) or ("nanoGPT compiled" if args.nanogpt else "HF compiled")
        arms = [arm for arm in arms if arm.name in ("ours compiled", peer)]
        print(f"the peer: {peer}", flush=True)
    if args.arms:
        names = args.arms.split(",")
        if unknown := set(names) - {arm.name for arm in arms}:
            raise SystemExit(f"no such arm: {', '.join(sorted(unknown))}; there are {[arm.name for arm in arms]}")
        arms = [arm for arm in arms if arm.name in names]
    if not args.nanogpt and any(arm.kind == "nanogpt" for arm in arms):
        print("nanoGPT is NOT measured: --nanogpt DIR was not given", flush=True)
        arms = [arm for arm in arms if arm.kind != "nanogpt"]
    return arms


def fastest_peer(output: Path) -> str | None:
    """Return the fastest peer in the results of part 2 in the same folder, or None."""
    path = output / "train_gpu_part2.json"
    speeds = median_speeds(json.loads(path.read_text())) if path.exists() else {}
    return max((name for name in speeds if not name.startswith("ours")), key=lambda name: speeds[name], default=None)


def median_speeds(result: Result) -> dict[str, float]:
    """Return the median tokens/s of each measured arm."""
    arms = result["arms"].items()
    return {name: arm["summary"]["tokens_per_s"]["median"] for name, arm in arms if arm.get("summary")}


def run_arm(spec: dict[str, Any], scratch: Path, timeout: float) -> dict[str, Any]:
    """Run one arm in a new process. Return its result, or {"failed": its last line} after an error or a timeout."""
    (scratch / "spec.json").write_text(json.dumps(spec))
    result, log = scratch / "result.json", scratch / "arm.log"
    result.unlink(missing_ok=True)
    # All visits of a benchmark share compiled code. The code of earlier benchmarks is not used.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, ROOT / "benchmarks" / "train_worker.py", scratch / "spec.json", result]
    code = harness.run_limited(command, log, timeout, environment=environment)
    if code == 0 and result.exists():
        return dict(json.loads(result.read_text()))
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    print("\n".join(lines[-12:]), file=sys.stderr, flush=True)
    reason = f"no result after {timeout:.0f} s; last: " if code is None else "" if lines else f"exit code {code}"
    return {"failed": reason + harness.last_line("\n".join(lines))}


def run_benchmark(args: argparse.Namespace, scratch: Path) -> int:
    """Measure all programs (arms) of a preset. Return the exit code."""
    began, gpu = time.monotonic(), args.preset == "gpu" and not args.smoke
    workload, arms = make_workload(args, scratch), select_arms(args)
    # The number of untimed steps after the first step, which compiles, and the number of timed steps.
    warmup, steps = (1, 2) if args.smoke else (10, 30) if gpu else (1, 5)
    # torch.compile of a large peer takes minutes; parts 3 and 4 have only two arms.
    timeout = 900 if not gpu else 260 if args.part in (3, 4) else 150  # the time limit of one visit in seconds
    budget = 500 if gpu else float("inf")  # seconds for all visits together; the remaining visits are skipped
    what = "cpu" if args.preset == "cpu" else f"gpu_part{args.part}"
    path = args.output / f"train_{what}.json"
    workload.write_tokens((1 + warmup + steps) * workload.micro_batch_size * workload.accumulation)
    shown = {**dataclasses.asdict(workload), "scratch": None}
    entries = [{**dataclasses.asdict(arm), "visits": []} for arm in arms]
    result: Result = {
        **harness.header(f"train {what}"),
        "smoke": args.smoke,
        "problem": shown,
        "warm_up_steps": 1 + warmup,
        "timed_steps": steps,
        "nanogpt_commit": harness.git_commit(args.nanogpt) if args.nanogpt else None,
        "peak_flops": PEAK_FLOPS if gpu else None,
        "gate": {},
        "gate_tolerance": GATE,
        "arms": {entry["name"]: entry for entry in entries},
    }
    known: Result | None = None
    if args.preset == "gpu" and not args.again:
        same = ("smoke", "problem", "warm_up_steps", "timed_steps", "nanogpt_commit")
        known = harness.load_earlier(path, result, *same)
    for name, entry in result["arms"].items():
        before = known["arms"].get(name, {}) if known else {}
        if before and {**before, "visits": []}.items() >= json.loads(json.dumps(entry)).items():
            entry["visits"] = [visit for visit in before["visits"] if "failed" not in visit]
            print(f"{name}: recorded visits: {len(entry['visits'])}", flush=True)

    def left() -> float:
        return budget - (time.monotonic() - began)

    def start(task: str, arm: Arm, **more: Any) -> dict[str, Any]:
        nanogpt = str(Path(args.nanogpt).resolve()) if args.nanogpt else ""
        spec = {
            "task": task,
            "problem": dataclasses.asdict(workload),
            "arm": dataclasses.asdict(arm),
            "nanogpt": nanogpt,
        }
        return run_arm({**spec, **more}, scratch, max(10.0, min(timeout, left())))

    if not gpu:
        result["ceiling"] = start("ceiling", Arm("ceiling", "ours"), seconds=0.02 if args.smoke else 1.0)
        print(f"ceiling of this machine: {json.dumps(result['ceiling'])}", flush=True)
    bad: list[str] = []
    for kind in sorted({arm.kind for arm in arms} - {"ours", "rank"}):
        errors = known["gate"].get(kind) if known else None
        if not errors or "failed" in errors:
            errors = start("gate", Arm("gate", precision="fp32"), kind=kind)
        result["gate"][kind] = errors
        harness.write_json(path, result)
        if "failed" not in errors and all(error <= GATE for error in errors.values()):
            worst = (
                f"gate: {kind} against ours, fp32, weights of std 0.1: loss, gradient norm and every gradient within"
            )
            print(f"{worst} {max(errors.values()):.1e}", flush=True)
            continue
        failed = f"THE GATE FAILED: {kind} does not compute the same as ours, so it is not timed: {json.dumps(errors)}"
        print(f"\n{failed}\n", flush=True)
        bad += [arm.name for arm in arms if arm.kind == kind]
        arms = [arm for arm in arms if arm.kind != kind]
    rounds = (0 if args.smoke and args.preset == "gpu" else 1) if args.rounds is None else args.rounds
    bad += run_visits(arms, result, path, rounds, left, lambda arm: start("measure", arm, warmup=warmup, steps=steps))
    return report_result(result, path, bad)


def run_visits(
    arms: list[Arm],
    result: Result,
    path: Path,
    rounds: int,
    left: Callable[[], float],
    measure: Callable[[Arm], dict[str, Any]],
) -> list[str]:
    """Visit the arms `rounds` times in the order A B C C B A, or once in the order A B C if `rounds` is 0. Visits that
    `result` already has are left out. Return the names of arms that failed or did not pass the gate.

    left: returns the remaining seconds. A visit that does not fit is skipped.
    measure: makes one visit of an arm.
    """
    bad: list[str] = []
    took: dict[str, float] = {}  # the estimated seconds of the next visit
    pending = [arm for _ in range(rounds) for arm in [*arms, *reversed(arms)]] or list(arms)
    for arm in arms:
        for _ in result["arms"][arm.name]["visits"]:  # Visits that an earlier call of the program measured
            if arm in pending:
                pending.remove(arm)
    while pending:
        arm = pending.pop(0)
        entry = result["arms"][arm.name]
        if left() < took.get(arm.name, min(took.values(), default=10.0)):
            print(f"{arm.name}: a visit is skipped, because the time is short", flush=True)
            continue
        if entry["visits"] and "failed" in entry["visits"][-1]:
            continue  # An arm that failed would fail again.
        load, began = os.getloadavg()[0], time.monotonic()
        visit = {**measure(arm), "load_before": load, "order": sum(len(a["visits"]) for a in result["arms"].values())}
        seconds = time.monotonic() - began
        # The next visit finds the compiled code on the disk, so its first step takes less than half of the time.
        took[arm.name] = seconds - (0.6 * visit.get("first_step_s", 0.0) if arm.compiled else 0.0)
        entry["visits"].append(visit)
        if "failed" in visit:
            bad.append(arm.name)
            print(f"{arm.name}: FAILED: {visit['failed']}", flush=True)
        else:
            entry["gate"] = compare_first_step(result, arm)
            bad += [arm.name] * entry["gate"].startswith("FAILED")
            ms = 1000 * harness.spread(visit["step_s"])["median"]
            print(
                f"{arm.name}: {ms:,.1f} ms a step, first step {visit['first_step_s']:.1f} s, loss {visit['loss']:.5f}, "
                f"gradient norm {visit['grad_norm']:.4f}; gate: {entry['gate']} ({seconds:.0f} s)",
                flush=True,
            )
        harness.write_json(path, result)
    return bad


def compare_first_step(result: Result, arm: Arm) -> str:
    """Compare the arm's first step with that of our first arm with the same workload."""
    mine = result["arms"][arm.name]["visits"][-1]
    if arm.kind == "rank":
        return "none: one rank of many"
    for name, entry in result["arms"].items():
        other = next((visit for visit in entry["visits"] if "failed" not in visit), mine)
        if entry["kind"] == "ours" and entry["changes"] == arm.changes and other is not mine:
            both = "fp32" if entry["precision"] == arm.precision == "fp32" else "bf16"
            loss = abs((mine["loss"] - mine["padding_nats"]) / other["loss"] - 1)
            norm = abs(mine["grad_norm"] / other["grad_norm"] - 1)
            told = f"loss {loss:.1e}, gradient norm {norm:.1e} from {name!r}"
            if loss <= TOLERANCE[both][0] and norm <= TOLERANCE[both][1]:
                return f"agrees: {told}"
            return f"FAILED: {told}, allowed {TOLERANCE[both]} in {both}"
    return "none: no arm to compare with yet"


def summarise(result: Result) -> None:
    """Add a summary to each arm in `result`: tokens/s, MFU, memory in GB and compile seconds, over all visits."""
    peak = result["peak_flops"] or result["ceiling"].get("flops_per_s")
    for entry in result["arms"].values():
        done = [visit for visit in entry["visits"] if "failed" not in visit]
        if not done:
            continue
        first = done[0]
        seconds, tokens = harness.spread([s for visit in done for s in visit["step_s"]]), first["tokens_per_step"]
        speed = {key: tokens / seconds[of] for key, of in (("median", "median"), ("p10", "p90"), ("p90", "p10"))}
        entry["summary"] = {
            "step_s": seconds,
            "tokens_per_s": speed,
            "memory_gb": {
                key: max(visit["memory_bytes"][key] or 0 for visit in done) / 1e9 for key in first["memory_bytes"]
            },
            "mfu": peak and speed["median"] * first["flops_per_token"] / peak,
            "expected_peak_gb": (first["expected_peak_bytes"] or 0) / 1e9 or None,
            # Only the first visit compiles.
            "compile_s": first["first_step_s"] - seconds["median"] if entry["compiled"] else None,
            "computes": first["computes"],
        }


def report_result(result: Result, path: Path, bad: list[str]) -> int:
    """Write the summary, JSON and plot, and print the table. Return 1 if an arm failed or did not pass the gate, else
    0."""
    summarise(result)
    result |= {"notes": list(NOTES), "failed": bad}
    harness.write_json(path, result)
    arms = {name: entry for name, entry in result["arms"].items() if "summary" in entry}
    speeds = median_speeds(result)
    memory = list(dict.fromkeys(key for entry in arms.values() for key in entry["summary"]["memory_gb"]))
    head = ["arm", "tokens/s", "p10", "p90", "ms/step", "MFU %"]
    head += [*(f"{key.replace('_', ' ')} GB" for key in memory), "compile s", "ours compiled ÷ it"]
    rows = []
    for name, entry in result["arms"].items():
        if name not in arms:
            rows.append([name, "failed" if entry["visits"] else "not run", *[""] * (len(head) - 2)])
            continue
        s = entry["summary"]
        comparable = "ours compiled" in speeds and not entry["changes"] and entry["kind"] != "rank"
        cells: list[tuple[float | None, str]] = [
            *((s["tokens_per_s"][key], ",.0f") for key in ("median", "p10", "p90")),
            (1000 * s["step_s"]["median"], ",.1f"),
            (s["mfu"] and 100 * s["mfu"], ".1f"),
            *((s["memory_gb"].get(key), ".2f") for key in memory),
            (s["compile_s"], ".0f"),
            (speeds["ours compiled"] / speeds[name] if comparable else None, ".2f"),
        ]
        rows.append([name, *("" if value is None else f"{value:{form}}" for value, form in cells)])
    print(f"\n{harness.format_table(head, rows)}\n")
    for name, entry in arms.items():
        print(f"{name}: {entry['summary']['computes']}" + (f"; {entry['note']}" if entry["note"] else ""))
    for note in NOTES:
        print(f"- {note}")
    title = f"{result['what']}{', smoke' if result['smoke'] else ''}: {harness.machine_line(result)}"
    bars = [(n, *(e["summary"]["tokens_per_s"][key] for key in ("median", "p10", "p90"))) for n, e in arms.items()]
    peaks = [(name, *[next(iter(entry["summary"]["memory_gb"].values()))] * 3) for name, entry in arms.items()]
    label = f"{memory[0].replace('_', ' ')}, GB" if memory else ""
    if arms:
        print(harness.plot_bars(path.with_suffix(".png"), title, [("tokens/s, bars p10–p90", bars), (label, peaks)]))
    print(f"wrote {path.name}")
    if bad:
        print(f"\nFAILED: {'; '.join(dict.fromkeys(bad))}: see above; exit code 1")
    return 1 if bad else 0


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # An exit through SystemExit also ends the running arm.
    if args.nanogpt and not (Path(args.nanogpt) / "model.py").is_file():
        print("--nanogpt: the folder has no model.py: give a checkout of nanoGPT", file=sys.stderr)
        return 2
    if args.preset == "gpu" and not args.smoke:
        import torch

        if not torch.cuda.is_available():
            print("--preset gpu: torch finds no GPU; use --smoke to try the script on the CPU", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory() as scratch:
        return run_benchmark(args, Path(scratch))


if __name__ == "__main__":
    raise SystemExit(main())
