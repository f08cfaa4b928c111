"""The loss curve of a run, from its metrics.jsonl: a PNG, or plain text where matplotlib is not installed."""

import json
import logging
import math
from pathlib import Path
from typing import Any

TRAINING, VALIDATION, RATE = "#3568a8", "#d1642e", "#5b7f3b"


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines that have an iteration; none where there is no file.

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


def points(records: list[dict[str, Any]], key: str, split: str | None = None) -> list[tuple[int, float]]:
    """(iteration, value) of the training records, or of the evaluations of `split`; null values are left out."""
    return [
        (record["iteration"], float(record[key]))
        for record in records
        if record.get("split") == split and record.get(key) is not None
    ]


def loss_curve(metrics_path: str | Path, png_path: str | Path, title: str) -> str:
    """Draw training and validation loss over the iterations into `png_path`, and the learning rate below them.

    Returns that path, or the curve as text where matplotlib is not installed, or "" where there are fewer than two
    points: importing matplotlib would cost a short run half a second.
    """
    records = read_records(metrics_path)
    training, validation = points(records, "lm_loss"), points(records, "lm_loss", "valid")
    if max(len(training), len(validation)) < 2:
        return ""
    try:
        logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports its font cache, which is no news of ours
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return text_curve(training, title)

    figure = Figure(figsize=(8, 5.5), dpi=120, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    if training:
        top.plot(
            *zip(*training, strict=True),
            color=TRAINING,
            linewidth=1.4,
            label="training",
            marker="o" if len(training) == 1 else None,
        )
    if validation:
        top.plot(
            *zip(*validation, strict=True), color=VALIDATION, linewidth=1, marker="o", markersize=5, label="validation"
        )
        x, y = validation[-1]
        top.annotate(f"{y:.3f}", (x, y), textcoords="offset points", xytext=(0, 8), ha="right", color=VALIDATION)
    top.legend(frameon=False)
    top.set_title(title, fontsize=11, loc="left")
    top.set_ylabel("loss (nats per token)")
    rates = points(records, "learning_rate")
    if rates:
        bottom.plot(*zip(*rates, strict=True), color=RATE, linewidth=1.2)
    bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("iteration")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (top, bottom):
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(png_path)
    return str(png_path)


def text_curve(curve: list[tuple[int, float]], title: str, width: int = 64, height: int = 12) -> str:
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
