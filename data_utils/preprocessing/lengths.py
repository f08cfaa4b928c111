"""The lengths of documents: as numbers, as bars of text, and as a plot."""

from pathlib import Path

import numpy as np

BAR = 40


def summary(lengths: np.ndarray) -> list[str]:
    """A line of numbers, lengths in tokens; then lines that line up, with a bar and the number of documents of 0, 1,
    2-3, 4-7 tokens and so on, from the first such bin to the last that has any. No line if there are no documents."""
    if not len(lengths):
        return []
    p10, median, p90, p99 = np.percentile(lengths, [10, 50, 90, 99])
    counts = np.bincount(np.frexp(lengths.astype(np.float64))[1]).tolist()  # by binary digits, of which 0 has none
    first = next(number for number, count in enumerate(counts) if count)
    labels = ["0", "1", *(f"{1 << number:,}-{(2 << number) - 1:,}" for number in range(1, len(counts) - 1))]
    width = len(labels[len(counts) - 1])
    return [
        f"length in tokens: mean {lengths.mean():,.0f}, p10 {p10:,.0f}, median {median:,.0f}, p90 {p90:,.0f}, "
        f"p99 {p99:,.0f}, longest {lengths.max():,}",
        *(
            f"{label:>{width}}  {count:>13,}  {'#' * -(-BAR * count // max(counts))}"
            for label, count in zip(labels[first:], counts[first:], strict=False)
        ),
    ]


def plot(lengths: np.ndarray, path: Path, title: str) -> None:
    """Write a figure to `path`, with two panels: documents by length, and the share of all tokens in documents of up to
    a length. ValueError without matplotlib, or for a suffix that it does not know."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"--plot {path} needs the package matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(9, 3.6), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=10)
    left, right = figure.subplots(1, 2)
    there = np.sort(lengths[lengths > 0])
    left.hist(there, bins=np.geomspace(1, max(2, int(there[-1])), 40))
    left.set_ylabel("documents")
    # A billion documents need no billion points.
    shown = np.unique(np.linspace(0, len(there) - 1, 2000).astype(np.int64))
    right.plot(there[shown], (np.cumsum(there, dtype=np.int64) / there.sum(dtype=np.int64))[shown])
    right.set_ylabel("share of the tokens, in documents of up to this length")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("document length in tokens")
    if path.suffix.lower().lstrip(".") not in figure.canvas.get_supported_filetypes():
        raise ValueError(f"--plot {path}: give a file that ends in .png, .svg or .pdf")
    figure.savefig(path)
