"""report.html: a run on one page that loads nothing else, made from the files of its save folder.

The curves are from `metrics.jsonl`, the texts from `samples.jsonl`, starts, warnings and ends from `history.jsonl`,
settings and environment from `config.json`. If a file is missing, its part of the page is empty.
"""

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.files import errors_of, parse_object, replace_text
from megatron.gpt2.config import Config, by_key, differing, flag, require
from megatron.gpt2.monitor.incidents import read_records
from megatron.gpt2.monitor.plots import GREEN, Curve, as_svg, loss_curves, points

METRICS, SAMPLES, HISTORY, REPORT = "metrics.jsonl", "samples.jsonl", "history.jsonl", "report.html"
MOST_SAMPLES = 40  # on the page
TRAINED = {"iteration", "consumed_samples", "ms_per_iteration", "tokens_per_second"}  # in every record of training
GREATEST = 1e15  # numbers that are not below it are damaged

Records = list[dict[str, Any]]


def write_report(folder: str | Path) -> Path:
    """Make `folder`/report.html; returns its path.

    Raises OSError if it cannot be written, and ValueError if config.json is not of this project.
    """
    path = Path(folder) / REPORT
    replace_text(path, page(Path(folder)))
    return path


def page(folder: Path) -> str:
    """The whole page as HTML, of the run that saves in `folder`. ValueError if config.json is not of this project."""
    import jinja2

    metrics = [record for record in read_records(folder / METRICS) if _is_of_numbers(record)]
    samples, history = (
        [record for record in read_records(folder / name) if isinstance(record.get("text"), str)]
        for name in (SAMPLES, HISTORY)
    )
    settings, config = _settings(folder / "config.json")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    curves, no_curves = _curves(metrics)
    shown = np.linspace(0, len(samples) - 1, min(len(samples), MOST_SAMPLES)).round().astype(int)
    return environment.get_template("report.html").render(
        title=folder.resolve().name,
        now=f"{datetime.now().astimezone():%Y-%m-%d at %H:%M:%S %Z}",
        figures=figures(metrics, settings, config),
        curves=curves,
        no_curves=no_curves,
        samples=samples,
        shown=[samples[number] for number in shown],
        history=history,
        differing=[(flag(key), value) for key, value in differing(config).items()],
        flags=[(flag(key), value) for key, value in by_key(config.as_dict()).items()] if "config" in settings else [],
        environment=settings.get("environment"),
    )


def _is_of_numbers(record: Mapping[str, Any]) -> bool:
    """Whether a record of metrics only has numbers that can be drawn, as every one that is not damaged."""
    return all(
        value is None or isinstance(value, int | float) and abs(value) < GREATEST
        for name, value in record.items()
        if name != "split"
    )


def _settings(path: Path) -> tuple[dict[str, Any], Config]:
    """The content of config.json, and the flags in it. ValueError, which names the file, if it is damaged."""
    if not path.exists():
        return {}, Config()
    with errors_of(path):
        settings = parse_object(path.read_bytes())
        require(isinstance(settings.get("train_iters", 0), int), "its train_iters is not a number")
        require(isinstance(settings.get("environment", {}), dict), "its environment is not an object")
        return settings, Config.from_dict(settings.get("config", {}))


def figures(metrics: Records, settings: Mapping[str, Any], config: Config) -> list[tuple[str, str, str]]:
    """The numbers that a reader looks for first: name, value and a remark; none before the first log line."""
    trained = [r for r in metrics if "split" not in r and all(r.get(key) is not None for key in TRAINED)]
    if not trained:
        return []
    last, before, seconds = trained[-1], 0, 0.0
    for record in trained:
        seconds += (record["iteration"] - before) * record["ms_per_iteration"] / 1000
        before = record["iteration"]
    evaluated = [r for r in metrics if r.get("split") == "valid" and r.get("lm_loss") is not None]
    best = min(evaluated, key=lambda record: record["lm_loss"], default={})
    at = f"at {best['iteration']:,}" if best else ""
    bits = f", {best['bits_per_byte']:.3f} bits per byte" if best.get("bits_per_byte") else ""
    tokens, memory = last["consumed_samples"] * config.data.seq_length, last.get("memory_bytes")
    rows = [
        ("iteration", f"{last['iteration']:,}", f"of {settings['train_iters']:,}" if "train_iters" in settings else ""),
        ("training loss", _loss(last), "nats per token"),
        ("lowest validation loss", _loss(best), at + bits),
        ("tokens", f"{tokens:,}", "read in training"),
        ("training time", str(timedelta(seconds=round(seconds))), "without evaluations and saves"),
        ("tokens a second", f"{last['tokens_per_second']:,.0f}", f"MFU {last['mfu']:.1%}" if last.get("mfu") else ""),
        ("peak memory", f"{memory / 2**30:.2f} GiB" if memory else "", "of rank 0"),
    ]
    return [row for row in rows if row[1]]


def _loss(record: Mapping[str, Any]) -> str:
    """ "" without a record, a dash without a finite loss."""
    value = record.get("lm_loss")
    return f"{value:.4g}" if value is not None and math.isfinite(value) else "–" * bool(record)


def _curves(metrics: Records) -> tuple[str, str]:
    """The curves over the iterations as SVG, or why there are none."""
    others = {
        "learning rate": points(metrics, "learning_rate"),
        "gradient norm, before clipping": points(metrics, "grad_norm"),
        "tokens a second, all ranks": points(metrics, "tokens_per_second"),
        "peak memory of rank 0, GiB": [(x, y / 2**30) for x, y in points(metrics, "memory_bytes")],
    }
    losses = loss_curves(metrics)
    if sum(len(curve.points) for curve in losses) < 2:
        return "", "no numbers yet"
    drawn = {title: [Curve("", GREEN, curve)] for title, curve in others.items() if curve}
    try:
        return as_svg({"loss, nats per token": losses, **drawn}), ""
    except ImportError:
        return "", "pip install matplotlib to see them"
