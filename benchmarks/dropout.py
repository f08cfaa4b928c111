#!/usr/bin/env python3
"""Whether dropout's masks are as often and as independent as they should be, over 10^8 elements:

    python benchmarks/dropout.py                      # half a minute; writes benchmarks/results/dropout.json
    python benchmarks/dropout.py --samples 2 --output FILE

Each figure is in standard deviations of what chance gives: the rate; the correlation with neighbours (along channels
and positions), and with the masks of other samples, layers, places in the layer and seeds; and Pearson's chi-square of
the 256 patterns of eight neighbours. The exit code is 1 where one is above 5.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch
from torch import Tensor

import mpu
from benchmarks import report
from mpu.dropout import AFTER_ATTENTION, AFTER_MLP
from mpu.kernels import keyed_dropout

S, H = 1024, 1024
LIMIT = 5.0


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
        others = {"channel + 1": (centred[:, 1:], centred[:, :-1]), "channel + 4": (centred[:, 4:], centred[:, :-4]),
                  "channel + 16": (centred[:, 16:], centred[:, :-16]),
                  "position + 1": (centred[1:], centred[:-1]),
                  "next sample": (centred, mask(sample + 1, p) - p),
                  "next layer": (centred, mask(sample, p, layer=1) - p),
                  "other place": (centred, mask(sample, p, site=AFTER_ATTENTION) - p),
                  "next seed": (centred, mask(sample, p, seed=1235) - p)}
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=96, help="of 1,024 positions and 1,024 channels")
    parser.add_argument("--output", metavar="FILE", type=Path, default=report.RESULTS / "dropout.json")
    chosen = parser.parse_args()
    found = {f"p = {p}": measure(chosen.samples, p) for p in (0.1, 0.5)}
    greatest = max(abs(value) for of_p in found.values() for value in of_p.values())
    report.write(chosen.output, {**report.header("dropout masks"), "elements": chosen.samples * S * H,
                                 "standard_deviations": found, "greatest": greatest, "limit": LIMIT})
    names = list(next(iter(found.values())))
    print(report.table(["standard deviations", *found], [
        [name, *(f"{of_p[name]:+.2f}" for of_p in found.values())] for name in names]))
    print(f"\nthe greatest of {len(names) * len(found)} is {greatest:.2f}, over {chosen.samples * S * H:,} elements "
          "each")
    return int(greatest > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
