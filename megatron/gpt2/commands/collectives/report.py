"""The measurements as a table, as a verdict and as a plot."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

FAR_BELOW = 0.5  # of the median of all pairs: a pair or a rank under it is named


@dataclass(frozen=True)
class Row:
    """An operation at one size.

    Times are in seconds, of the slowest rank of each run; bandwidths in 1e9 bytes per second, None where there is no
    message.
    """

    operation: str
    bytes: int
    iterations: int
    seconds: float  # the median
    seconds_p10: float
    seconds_p90: float
    algorithm_bandwidth: float | None
    bus_bandwidth: float | None
    correct: bool


@dataclass(frozen=True)
class Missing:
    """An operation without a figure, or without one from some size on, and the reason."""

    operation: str
    reason: str


@dataclass(frozen=True)
class Pairs:
    """bandwidth[source][target] in GB/s of messages of `bytes` bytes, while all other ranks are idle; 0 on the
    diagonal."""

    bytes: int
    bandwidth: list[list[float]]

    def all(self) -> list[float]:
        """The bandwidth of every pair, in GB/s."""
        return [
            value for source, row in enumerate(self.bandwidth) for target, value in enumerate(row) if source != target
        ]

    def slow(self) -> list[tuple[int, int]]:
        """The pairs far below the median of all."""
        least = FAR_BELOW * median(self.all())
        return [
            (source, target)
            for source, row in enumerate(self.bandwidth)
            for target, value in enumerate(row)
            if source != target and value < least
        ]

    def slow_ranks(self) -> list[int]:
        """Ranks with most of their pairs among the slow ones, in both directions; of two ranks neither can be
        blamed."""
        n, slow = len(self.bandwidth), self.slow()
        return [rank for rank in range(n) if n > 2 and sum(rank in pair for pair in slow) > n - 1]


def size_name(size: int) -> str:
    """1024 -> 1K; a size that no unit divides stays a number of bytes."""
    for suffix, unit in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{suffix}"
    return str(size)


HEADER = (
    f"{'operation':<18} {'bytes':>9} {'runs':>5} {'median µs':>11} {'p10 – p90 µs':>23} {'algorithm':>10} "
    f"{'bus GB/s':>9}  result"
)


def row_line(row: Row) -> str:
    """A row of the table, under HEADER."""
    spread = f"{row.seconds_p10 * 1e6:,.1f} – {row.seconds_p90 * 1e6:,.1f}"
    algorithm, bus = ("" if value is None else f"{value:.3f}" for value in (row.algorithm_bandwidth, row.bus_bandwidth))
    return (
        f"{row.operation:<18} {size_name(row.bytes) if row.bytes else '':>9} {row.iterations:>5} "
        f"{row.seconds * 1e6:>11,.1f} {spread:>23} {algorithm:>10} {bus:>9}  {'ok' if row.correct else 'WRONG'}"
    )


def missing_line(missing: Missing) -> str:
    """A row of the table for an operation without a figure."""
    return f"{missing.operation:<18} {missing.reason}"


def pairs_table(pairs: Pairs) -> Iterator[str]:
    """The matrix, with a * at each slow pair."""
    slow = set(pairs.slow())
    n = len(pairs.bandwidth)
    yield f"GB/s from one rank (row) to another (column), {size_name(pairs.bytes)} messages, one pair at a time"
    yield " " * 8 + "".join(f"{target:>8} " for target in range(n))
    for source, row in enumerate(pairs.bandwidth):
        yield f"{source:>7} " + "".join(
            f"{'-':>8} " if source == target else f"{value:>8.3f}{'*' if (source, target) in slow else ' '}"
            for target, value in enumerate(row)
        )


def verdict(rows: list[Row], missing: list[Missing], pairs: Pairs | None, hosts: list[str]) -> Iterator[str]:
    """What to know before a training run; lines that begin with WRONG or SLOW should stop one."""
    messages = [row for row in rows if row.bus_bandwidth is not None]
    if messages:
        smallest = [row for row in messages if row.bytes <= 1.5 * min(row.bytes for row in messages)]
        latencies = sorted(smallest, key=lambda row: row.seconds)
        yield (
            f"latency of {size_name(latencies[0].bytes)} bytes: from {latencies[0].seconds * 1e6:,.1f} µs "
            f"({latencies[0].operation}) to {latencies[-1].seconds * 1e6:,.1f} µs ({latencies[-1].operation})"
        )
        best = max(messages, key=lambda row: row.bus_bandwidth or 0.0)
        yield f"greatest bus bandwidth: {best.bus_bandwidth:.3f} GB/s ({best.operation} of {size_name(best.bytes)})"
    library = {row.bytes: row.seconds for row in rows if row.operation == "all_reduce_sum"}
    both = [
        (row.bytes, library[row.bytes] / row.seconds)
        for row in rows
        if row.operation == "ring_all_reduce" and row.bytes in library
    ]
    if both:
        size, ratio = both[-1]
        yield f"our ring against the backend's all_reduce, both of {size_name(size)}: {ratio:.2f} times its speed"
    if pairs:
        values = pairs.all()
        yield (
            f"pairs: {min(values):.3f} to {max(values):.3f} GB/s, median {median(values):.3f}; "
            + (f"{len(pairs.slow())} below half of it" if pairs.slow() else "none below half of it")
        )
        for rank in pairs.slow_ranks():
            yield f"SLOW: rank {rank} on {hosts[rank]}, in most of its pairs"
        for source, target in pairs.slow():
            if not {source, target} & set(pairs.slow_ranks()):
                yield (
                    f"SLOW: rank {source} on {hosts[source]} to rank {target} on {hosts[target]}: "
                    f"{pairs.bandwidth[source][target]:.3f} GB/s"
                )
    if missing:
        yield f"without a figure, see the table: {', '.join(dict.fromkeys(one.operation for one in missing))}"
    wrong = [f"{row.operation} of {size_name(row.bytes)}" for row in rows if not row.correct]
    if rows:
        yield f"WRONG results: {', '.join(wrong)}" if wrong else f"every result was right ({len(rows)})"


def plot(rows: list[Row], path: Path, title: str) -> str:
    """Draw bus bandwidth over size into `path`; returns a line that says where the plot is, or why there is none."""
    try:
        logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports its font cache, which is no news of ours
        from matplotlib.figure import Figure
    except ImportError:
        return f"no plot: matplotlib is not installed; {path.with_suffix('.json').name} has the figures"

    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    drawn = {
        row.operation: [other for other in rows if other.operation == row.operation]
        for row in rows
        if row.bus_bandwidth
    }
    for number, (operation, points) in enumerate(drawn.items()):
        axes.plot(
            [row.bytes for row in points],
            [row.bus_bandwidth or 0.0 for row in points],
            label=operation,
            color=f"C{number % 10}",
            marker="osD^"[number // 5 % 4],
            markersize=4,
            linewidth=1.2,
            linestyle="-" if number < 10 else "--",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row.bytes for points in drawn.values() for row in points if row.bytes & (row.bytes - 1) == 0})
    if ticks:
        axes.set_xticks(ticks, [size_name(tick) for tick in ticks])
    axes.set_xlabel("bytes")
    axes.set_ylabel("bus bandwidth (GB/s)")
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if drawn:
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path)
    return f"plot: {path}"
