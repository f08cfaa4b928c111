"""From the visits of `benchmarks/train.py` to its verdicts, table and plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.flops import utilisation
from benchmarks.problem import Arm

# Relative, of the first step's loss and of its gradient norm: fp32 arms among themselves, and where bf16 takes part.
# nanoGPT's softmax has 47 rows more than the vocabulary: log(50,304 / 50,257) nats are taken off its first loss.
TOLERANCE = {"fp32": (2e-4, 1e-3), "bf16": (1e-3, 2e-2)}
NOTES = (
    "all: same weights (ours, converted), same samples in the same order through the same loader, tied embeddings; a "
    "step is batch, zero_grad, forward, backward, clip at 1.0, AdamW (decay 0.1 on matrices, betas 0.9 and 0.95)",
    "peers at their best fair setting: bf16 by torch.autocast over fp32 weights, fused AdamW, scaled_dot_product_"
    "attention, no cache, erf GELU; torch.compile of the whole model (ours: of each block)",
    "on a CPU all arms but `as shipped` run under the allocator setting that ours makes for itself; `as shipped` is "
    "nanoGPT's own on a CPU: fp32, eager, its AdamW, the default allocator",
    "MFU by Megatron's formula, attention in full, vocabulary 50,257; by llm.c: 6N + 6LCT, which is 4 to 6 % less; "
    "the bars and p10–p90 are of all timed steps",
)


def close_to(result: dict[str, Any], arm: Arm) -> str:
    """Whether the arm's first step agrees with that of the first arm of ours that solves the same problem."""
    mine = result["arms"][arm.name]["visits"][-1]
    if arm.kind == "rank":
        return "none: one rank of many"
    for name, entry in result["arms"].items():
        done = [visit for visit in entry["visits"] if "failed" not in visit]
        if entry["kind"] == "ours" and done and entry["changes"] == arm.changes and done[0] is not mine:
            both = "fp32" if entry["precision"] == arm.precision == "fp32" else "bf16"
            errors = [
                abs((mine["loss"] - mine["padding_nats"]) / done[0]["loss"] - 1),
                abs(mine["grad_norm"] / done[0]["grad_norm"] - 1),
            ]
            agree = all(error <= limit for error, limit in zip(errors, TOLERANCE[both], strict=True))
            told = f"loss {errors[0]:.1e}, gradient norm {errors[1]:.1e} from {name!r}"
            return f"agrees: {told}" if agree else f"FAILED: {told}, allowed {TOLERANCE[both]} in {both}"
    return "none: no arm to compare with yet"


def summarise(result: dict[str, Any]) -> None:
    """Over all timed steps of all visits: tokens/s, MFU, memory in GB, compile seconds."""
    ceiling = result.get("ceiling", {}).get("flops_per_s")
    peak = result.get("peak_flops") or ceiling
    for entry in result["arms"].values():
        done = [visit for visit in entry["visits"] if "failed" not in visit]
        if not done:
            continue
        seconds = report.spread([s for visit in done for s in visit["step_s"]])
        tokens = done[0]["tokens_per_step"]
        speed = {"median": tokens / seconds["median"], "p10": tokens / seconds["p90"], "p90": tokens / seconds["p10"]}
        memory = {key: max(visit["memory_bytes"][key] or 0 for visit in done) / 1e9 for key in done[0]["memory_bytes"]}
        entry["summary"] = {
            "step_s": seconds,
            "tokens_per_s": speed,
            "memory_gb": memory,
            **utilisation(speed["median"], done[0], peak),
            "expected_peak_gb": (done[0]["expected_peak_bytes"] or 0) / 1e9 or None,
            # The first visit compiles; later ones find its code on the disk.
            "compile_s": done[0]["first_step_s"] - seconds["median"] if entry["compiled"] else None,
            "first_step_s": done[0]["first_step_s"],
            "computes": done[0]["computes"],
        }


def goals(result: dict[str, Any], wanted: list[tuple[str, float]]) -> list[dict[str, Any]]:
    """The fastest of our arms against the peers that the goals name."""
    speed = {
        name: entry["summary"]["tokens_per_s"]["median"] for name, entry in result["arms"].items() if "summary" in entry
    }
    mine = max((value for name, value in speed.items() if result["arms"][name]["kind"] == "ours"), default=None)
    peers = {name: value for name, value in speed.items() if result["arms"][name]["kind"] in ("huggingface", "nanogpt")}
    of = {
        "nanoGPT as shipped": [v for n, v in peers.items() if n == "nanoGPT as shipped"],
        "fastest peer in bf16": [v for n, v in peers.items() if result["arms"][n]["precision"] == "bf16"],
        "Hugging Face, its faster": [v for n, v in peers.items() if n.startswith("HF")],
    }
    return [
        {"against": name, "wanted": times, "ratio": mine / max(of[name]), "met": mine / max(of[name]) >= times}
        for name, times in wanted
        if mine and of[name]
    ]


def finish(result: dict[str, Any], path: Path, wanted: list[tuple[str, float]], bad: list[str]) -> int:
    """Summaries, JSON, plot and table; 1 where an arm failed or failed the gate."""
    summarise(result)
    result["goals"] = goals(result, wanted)
    result["notes"] = list(NOTES)
    result["failed"] = bad
    report.write(path, result)
    arms = {name: entry for name, entry in result["arms"].items() if "summary" in entry}
    against = next((e["summary"]["tokens_per_s"]["median"] for n, e in arms.items() if n == "ours compiled"), None)
    memory_names = list(dict.fromkeys(key for entry in arms.values() for key in entry["summary"]["memory_gb"]))
    head = [
        "arm",
        "tokens/s",
        "p10",
        "p90",
        "ms/step",
        "MFU %",
        "by llm.c %",
        *(f"{key.replace('_', ' ')} GB" for key in memory_names),
        "compile s",
        "first loss",
        "ours compiled ÷ it",
    ]
    rows = []
    for name, entry in result["arms"].items():
        if "summary" not in entry:
            rows.append([name, "failed" if entry["visits"] else "not run", *[""] * (len(head) - 2)])
            continue
        s, first = entry["summary"], next(visit for visit in entry["visits"] if "failed" not in visit)
        comparable = against and not entry["changes"] and entry["kind"] != "rank"
        rows.append(
            [
                name,
                *(f"{s['tokens_per_s'][key]:,.0f}" for key in ("median", "p10", "p90")),
                f"{1000 * s['step_s']['median']:,.1f}",
                *(f"{100 * s[key]:.1f}" if s[key] else "" for key in ("mfu", "mfu_by_llm_c")),
                *(f"{s['memory_gb'][key]:.2f}" if key in s["memory_gb"] else "" for key in memory_names),
                f"{s['compile_s']:.0f}" if s["compile_s"] is not None else "",
                f"{first['loss']:.4f}",
                f"{against / s['tokens_per_s']['median']:.2f}" if comparable else "",
            ]
        )
    print("\n" + report.table(head, rows) + "\n")
    ceiling = result.get("ceiling", {})
    if result.get("peak_flops"):
        print(f"MFU of {result['peak_flops'] / 1e12:.0f} TFLOP/s, the datasheet's dense bf16")
    elif "flops_per_s" in ceiling:
        print(
            f"MFU of {ceiling['flops_per_s'] / 1e12:.3f} TFLOP/s, measured: this model's own matrix products in "
            f"{ceiling['precision']}, weighted by FLOPs"
        )
    elif ceiling:
        print(f"NO CEILING, SO NO MFU: {ceiling.get('failed')}")
    for name, entry in arms.items():
        print(f"{name}: {entry['summary']['computes']}" + (f"; {entry['note']}" if entry["note"] else ""))
    for note in NOTES:
        print(f"- {note}")
    for entry in result.get("published", []):
        figure = (
            f"MFU {entry['mfu']:.1%}"
            if "mfu" in entry
            else "–".join(f"{rate:,.0f}" for rate in dict.fromkeys(entry["tokens_per_s"])) + " tokens/s"
        )
        print(
            f"published, not measured here, by llm.c's count: {entry['model']} on {entry['gpus']}: {figure} "
            f"({entry['source']})"
        )
    for goal in result["goals"]:
        print(
            f"{'met   ' if goal['met'] else 'MISSED'} {goal['ratio']:.2f} x {goal['against']} (goal {goal['wanted']})"
        )
    title = f"{result['what']}{', smoke' if result['smoke'] else ''}: {report.machine_line(result)}"
    speeds = [
        (name, *(entry["summary"]["tokens_per_s"][key] for key in ("median", "p10", "p90")))
        for name, entry in arms.items()
    ]
    memory = [(name, *[next(iter(entry["summary"]["memory_gb"].values()))] * 3) for name, entry in arms.items()]
    label = f"{memory_names[0].replace('_', ' ')}, GB" if memory_names else "memory, GB"
    print(report.plot(path.with_suffix(".png"), title, [("tokens/s, bars p10–p90", speeds), (label, memory)]))
    print(f"wrote {path.name}")
    if bad:
        print(f"\nFAILED: {'; '.join(dict.fromkeys(bad))}: see above; exit code 1")
    return 1 if bad else 0
