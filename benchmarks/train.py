#!/usr/bin/env python3
"""Training steps of GPT-2 against its peers, on one machine in one run:

    python benchmarks/train.py --preset cpu --nanogpt DIR            # GPT-2 124M, s 1,024, b 2, bf16
    python benchmarks/train.py --preset gpu --part 2 --nanogpt DIR   # parts 2 to 5, each under 9 minutes on one H200
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

from benchmarks import harness
from benchmarks.harness import ROOT
from benchmarks.problem import ALONE, ARMS, LLM_C, MODELS, PARTS, PEAK, Arm, Problem, utilisation

GATE = 1e-4  # relative, of the fp32 models; they differ by 2e-6, and the two forms of GELU by 7e-4
# Relative, of the first step's loss and of its gradient norm: fp32 arms among themselves, and if bf16 takes part.
# nanoGPT's softmax has 47 rows more than the vocabulary: log(50,304 / 50,257) nats are taken off its first loss.
TOLERANCE = {"fp32": (2e-4, 1e-3), "bf16": (1e-3, 2e-2)}
NOTES = (
    "all: same weights (ours, converted), same samples in the same order through the same loader, tied embeddings; a "
    "step is batch, zero_grad, forward, backward, clip at 1.0, AdamW (decay 0.1 on matrices, betas 0.9 and 0.95)",
    "peers at their best fair setting: bf16 by torch.autocast over fp32 weights, fused AdamW, scaled_dot_product_"
    "attention, no cache, erf GELU; torch.compile of the whole model (ours: of each block)",
    "on a CPU all arms but `as shipped` run under the allocator setting that ours makes for itself; `as shipped` is "
    "nanoGPT's own on a CPU: fp32, eager, its AdamW, the default allocator",
    "MFU of the datasheet's dense bf16, on a CPU of this model's own matrix products (`ceiling`), by Megatron's formula, attention in full, vocabulary 50,257; by llm.c: 6N + 6LCT, which is 4 to 6 % less; "
    "the bars and p10–p90 are of all timed steps",
)
Result = dict[str, Any]


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--preset", choices=("cpu", "gpu"), required=True)
    parser.add_argument("--part", type=int, choices=tuple(PARTS), default=2, help="of the preset gpu")
    parser.add_argument("--nanogpt", metavar="DIR", default="", help="a nanoGPT checkout; without it no such arm")
    rounds = "repetitions of the mirrored order; 0: each arm once (default: 1; 0 with --preset gpu --smoke)"
    parser.add_argument("--rounds", type=int, help=rounds)
    parser.add_argument("--arms", metavar="NAME,NAME", help="only these")
    parser.add_argument("--peer", metavar="NAME", help="of parts 3 and 4 (default: the fastest in part 2's JSON)")
    parser.add_argument("--steps", type=int, help="timed steps of a visit (default: 5 on a CPU, 30 on a GPU)")
    parser.add_argument("--micro-batch-size", type=int, metavar="B")
    gelu = "of ours and Hugging Face; nanoGPT's is erf, so with tanh its arms stay out"
    parser.add_argument("--gelu", choices=("erf", "tanh"), default="erf", help=gelu)
    parser.add_argument(
        "--arm-timeout", type=float, metavar="S", help="of one visit (default: 900; on a GPU 150, parts 3 and 4 260)"
    )
    budget = "of the whole run: visits that no longer fit are left out (default on a GPU: 500)"
    parser.add_argument("--budget", type=float, metavar="S", help=budget)
    again = "of the preset gpu: measure also what the JSON in the folder holds already"
    parser.add_argument("--again", action="store_true", help=again)
    return harness.options(parser, argv)


def problem_of(chosen: argparse.Namespace, scratch: Path) -> Problem:
    name, b, accumulation = ("124M", 2, 1) if chosen.preset == "cpu" else PARTS[chosen.part]
    device = "cpu" if chosen.preset == "cpu" or chosen.smoke else "cuda"
    b = chosen.micro_batch_size or b
    problem = Problem(*MODELS[name], 1024, b, accumulation, gelu=chosen.gelu, device=device, scratch=str(scratch))
    return problem.small() if chosen.smoke else problem


def arms_of(chosen: argparse.Namespace) -> list[Arm]:
    """The arms of the preset, as far as they are asked for and can be had."""
    gpu = chosen.preset == "gpu"
    arms = [arm for arm in ARMS if not (gpu and arm.shipped)]  # on a GPU nanoGPT ships compiled bf16
    if gpu and chosen.part == 5:
        arms = ALONE
        if chosen.smoke:  # of the changes only dropout
            kept = [{name: value for name, value in arm.changes.items() if name == "dropout"} for arm in arms]
            arms = [dataclasses.replace(arm, changes=changes) for arm, changes in zip(arms, kept, strict=True)]
    elif gpu and chosen.part in (3, 4):
        peer = chosen.peer or fastest_peer(chosen.output) or ("nanoGPT compiled" if chosen.nanogpt else "HF compiled")
        arms = [arm for arm in arms if arm.name in ("ours compiled", peer)]
        print(f"the peer: {peer}", flush=True)
    if chosen.arms:
        names = chosen.arms.split(",")
        if unknown := set(names) - {arm.name for arm in arms}:
            raise SystemExit(f"no such arm: {', '.join(sorted(unknown))}; there are {[arm.name for arm in arms]}")
        arms = [arm for arm in arms if arm.name in names]
    without = "" if chosen.nanogpt else "--nanogpt DIR was not given"
    if chosen.nanogpt and chosen.gelu == "tanh":
        without = "its GELU is erf, not --gelu tanh"
    if without and any(arm.kind == "nanogpt" for arm in arms):
        print(f"NO ARM OF nanoGPT: {without}", flush=True)
        arms = [arm for arm in arms if arm.kind != "nanogpt"]
    return arms


def fastest_peer(output: Path) -> str | None:
    """Of part 2's results in the same folder, if they are there."""
    path = output / "train_gpu_part2.json"
    speeds = speeds_of(json.loads(path.read_text())) if path.exists() else {}
    return max((name for name in speeds if not name.startswith("ours")), key=lambda name: speeds[name], default=None)


def speeds_of(result: Result) -> dict[str, float]:
    """The median of tokens/s of each arm that was measured."""
    arms = result["arms"].items()
    return {name: arm["summary"]["tokens_per_s"]["median"] for name, arm in arms if arm.get("summary")}


def run_arm(spec: dict[str, Any], scratch: Path, timeout: float) -> dict[str, Any]:
    """One arm in a fresh process; {"failed": its last line} if it ended badly or took too long."""
    (scratch / "spec.json").write_text(json.dumps(spec))
    result, log = scratch / "result.json", scratch / "arm.log"
    result.unlink(missing_ok=True)
    # Compiled code is kept from visit to visit of this run, and never taken from an earlier one.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, ROOT / "benchmarks" / "arms.py", scratch / "spec.json", result]
    code = harness.run_limited(command, log, timeout, environment=environment)
    if code == 0 and result.exists():
        return dict(json.loads(result.read_text()))
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    print("\n".join(lines[-12:]), file=sys.stderr, flush=True)
    problem = f"no result after {timeout:.0f} s; last: " if code is None else "" if lines else f"exit code {code}"
    return {"failed": problem + harness.last_line("\n".join(lines))}


def campaign(chosen: argparse.Namespace, scratch: Path) -> int:
    """All visits of a preset; the exit code."""
    began, gpu = time.monotonic(), chosen.preset == "gpu" and not chosen.smoke
    problem, arms = problem_of(chosen, scratch), arms_of(chosen)
    # The first step, which compiles, comes before these and warms up a CPU too.
    warmup, steps = (1, 2) if chosen.smoke else (10, 30) if gpu else (1, 5)
    steps = chosen.steps or steps
    # A large peer compiles whole for minutes; there are two arms then.
    timeout = chosen.arm_timeout or (900 if not gpu else 260 if chosen.part in (3, 4) else 150)
    budget = chosen.budget or (500 if gpu else float("inf"))
    what = "cpu" if chosen.preset == "cpu" else f"gpu_part{chosen.part}"
    path = chosen.output / f"train_{what}.json"
    problem.write_tokens((1 + warmup + steps) * problem.micro_batch_size * problem.accumulation)
    shown = {**dataclasses.asdict(problem), "scratch": None}
    entries = [{**dataclasses.asdict(arm), "visits": []} for arm in arms]
    model = PARTS[chosen.part][0] if chosen.preset == "gpu" else None
    result: Result = {
        **harness.header(f"train {what}"),
        "smoke": chosen.smoke,
        "problem": shown,
        "warm_up_steps": 1 + warmup,
        "timed_steps": steps,
        "nanogpt_commit": harness.commit(chosen.nanogpt) if chosen.nanogpt else None,
        "peak_flops": PEAK if gpu else None,
        "published": [entry for entry in LLM_C if entry["model"] == model],
        "gate": {},
        "gate_tolerance": GATE,
        "arms": {entry["name"]: entry for entry in entries},
    }
    known: Result | None = None
    if chosen.preset == "gpu" and not chosen.again:
        same = ("smoke", "problem", "warm_up_steps", "timed_steps", "nanogpt_commit")
        known = harness.earlier(path, result, *same)
    for name, entry in result["arms"].items():
        before = known["arms"].get(name, {}) if known else {}
        if before and {**before, "visits": []}.items() >= json.loads(json.dumps(entry)).items():
            entry["visits"] = [visit for visit in before["visits"] if "failed" not in visit]
            print(f"{name}: visits that are there already: {len(entry['visits'])}", flush=True)

    def left() -> float:
        return budget - (time.monotonic() - began)

    def start(task: str, arm: Arm, **more: Any) -> dict[str, Any]:
        nanogpt = str(Path(chosen.nanogpt).resolve()) if chosen.nanogpt else ""
        spec = {
            "task": task,
            "problem": dataclasses.asdict(problem),
            "arm": dataclasses.asdict(arm),
            "nanogpt": nanogpt,
        }
        return run_arm({**spec, **more}, scratch, max(10.0, min(timeout, left())))

    if not gpu:
        result["ceiling"] = start("ceiling", Arm("ceiling", "ours"), seconds=0.02 if chosen.smoke else 1.0)
        print(f"ceiling of this machine: {json.dumps(result['ceiling'])}", flush=True)
    bad: list[str] = []
    for kind in sorted({arm.kind for arm in arms} - {"ours", "rank"}):
        errors = known["gate"].get(kind) if known else None
        if not errors or "failed" in errors:
            errors = start("gate", Arm("gate", precision="fp32"), kind=kind)
        result["gate"][kind] = errors
        harness.write(path, result)
        if "failed" not in errors and all(error <= GATE for error in errors.values()):
            worst = (
                f"gate: {kind} against ours, fp32, weights of std 0.1: loss, gradient norm and every gradient within"
            )
            print(f"{worst} {max(errors.values()):.1e}", flush=True)
            continue
        failed = f"THE GATE FAILED: {kind} does not compute what ours does, so it is not timed: {json.dumps(errors)}"
        print(f"\n{failed}\n", flush=True)
        bad += [arm.name for arm in arms if arm.kind == kind]
        arms = [arm for arm in arms if arm.kind != kind]
    rounds = (0 if chosen.smoke and chosen.preset == "gpu" else 1) if chosen.rounds is None else chosen.rounds
    bad += visit_all(arms, result, path, rounds, left, lambda arm: start("measure", arm, warmup=warmup, steps=steps))
    return finish(result, path, bad)


def visit_all(
    arms: list[Arm],
    result: Result,
    path: Path,
    rounds: int,
    left: Callable[[], float],
    measure: Callable[[Arm], dict[str, Any]],
) -> list[str]:
    """A B C C B A, `rounds` times; A B C if that is 0. Visits that `result` has already are not repeated. Returns the
    arms that failed, or failed the gate.

    left(): seconds of the budget that remain; a visit that no longer fits is left out. measure(arm): one visit.
    """
    bad: list[str] = []
    took: dict[str, float] = {}  # seconds that a further visit takes, about
    pending = [arm for _ in range(rounds) for arm in [*arms, *reversed(arms)]] or list(arms)
    for arm in arms:
        for _ in result["arms"][arm.name]["visits"]:  # of an earlier call
            if arm in pending:
                pending.remove(arm)
    while pending:
        arm = pending.pop(0)
        entry = result["arms"][arm.name]
        if left() < took.get(arm.name, min(took.values(), default=10.0)):
            print(f"{arm.name}: a visit is left out, the time is short", flush=True)
            continue
        if entry["visits"] and "failed" in entry["visits"][-1]:
            continue  # it would fail again
        load, began = os.getloadavg()[0], time.monotonic()
        visit = {**measure(arm), "load_before": load, "order": sum(len(a["visits"]) for a in result["arms"].values())}
        seconds = time.monotonic() - began
        # What was compiled is found on the disk the next time, which saves most of the first step.
        took[arm.name] = seconds - (0.6 * visit.get("first_step_s", 0.0) if arm.compiled else 0.0)
        entry["visits"].append(visit)
        if "failed" in visit:
            bad.append(arm.name)
            print(f"{arm.name}: FAILED: {visit['failed']}", flush=True)
        else:
            entry["gate"] = close_to(result, arm)
            bad += [arm.name] * entry["gate"].startswith("FAILED")
            ms = 1000 * harness.spread(visit["step_s"])["median"]
            print(
                f"{arm.name}: {ms:,.1f} ms a step, first step {visit['first_step_s']:.1f} s, loss {visit['loss']:.5f}, "
                f"gradient norm {visit['grad_norm']:.4f}; gate: {entry['gate']} ({seconds:.0f} s)",
                flush=True,
            )
        harness.write(path, result)
    return bad


def close_to(result: Result, arm: Arm) -> str:
    """Whether the arm's first step agrees with that of the first arm of ours that solves the same problem."""
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
    """Over all timed steps of all visits: tokens/s, MFU, memory in GB, compile seconds."""
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
            **utilisation(speed["median"], first, result["peak_flops"] or result["ceiling"].get("flops_per_s")),
            "expected_peak_gb": (first["expected_peak_bytes"] or 0) / 1e9 or None,
            # The first visit compiles; later ones find its code on the disk.
            "compile_s": first["first_step_s"] - seconds["median"] if entry["compiled"] else None,
            "first_step_s": first["first_step_s"],
            "first_loss": first["loss"],
            "computes": first["computes"],
        }


def finish(result: Result, path: Path, bad: list[str]) -> int:
    """Summaries, JSON, plot and table; 1 if an arm failed or failed the gate."""
    summarise(result)
    result |= {"notes": list(NOTES), "failed": bad}
    harness.write(path, result)
    arms = {name: entry for name, entry in result["arms"].items() if "summary" in entry}
    speeds = speeds_of(result)
    memory = list(dict.fromkeys(key for entry in arms.values() for key in entry["summary"]["memory_gb"]))
    head = ["arm", "tokens/s", "p10", "p90", "ms/step", "MFU %", "by llm.c %"]
    head += [*(f"{key.replace('_', ' ')} GB" for key in memory), "compile s", "first loss", "ours compiled ÷ it"]
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
            *((s[key] and 100 * s[key], ".1f") for key in ("mfu", "mfu_by_llm_c")),
            *((s["memory_gb"].get(key), ".2f") for key in memory),
            (s["compile_s"], ".0f"),
            (s["first_loss"], ".4f"),
            (speeds["ours compiled"] / speeds[name] if comparable else None, ".2f"),
        ]
        rows.append([name, *("" if value is None else f"{value:{form}}" for value, form in cells)])
    print(f"\n{harness.table(head, rows)}\n")
    for name, entry in arms.items():
        print(f"{name}: {entry['summary']['computes']}" + (f"; {entry['note']}" if entry["note"] else ""))
    for note in NOTES:
        print(f"- {note}")
    title = f"{result['what']}{', smoke' if result['smoke'] else ''}: {harness.machine_line(result)}"
    bars = [(n, *(e["summary"]["tokens_per_s"][key] for key in ("median", "p10", "p90"))) for n, e in arms.items()]
    peaks = [(name, *[next(iter(entry["summary"]["memory_gb"].values()))] * 3) for name, entry in arms.items()]
    label = f"{(memory or ['memory'])[0].replace('_', ' ')}, GB"
    if arms:
        print(harness.plot(path.with_suffix(".png"), title, [("tokens/s, bars p10–p90", bars), (label, peaks)]))
    print(f"wrote {path.name}")
    if bad:
        print(f"\nFAILED: {'; '.join(dict.fromkeys(bad))}: see above; exit code 1")
    return 1 if bad else 0


def main(argv: list[str] | None = None) -> int:
    chosen = options(argv)
    chosen.output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the arm under way is ended as well
    if chosen.nanogpt and not (Path(chosen.nanogpt) / "model.py").is_file():
        print("--nanogpt: that folder holds no model.py: give a checkout of nanoGPT", file=sys.stderr)
        return 2
    if chosen.preset == "gpu" and not chosen.smoke:
        import torch

        if not torch.cuda.is_available():
            print("--preset gpu: torch sees no GPU; --smoke tries the script on the CPU", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory() as scratch:
        return campaign(chosen, Path(scratch))


if __name__ == "__main__":
    raise SystemExit(main())
