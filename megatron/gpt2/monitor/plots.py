"""Curves over the iterations, from the records of a run: as a picture, as SVG for a page, or as plain text where
matplotlib is not installed."""

from __future__ import annotations

import io
import json
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 320  # of a curve; more are drawn as means, with a band from the smallest to the largest value
GREY = "#7d8793"  # readable on a light and on a dark page
COLOURS = {"blue": "#3568a8", "orange": "#d1642e", "green": "#5b7f3b"}

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Curve:
    """points: (iteration, value) by iteration. colour: a name in COLOURS."""

    label: str
    colour: str
    points: Points
    dots: bool = False


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines that have an iteration; none if there is no file.

    A line that is damaged is left out, such as the last one, which a crash has cut short.
    """
    records = []
    for line in Path(path).read_bytes().splitlines() if Path(path).exists() else ():
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("iteration"), int):
            records.append(record)
    return records


def points(records: Sequence[dict[str, Any]], key: str, split: str | None = None) -> list[tuple[int, float]]:
    """(iteration, value) of the training records, or of the evaluations of `split`; null values are left out."""
    return [
        (record["iteration"], float(record[key]))
        for record in records
        if record.get("split") == split and record.get(key) is not None
    ]


def loss_curves(records: Sequence[dict[str, Any]]) -> list[Curve]:
    """The training loss and the validation loss."""
    return [
        Curve("training", "blue", points(records, "lm_loss")),
        Curve("validation", "orange", points(records, "lm_loss", "valid"), dots=True),
    ]


def draw(panels: dict[str, list[Curve]], columns: int = 1, heights: Sequence[float] = (1,), width: float = 8) -> Figure:
    """A figure of `width` inches with a panel for each title. The first panel has a row for itself; the others stand in
    `columns` below it. heights: of the first row and of the others, relative to each other. Raises ImportError if
    matplotlib is not installed."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports its font cache, which is not for a run's user
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = 1 + -(-(len(panels) - 1) // columns)
    figure = Figure(figsize=(width, 1.4 * sum(heights[min(row, len(heights) - 1)] for row in range(rows))), dpi=120)
    # A constrained layout would take most of the time of drawing.
    figure.subplots_adjust(left=0.75 / width, right=1 - 0.2 / width, bottom=0.08, top=0.94, hspace=0.45, wspace=0.2)
    grid = figure.add_gridspec(
        rows, columns, height_ratios=[heights[min(row, len(heights) - 1)] for row in range(rows)]
    )
    for number, (title, curves) in enumerate(panels.items()):
        place = grid[0, :] if number == 0 else grid[1 + (number - 1) // columns, (number - 1) % columns]
        axes = figure.add_subplot(place)
        for curve in curves:
            size = max(1, -(-len(curve.points) // POINTS))
            groups = [curve.points[start : start + size] for start in range(0, len(curve.points), size)]
            x = [group[-1][0] for group in groups]
            means = [math.fsum(y for _, y in group) / len(group) for group in groups]
            marker = "o" if curve.dots or len(x) == 1 else None
            colour = COLOURS[curve.colour]
            axes.plot(x, means, color=colour, linewidth=1.4, marker=marker, markersize=4, label=curve.label)
            if size > 1:
                low, high = ([end(y for _, y in group) for group in groups] for end in (min, max))
                axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        if len([curve for curve in curves if curve.points]) > 1:
            axes.legend(frameon=False)
        axes.set_title(title, fontsize=10, loc="left")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(True, color=GREY, alpha=0.3, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def as_svg(panels: dict[str, list[Curve]], **how: Any) -> str:
    """`draw` as an `<svg>` for an HTML page, light or dark. It loads nothing. Raises ImportError without matplotlib."""
    import matplotlib

    grey: Any = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY)
    with matplotlib.rc_context({**grey, "svg.fonttype": "none", "svg.hashsalt": "curves"}):
        file = io.StringIO()
        draw(panels, **how).savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg ") :], flags=re.DOTALL)
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)


def loss_curve(metrics_path: str | Path, png_path: str | Path, title: str) -> str:
    """Draw training and validation loss over the iterations into `png_path`, and the learning rate below them.

    Returns that path, or the curve as text if matplotlib is not installed, or "" if there are fewer than two points:
    importing matplotlib would cost a short run half a second.
    """
    records = read_records(metrics_path)
    curves = loss_curves(records)
    if max(len(curve.points) for curve in curves) < 2:
        return ""
    rates = {"learning rate": [Curve("", "green", points(records, "learning_rate"))]}
    try:
        figure = draw({f"{title}: loss (nats per token)": curves, **rates}, heights=(3, 1))
    except ImportError:
        return text_curve(curves[0].points, title)
    if validation := curves[1].points:
        x, y = validation[-1]
        figure.axes[0].annotate(
            f"{y:.3f}", (x, y), textcoords="offset points", xytext=(0, 8), ha="right", color=COLOURS["orange"]
        )
    figure.savefig(png_path)
    return str(png_path)


def text_curve(curve: Points, title: str, width: int = 64, height: int = 12) -> str:
    """The curve drawn with characters; each column is the mean of the points that fall into it."""
    if not curve:
        return f"{title}: no iteration was logged"
    first, last = curve[0][0], curve[-1][0]
    columns: dict[int, list[float]] = {}
    for iteration, value in curve:
        columns.setdefault(round((iteration - first) * (width - 1) / max(last - first, 1)), []).append(value)
    means = {column: math.fsum(values) / len(values) for column, values in columns.items()}
    low, high = min(means.values()), max(means.values())
    grid = [[" "] * width for _ in range(height)]
    for column, value in means.items():
        grid[round((high - value) * (height - 1) / (high - low or 1.0))][column] = "*"
    labels = [f"{high:9.3f}"] + [" " * 9] * (height - 2) + [f"{low:9.3f}"]
    rows = [f"{label} |{''.join(row).rstrip()}" for label, row in zip(labels, grid, strict=True)]
    axis = " " * 10 + "+" + "-" * width
    return "\n".join([title, *rows, axis, f"{'':11}{first:<{width - 10}}{last:>10}"])
