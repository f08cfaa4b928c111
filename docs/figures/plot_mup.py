#!/usr/bin/env python3
"""Plot the sizes of activations, and losses by learning rate, with and without muP: mup_light.svg and mup_dark.svg.

    python docs/figures/plot_mup.py

The numbers are in benchmarks/results/h200.json.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from plot_layouts import FOLDER, THEMES, save, style

WIDTHS = ("128", "256", "512", "1024")
RESULTS = FOLDER.parents[1] / "benchmarks" / "results" / "h200.json"


def draw(results: dict[str, Any], theme: str) -> None:
    """Write the figure of `theme`: on the left the sizes of activations, then the losses without and with muP. A ring
    marks the median of the seeds' best learning rates."""
    *_, colors = THEMES[theme]
    kinds = {"without": "without muP", "with": "with muP, base width 128"}
    with matplotlib.rc_context(style(theme)):
        figure = Figure(figsize=(9.6, 3.4), layout="constrained")
        sizes, *losses = figure.subplots(1, 3)
        losses[1].sharey(losses[0])
        for (kind, title), color in zip(kinds.items(), (colors[3], colors[1]), strict=True):
            of_width = results["coordinate_check"][kind]
            for part in of_width[WIDTHS[0]]:
                sizes.plot(WIDTHS, [of_width[width][part] for width in WIDTHS], color=color, linewidth=1.2)
            sizes.plot([], [], color=color, label=title.partition(",")[0])
        sizes.set_yscale("log")
        sizes.set_title("sizes of activations (RMS)")
        sizes.set_xlabel("--hidden-size")
        sizes.legend(frameon=False)
        for axes, (kind, title) in zip(losses, kinds.items(), strict=True):
            for width, color in zip(WIDTHS, colors, strict=True):
                found = results["mup"]["by_width"][f"{width} {kind}"]
                best = f"{statistics.median(found['best_of_seeds'])}"
                rates = [int(rate) for rate in found["median"]]
                axes.plot(rates, list(found["median"].values()), color=color, marker=".", label=width)
                axes.plot(int(best), found["median"][best], "o", color=color, markersize=11, fillstyle="none")
            axes.set_ylim(2.05, 2.7)
            axes.set_title(f"loss {title}")
            axes.set_xlabel("--lr, power of two")
        losses[0].legend(frameon=False, ncols=2)
        save(figure, f"mup_{theme}")


if __name__ == "__main__":
    for theme in THEMES:
        draw(json.loads(RESULTS.read_text())["optimizers"], theme)
