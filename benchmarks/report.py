"""What every benchmark reports alike: the machine, JSON after every step, a table that lines up, a plot."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OURS, PEER = "#3568a8", "#b8b8b8"


def machine() -> dict[str, Any]:
    """Processor, cores and GPU that the figures are measured on."""
    import torch

    path = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", path.read_text(), re.MULTILINE) if path.exists() else []
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str | None]:
    """Python, torch and its CUDA, transformers; None for what is absent."""
    import torch

    try:
        transformers: str | None = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        transformers = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers,
    }


def commit(folder: Path | str = ROOT) -> str | None:
    """The short commit that `folder` is at, with + where tracked files differ from it; None outside git."""

    def git(*words: str) -> str | None:
        try:
            run = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    name = git("rev-parse", "--short", "HEAD")
    return name and name + "+" * bool(git("status", "--porcelain", "--untracked-files=no"))


def machine_line(result: Mapping[str, Any]) -> str:
    """Machine, torch and date of a result in a few words."""
    found = result["machine"]
    return (
        f"{found['gpu'] or found['cpu']}, {found['cores']} cores, torch {result['versions']['torch']}, "
        f"{result['date'][:10]}"
    )


def header(what: str) -> dict[str, Any]:
    """The head of every result: what was measured, when, on what, of which state of the code."""
    return {
        "what": what,
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }


def earlier(path: Path, result: Mapping[str, Any], *keys: str) -> dict[str, Any] | None:
    """What an interrupted call left in the file, if it was of the same GPU, versions and `keys` as `result`. A file of
    another machine or other versions is put aside as `*.other.json`, and None is returned."""
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    now = json.loads(json.dumps(result))
    if found["machine"]["gpu"] == now["machine"]["gpu"] and all(
        found.get(key) == now[key] for key in ("versions", *keys)
    ):
        return found
    aside = path.with_suffix(".other.json")
    path.replace(aside)
    print(
        f"{path.name} is of another machine, of other versions or of another problem: it is {aside.name} now",
        flush=True,
    )
    return None


def last_line(text: str) -> str:
    """The last line that has words, without absolute paths, 400 characters at most."""
    lines = [line for line in text.splitlines() if line.strip()]
    return without_paths(lines[-1] if lines else "")[:400]


def without_paths(text: str) -> str:
    """`text` with every absolute path cut down to its last part: where a file lies is this machine's affair."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/'\":]+/)*([^\s/'\":]+)", r"\1", text)


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Replace the file whole: a time-out leaves the last complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".json.part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile (linear between neighbours) of at least one value."""
    ordered = sorted(values)

    def percentile(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return {"median": statistics.median(ordered), "p10": percentile(0.1), "p90": percentile(0.9), "n": len(ordered)}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *map(line, rows)])


def plot(path: Path, title: str, panels: Sequence[tuple[str, Sequence[tuple[str, float, float, float]]]]) -> str:
    """Horizontal bars, one panel beside the other: (label of the axis, [(arm, value, low, high)]); low and high are the
    ends of the error bar. Returns a line that says what was written, or that matplotlib is absent."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return f"no plot: matplotlib is not installed ({path.name} was not written)"
    rows = max((len(bars) for _, bars in panels), default=1)
    figure = Figure(figsize=(5.5 * len(panels), 1.2 + 0.42 * rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    for axes, (label, bars) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        names = [name for name, *_ in bars]
        values = [value for _, value, _, _ in bars]
        errors = [[value - low for _, value, low, _ in bars], [high - value for _, value, _, high in bars]]
        axes.barh(
            range(len(bars)),
            values,
            xerr=errors if any(map(any, errors)) else None,
            height=0.6,
            capsize=2,
            ecolor="#404040",
            color=[OURS if name.startswith("ours") else PEER for name in names],
        )
        axes.set_yticks(range(len(bars)), [f"{name}   {value:,.4g}" for name, value, _, _ in bars], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(label, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    return f"wrote {path.name}"
