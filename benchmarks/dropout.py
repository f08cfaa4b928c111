#!/usr/bin/env python3
"""Dropout by counter: its masks, and its time.

    python benchmarks/dropout.py masks                # half a minute, 10^8 elements
    python benchmarks/dropout.py cost                 # some minutes: training steps, beside --dropout-rng torch
    python benchmarks/dropout.py masks --smoke --output DIR

masks: whether they are as often and as independent as they should be. Each figure is in standard deviations of what
chance gives: the rate; the correlation with neighbours (along channels and positions), and with the masks of other
samples, layers, places in the layer and seeds; and Pearson's chi-square of the 256 patterns of eight neighbours. The
exit code is 1 where one is above 5. cost: with as many threads as torch takes (OMP_NUM_THREADS).
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch
from torch import Tensor

import mpu
from benchmarks import report
from benchmarks.problem import Problem
from benchmarks.step_pairs import beside, steps_in_turns
from benchmarks.train import write_tokens
from mpu.dropout import AFTER_ATTENTION, AFTER_MLP
from mpu.kernels import keyed_dropout

S, H = 1024, 1024
LIMIT = 5.0
STEPS = (
    ("small, bf16", "bf16", (4, 256, 4, 256, 8), 30),
    ("small, fp32", "fp32", (4, 256, 4, 256, 8), 30),
    ("hidden 512, bf16", "bf16", (4, 512, 8, 512, 8), 10),
    ("like 124M, bf16", "bf16", (3, 768, 12, 1024, 4), 5),
)


def mask(sample: int, p: float, *, seed: int = 1234, layer: int = 0, site: int = AFTER_MLP) -> Tensor:
    """float32 [S, H]: 1 for what is dropped."""
    keys = mpu.dropout_keys(seed, torch.tensor([sample]), layer + 1)[layer]
    return (keyed_dropout(torch.ones(S, 1, H), p, keys, site)[:, 0] == 0).float()


def measure(samples: int, p: float) -> dict[str, float]:
    """Each figure's distance from what it should be, in standard deviations."""
    variance = p * (1 - p)
    products: dict[str, float] = {}
    pairs: dict[str, int] = {}
    dropped, patterns = 0.0, torch.zeros(256)
    for sample in range(samples):
        here = mask(sample, p)
        dropped += here.sum(dtype=torch.float64).item()
        eights = here.view(-1, 8).to(torch.int64) @ (1 << torch.arange(8))
        patterns += torch.bincount(eights, minlength=256)
        centred = here - p
        others = {
            "channel + 1": (centred[:, 1:], centred[:, :-1]),
            "channel + 4": (centred[:, 4:], centred[:, :-4]),
            "channel + 16": (centred[:, 16:], centred[:, :-16]),
            "position + 1": (centred[1:], centred[:-1]),
            "next sample": (centred, mask(sample + 1, p) - p),
            "next layer": (centred, mask(sample, p, layer=1) - p),
            "other place": (centred, mask(sample, p, site=AFTER_ATTENTION) - p),
            "next seed": (centred, mask(sample, p, seed=1235) - p),
        }
        for name, (a, b) in others.items():
            products[name] = products.get(name, 0.0) + (a * b).sum(dtype=torch.float64).item()
            pairs[name] = pairs.get(name, 0) + a.numel()
    count = samples * S * H
    found = {"rate": (dropped - count * p) / math.sqrt(count * variance)}
    found.update({name: product / (variance * math.sqrt(pairs[name])) for name, product in products.items()})
    ones = torch.tensor([number.bit_count() for number in range(256)])
    expected = count / 8 * p ** ones.double() * (1 - p) ** (8 - ones.double())
    chi_square = ((patterns.double() - expected).square() / expected).sum().item()
    found["patterns of 8"] = (chi_square - 255) / math.sqrt(2 * 255)
    return {name: round(value, 3) for name, value in found.items()}


def masks(smoke: bool) -> dict[str, Any]:
    """The figures of two probabilities."""
    samples = 2 if smoke else 96
    found = {f"p = {p}": measure(samples, p) for p in (0.1, 0.5)}
    greatest = max(abs(value) for of_p in found.values() for value in of_p.values())
    names = list(next(iter(found.values())))
    print(
        report.table(
            ["standard deviations", *found],
            [[name, *(f"{of_p[name]:+.2f}" for of_p in found.values())] for name in names],
        )
    )
    print(f"\nthe greatest of {len(names) * len(found)} is {greatest:.2f}, over {samples * S * H:,} elements each")
    return {"elements": samples * S * H, "standard_deviations": found, "greatest": greatest, "limit": LIMIT}


def cost(smoke: bool) -> dict[str, Any]:
    """Steps of four models with dropout 0.1 by counter, over the same with torch's generator. The vocabulary is small:
    the head would hide what dropout takes."""
    rows = {}
    for name, precision, sizes, pairs in STEPS[:1] if smoke else STEPS:
        with tempfile.TemporaryDirectory() as scratch:
            problem = Problem(*sizes, dropout=0.1, vocab_size=512, tokens=f"{scratch}/tokens", scratch=scratch)
            write_tokens(problem, 64)
            found = steps_in_turns(
                0, 1, problem, {"torch": ("--dropout-rng", "torch"), "counter": ()}, 2 if smoke else pairs, precision
            )
            rows[name] = {kind: beside(found, kind) for kind in ("clock", "processor")}
    columns = [f"{torch.get_num_threads()} threads", "median ratio", "best of each", "processor time", "best"]
    print(
        report.table(
            columns,
            [
                [
                    name,
                    *(f"{value:.3f}" for kind in row.values() for value in (kind["ratio"]["median"], kind["of_best"])),
                ]
                for name, row in rows.items()
            ],
        )
    )
    return {"threads": torch.get_num_threads(), "rows": rows}


PARTS: dict[str, tuple[str, Callable[[bool], dict[str, Any]]]] = {
    "masks": ("dropout", masks),
    "cost": (f"dropout_cost_{torch.get_num_threads()}_threads", cost),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="DIR", type=Path, default=report.RESULTS, help="folder of the JSON")
    parser.add_argument("--smoke", action="store_true", help="small: proves the script")
    parser.add_argument("part", nargs="?", choices=tuple(PARTS), default="masks")
    chosen = parser.parse_args()
    file, part = PARTS[chosen.part]
    found = part(chosen.smoke)
    report.write(chosen.output / f"{file}.json", {**report.header(f"dropout: {chosen.part}"), **found})
    return int(found.get("greatest", 0.0) > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
