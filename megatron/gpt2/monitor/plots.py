"""Plot the records of a run: as an image, as SVG for a web page, or as text if matplotlib is not installed."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.gpt2.monitor.incidents import read_records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A plot shows at most this number of points of a curve. In longer curves each point is a mean, and a band shows minimum
# and maximum.
POINTS = 320
FEW = 40  # A curve with fewer points gets a marker at each point.
GREY = "#7d8793"  # This grey is readable on a light and on a dark page.
BLUE, ORANGE, GREEN = "#3568a8", "#d1642e", "#5b7f3b"

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Curve:
    """A line of a plot.

    points: (iteration, value), sorted by iteration.
    colour: a colour of matplotlib.
    """

    label: str
    colour: str
    points: Points


def curve_points(records: Sequence[dict[str, Any]], key: str, split: str | None = None) -> list[tuple[int, float]]:
    """Return (iteration, value) of each record that has a value under `key`.

    split: the split whose evaluations are returned; None for the training records."""
    return [
        (record["iteration"], float(record[key]))
        for record in records
        if record.get("split") == split and record.get(key) is not None
    ]


def loss_curves(records: Sequence[dict[str, Any]]) -> list[Curve]:
    """Return the curves of training and validation loss."""
    return [
        Curve("training", BLUE, curve_points(records, "lm_loss")),
        Curve("validation", ORANGE, curve_points(records, "lm_loss", "valid")),
    ]


def draw_figure(panels: dict[str, list[Curve]]) -> Figure:
    """Draw a panel for each {title: curves}, one below the other. Raises ImportError if matplotlib is not installed."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # Suppress the message about the font cache.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    heights = [3.8, *[2.2] * (len(panels) - 1)]
    figure = Figure(figsize=(8, sum(heights)), dpi=120)
    # The margins are fixed, because computing them (constrained layout) takes longer than drawing.
    figure.subplots_adjust(left=0.09, right=0.98, bottom=0.05, top=0.96, hspace=0.45)
    rows = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, curves) in zip(rows, panels.items(), strict=True):
        for curve in curves:
            if curve.points:
                _draw_curve(axes, curve)
        if len(axes.lines) > 1:
            axes.legend(frameon=False)
        axes.set_title(title, fontsize=10, loc="left")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(True, color=GREY, alpha=0.3, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_curve(axes: Any, curve: Curve) -> None:
    x, y = np.array(curve.points).T
    starts = np.arange(0, len(x), -(-len(x) // POINTS))
    sizes = np.diff(starts, append=len(x))
    ends = x[starts + sizes - 1]
    marker = "o" if len(ends) < FEW else None
    means = np.add.reduceat(y, starts) / sizes
    axes.plot(ends, means, color=curve.colour, linewidth=1.4, marker=marker, markersize=4, label=curve.label)
    if len(ends) < len(x):
        low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
        axes.fill_between(ends, low, high, color=curve.colour, alpha=0.2, linewidth=0)


def as_svg(panels: dict[str, list[Curve]]) -> str:
    """Return `draw_figure` as a self-contained `<svg>` for light and dark pages. Raises ImportError without
    matplotlib."""
    import matplotlib

    grey: Any = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY)
    with matplotlib.rc_context({**grey, "svg.fonttype": "none", "svg.hashsalt": "curves"}):
        file = io.StringIO()
        draw_figure(panels).savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg ") :], flags=re.DOTALL)
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)


def plot_loss(metrics_path: str | Path, png_path: str | Path, title: str) -> str:
    """Plot training loss, validation loss and learning rate into the image `png_path`, and return this path. If
    matplotlib is not installed, return the curve as text. With fewer than two points, return "".
    """
    records = read_records(metrics_path)
    training, validation = loss_curves(records)
    if max(len(training.points), len(validation.points)) < 2:
        return ""
    rates = [Curve("", GREEN, curve_points(records, "learning_rate"))]
    try:
        figure = draw_figure({f"{title}: loss (nats per token)": [training, validation], "learning rate": rates})
    except ImportError:
        return ascii_plot(training.points or validation.points, title)
    figure.savefig(png_path)
    return str(png_path)


def ascii_plot(curve: Points, title: str, width: int = 64, height: int = 12) -> str:
    """Draw a curve with characters. Each column shows the mean of an equal number of points."""
    means = [part.mean() for part in np.array_split([value for _, value in curve], min(width, len(curve)))]
    low, high = min(means), max(means)
    grid = [[" "] * len(means) for _ in range(height)]
    for column, value in enumerate(means):
        grid[round((high - value) * (height - 1) / (high - low or 1.0))][column] = "*"
    labels = [f"{high:9.3f}", *[" " * 9] * (height - 2), f"{low:9.3f}"]
    rows = [f"{label} |{''.join(row).rstrip()}" for label, row in zip(labels, grid, strict=True)]
    axis = f"{'':10}+{'-' * len(means)}"
    return "\n".join([title, *rows, axis, f"{'':11}{curve[0][0]} to {curve[-1][0]} iterations"])
