"""Curves over the iterations, from the records of a run: as a picture, as SVG for a page, or as plain text if
matplotlib is not installed."""

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

POINTS = 320  # of a curve; more are drawn as means, with a band from the smallest to the largest value
GREY = "#7d8793"  # readable on a light and on a dark page
BLUE, ORANGE, GREEN = "#3568a8", "#d1642e", "#5b7f3b"

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Curve:
    """points: (iteration, value) by iteration. colour: as matplotlib takes it. dots: whether each point is marked."""

    label: str
    colour: str
    points: Points
    dots: bool = False


def points(records: Sequence[dict[str, Any]], key: str, split: str | None = None) -> list[tuple[int, float]]:
    """Return (iteration, value) of the training records, or of the evaluations of `split`; null values are left out."""
    return [
        (record["iteration"], float(record[key]))
        for record in records
        if record.get("split") == split and record.get(key) is not None
    ]


def loss_curves(records: Sequence[dict[str, Any]]) -> list[Curve]:
    """The training loss and the validation loss."""
    return [
        Curve("training", BLUE, points(records, "lm_loss")),
        Curve("validation", ORANGE, points(records, "lm_loss", "valid"), dots=True),
    ]


def draw(panels: dict[str, list[Curve]], columns: int = 1) -> Figure:
    """Draw a panel for each title. The first one has a row for itself; the others stand in `columns` below it. Raises
    ImportError if matplotlib is not installed."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports its font cache, which is not for a run's user
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    first, *others = panels
    others += ["."] * (-len(others) % columns)  # empty places
    rows: Any = [[first] * columns, *(others[start : start + columns] for start in range(0, len(others), columns))]
    heights = [3.8] + [2.2] * (len(rows) - 1)
    figure = Figure(figsize=(8 if columns == 1 else 10, sum(heights)), dpi=120)
    # A constrained layout would take most of the time of drawing.
    figure.subplots_adjust(left=0.09, right=0.98, bottom=0.08, top=0.94, hspace=0.45, wspace=0.2)
    for title, axes in figure.subplot_mosaic(rows, height_ratios=heights).items():
        for curve in panels[title]:
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
    marker = "o" if curve.dots or len(ends) == 1 else None
    means = np.add.reduceat(y, starts) / sizes
    axes.plot(ends, means, color=curve.colour, linewidth=1.4, marker=marker, markersize=4, label=curve.label)
    if len(ends) < len(x):
        low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
        axes.fill_between(ends, low, high, color=curve.colour, alpha=0.2, linewidth=0)


def as_svg(panels: dict[str, list[Curve]], columns: int = 2) -> str:
    """`draw` as an `<svg>` for an HTML page, light or dark. It loads nothing. Raises ImportError without matplotlib."""
    import matplotlib

    grey: Any = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY)
    with matplotlib.rc_context({**grey, "svg.fonttype": "none", "svg.hashsalt": "curves"}):
        file = io.StringIO()
        draw(panels, columns).savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg ") :], flags=re.DOTALL)
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)


def loss_curve(metrics_path: str | Path, png_path: str | Path, title: str) -> str:
    """Draw training and validation loss over the iterations into `png_path`, and the learning rate below them.

    Returns that path, or the curve as text if matplotlib is not installed, or "" if there are fewer than two points:
    importing matplotlib would cost a short run half a second.
    """
    records = read_records(metrics_path)
    training, validation = loss_curves(records)
    if max(len(training.points), len(validation.points)) < 2:
        return ""
    rates = [Curve("", GREEN, points(records, "learning_rate"))]
    try:
        figure = draw({f"{title}: loss (nats per token)": [training, validation], "learning rate": rates})
    except ImportError:
        return text_curve(training.points, title)
    if validation.points:
        x, y = validation.points[-1]
        figure.axes[0].annotate(
            f"{y:.3f}", (x, y), textcoords="offset points", xytext=(0, 8), ha="right", color=validation.colour
        )
    figure.savefig(png_path)
    return str(png_path)


def text_curve(curve: Points, title: str, width: int = 64, height: int = 12) -> str:
    """Draw the curve with characters; each column is the mean of as many points."""
    if not curve:
        return f"{title}: no iteration was logged"
    means = [part.mean() for part in np.array_split([value for _, value in curve], min(width, len(curve)))]
    low, high = min(means), max(means)
    grid = [[" "] * len(means) for _ in range(height)]
    for column, value in enumerate(means):
        grid[round((high - value) * (height - 1) / (high - low or 1.0))][column] = "*"
    labels = [f"{high:9.3f}", *[" " * 9] * (height - 2), f"{low:9.3f}"]
    rows = [f"{label} |{''.join(row).rstrip()}" for label, row in zip(labels, grid, strict=True)]
    axis = f"{'':10}+{'-' * len(means)}"
    return "\n".join([title, *rows, axis, f"{'':11}{curve[0][0]} to {curve[-1][0]} iterations"])
