#!/usr/bin/env python3
"""Plot the losses of 24 layouts: layouts_light.svg and layouts_dark.svg.

    python docs/figures/plot_layouts.py

layouts.json has the losses that `9b929fe:benchmarks/layouts.py` measured: one model, seed and text in fp32 on CPUs.
`pytest tests/megatron/gpt2/train/test_layouts.py -m wide` trains such layouts again and compares their losses.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
# For each theme: text, grid, curve, and the colours of 1, 2, 4 and 8 processes.
THEMES = {
    "light": ("#1f2328", "#d1d9e0", "#6e7781", ("#0b3d91", "#1f83d6", "#12a594", "#e5751f")),
    "dark": ("#e6edf3", "#30363d", "#9198a1", ("#a5c8ff", "#4ea1f3", "#2fd0b5", "#ff9d4d")),
}


def style(theme: str) -> dict[str, Any]:
    """Return matplotlib's settings for `theme`, "light" or "dark"."""
    ink, grid, *_ = THEMES[theme]
    return {
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink),
        "grid.color": grid,
        "axes.edgecolor": grid,
        "axes.grid": True,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 10.5,
        "svg.hashsalt": "layouts",
    }


def save(figure: Figure, name: str) -> None:
    """Write `figure` to NAME.svg. Coordinates get fewer digits, to make the file smaller."""
    file = FOLDER / f"{name}.svg"
    figure.savefig(file, transparent=True, metadata={"Date": None})
    file.write_text(re.sub(r"(\d\d\.\d\d)\d+", r"\1", file.read_text()))


def draw(layouts: list[dict[str, Any]], theme: str) -> None:
    """Write the figure of `theme`: above the losses, below their differences from the losses of one process."""
    _, _, grey, colors = THEMES[theme]
    by_processes = dict(zip((1, 2, 4, 8), colors, strict=True))
    steps = range(1, len(layouts[0]["losses"]) + 1)
    with matplotlib.rc_context(style(theme)):
        figure = Figure(figsize=(8, 4.6), layout="constrained")
        losses, differences = figure.subplots(2, sharex=True, height_ratios=[2, 1])
        for number, layout in enumerate(layouts):
            color = by_processes[layout["processes"]]
            # Neighbouring markers belong to layouts with different numbers of processes.
            shown = slice(7 * number % len(layouts), None, len(layouts))
            losses.plot(steps, layout["losses"], color=grey, linewidth=0.8, zorder=1)
            losses.scatter(steps[shown], layout["losses"][shown], color=color, s=34, zorder=2)
            differences.plot(steps, [1e6 * value for value in layout["difference"]], color=color, linewidth=0.9)
        for processes, color in by_processes.items():
            losses.scatter([], [], color=color, s=34, label=f"{processes} process{'es' * (processes > 1)}")
        last = [layout["losses"][-1] for layout in layouts]
        greatest = max(max(layout["difference"]) for layout in layouts)
        losses.set_title(f"{len(layouts)} layouts, one loss curve", fontweight="bold", fontsize=12)
        losses.legend(frameon=False, title="each marker is a different layout", ncols=2)
        losses.set_ylabel("loss")
        losses.text(0.03, 0.06, f"step {steps[-1]}: {min(last):.5f} to {max(last):.5f}", transform=losses.transAxes)
        differences.set_ylabel("difference\n× 10⁻⁶")
        differences.set_ylim(0, 1.25e6 * greatest)
        differences.set_xlabel(f"step (greatest relative difference from one process: {greatest:.1e})")
        save(figure, f"layouts_{theme}")


if __name__ == "__main__":
    for theme in THEMES:
        draw(json.loads((FOLDER / "layouts.json").read_text())["layouts"], theme)
