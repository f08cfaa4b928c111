"""Functions for all benchmarks: flags, the common fields of results, JSON files from which an interrupted benchmark
continues, programs with a timeout, ranks, timing, tables and plots."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from data_utils.command_line import align_columns

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
T = TypeVar("T")
OURS, PEER = "#3568a8", "#b8b8b8"  # colours of bars: our programs, other programs
WARM_UP = 3  # `milliseconds` makes 3 untimed calls before it measures.
GRACE = 3.0  # seconds that a program has after SIGTERM to end its own processes


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser with --output and --smoke."""
    parser = argparse.ArgumentParser(
        description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", metavar="DIR", type=Path, help="folder of the results (default: benchmarks/results)"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes on the CPU, to check the script; needs --output"
    )
    return parser


def parse_args(made: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags. A smoke run must give a folder, because its figures are not results."""
    args = made.parse_args(argv)
    if args.smoke and not args.output:
        made.error("--smoke needs --output DIR, because its figures are not results")
    args.output = args.output or RESULTS
    return args


# --- results -------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str | None]:
    """Return the versions of Python, torch, CUDA and transformers. The version of a missing library is None."""
    found: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {"cuda": torch.version.cuda, "transformers": None}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["transformers"] = metadata.version("transformers")
    return found


def git_commit(folder: Path | str = ROOT) -> str | None:
    """Return the short commit of `folder`, with + if tracked files differ from it. Outside git the result is None."""
    git = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        run = subprocess.run(git, cwd=folder, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None


def header(what: str) -> dict[str, Any]:
    """Return the head of a result: its name, date, machine, versions and commit."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else []
    return {
        "what": what,
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "machine": {
            "cpu": names[0] if names else platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        },
        "versions": versions(),
        "commit": git_commit(),
    }


def machine_line(result: Mapping[str, Any]) -> str:
    """Describe machine, torch and date of a result in one line."""
    found = result["machine"]
    name = found["gpu"] or found["cpu"]
    return f"{name}, {found['cores']} cores, torch {result['versions']['torch']}, {result['date'][:10]}"


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write `result` as JSON into a new file that then replaces `path`, so that a timeout leaves the last complete
    file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".json.part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def load_earlier(path: Path, result: Mapping[str, Any], *keys: str) -> dict[str, Any] | None:
    """Return the result of an interrupted benchmark if its GPU, versions and `keys` equal those of `result`. Otherwise
    rename the file to `*.other.json` and return None."""
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    now = json.loads(json.dumps(result))
    same = all(found.get(key) == now[key] for key in ("versions", *keys))
    if same and found["machine"]["gpu"] == now["machine"]["gpu"]:
        return found
    aside = path.with_suffix(".other.json")
    path.replace(aside)
    print(f"{path.name} has a different machine, versions or workload: it is {aside.name} now")
    return None


# --- programs and ranks ----------------------------------------------------------------------------------------------


def run_limited(
    command: Sequence[Any], log: Path | None, timeout: float, *, environment: Mapping[str, str] | None = None
) -> int | None:
    """Run `command` in the project's folder and return its exit code, or None if it was killed after `timeout` seconds,
    with all its processes.

    log: file for the program's output (default: the output of this process).
    """
    with contextlib.nullcontext() if log is None else log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=None if file is None else subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **(environment or {}), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:  # Python runs this block also after a SIGTERM that raises SystemExit.
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
            with contextlib.suppress(ProcessLookupError):
                # SIGKILL to the process group also ends the compilers that the program has started.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def last_line(text: str) -> str:
    """Return at most 400 characters of the last line of `text` that is not blank, without the folders of absolute
    paths."""
    lines = [line for line in text.splitlines() if line.strip()]
    return strip_paths(lines[-1] if lines else "")[:400]


def strip_paths(text: str) -> str:
    """Replace each absolute path in `text` by its last part, because results should not depend on folders."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/'\":]+/)*([^\s/'\":]+)", r"\1", text)


def _rank(rank: int, world_size: int, folder: str, results: Any, fn: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=1200),
    )
    results.put((rank, fn(rank, world_size, *args)))
    dist.barrier()


def run_on_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run `fn(rank, world_size, *args)` in processes with one thread and a gloo group. Return the result of each
    rank."""
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (world_size, folder, results, fn, *args), world_size)
    found = dict(results.get() for _ in range(world_size))
    return [found[rank] for rank in range(world_size)]


# --- figures ---------------------------------------------------------------------------------------------------------


def call_seconds(work: Callable[[], Any], device: torch.device, count: int) -> list[float]:
    """Call `work` `count` times and return the seconds of each call. On a GPU, the host waits only after the last
    call."""
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.synchronize(device)
        return [a.elapsed_time(b) / 1000 for a, b in zip(events, events[1:], strict=False)]
    marks = [time.perf_counter()]
    for _ in range(count):
        work()
        marks.append(time.perf_counter())
    return [b - a for a, b in zip(marks, marks[1:], strict=False)]


def milliseconds(work: Callable[[], Any], device: torch.device, count: int) -> float:
    """Return the median time of `count` calls of `work` in milliseconds, after `WARM_UP` untimed calls."""
    for _ in range(WARM_UP):
        work()
    return 1000 * sorted(call_seconds(work, device, count))[count // 2]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the number of `values`, their median, and their 10th and 90th percentile (with linear interpolation)."""
    p10, median, p90 = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.1, 0.5, 0.9]).double())
    return {"median": median.item(), "p10": p10.item(), "p90": p90.item(), "n": len(values)}


def alternate(works: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Call each function of `works` once in each round, in an order that is mirrored from round to round (A B B A).
    Return the results by name."""
    found: dict[str, list[T]] = {name: [] for name in works}
    for number in range(rounds):
        for name in list(works)[:: -1 if number % 2 else 1]:
            found[name].append(works[name]())
    return found


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the ratios `above` / `below` of all rounds."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format columns. Align the first column left, and the other columns right."""
    return "\n".join(align_columns([head, *rows], "<" + ">" * (len(head) - 1)))


def plot_bars(path: Path, title: str, panels: Sequence[tuple[str, Sequence[tuple[str, float, float, float]]]]) -> str:
    """Draw panels of horizontal bars next to each other. A panel is (label of the axis, [(name, value, low, high)]);
    the error bar of a value reaches from low to high. Return a line with the name of the file."""
    from matplotlib.figure import Figure

    rows = max((len(bars) for _, bars in panels), default=1)
    figure = Figure(figsize=(5.5 * len(panels), 1.2 + 0.42 * rows), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=10)
    for axes, (label, bars) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        names, values, lows, highs = zip(*bars, strict=True)
        errors = [[v - low for v, low in zip(values, lows, strict=True)]]
        errors += [[high - v for v, high in zip(values, highs, strict=True)]]
        colours = [OURS if name.startswith("ours") else PEER for name in names]
        axes.barh(range(len(bars)), values, xerr=errors, height=0.6, capsize=2, ecolor="#404040", color=colours)
        axes.set_yticks(range(len(bars)), [f"{n}   {v:,.4g}" for n, v in zip(names, values, strict=True)], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(label, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    return f"wrote {path.name}"
