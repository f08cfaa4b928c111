"""Write report.html: a self-contained page about a run, made from the files of its --save folder.

The page shows the curves of `metrics.jsonl`, the texts of `samples.jsonl`, the events of `history.jsonl` and the
settings of `config.json`. If a file is missing, its part of the page is empty.
"""

import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from data_utils.command_line import require
from data_utils.files import MAX_CONFIG_BYTES, atomic_write_text, read_json_object, wrap_errors
from megatron.gpt2.config import Config, flag_name, flatten_sections, non_default_values
from megatron.gpt2.monitor.incidents import read_records
from megatron.gpt2.monitor.plots import GREEN, Curve, as_svg, curve_points, loss_curves

METRICS, SAMPLES, HISTORY, REPORT = "metrics.jsonl", "samples.jsonl", "history.jsonl", "report.html"
MOST_SAMPLES = 40  # The page shows at most this number of text samples.
MAX_NUMBER = 1e15  # A record of metrics.jsonl with a larger number is damaged.

Records = list[dict[str, Any]]


def write_report(folder: str | Path) -> Path:
    """Write report.html into `folder` and return its path. Raises OSError if the file cannot be written, and ValueError
    if config.json is damaged.

    folder: the --save folder.
    """
    path = Path(folder) / REPORT
    atomic_write_text(path, render_page(Path(folder)))
    return path


def render_page(folder: Path) -> str:
    """Return the page about a run as HTML. Raises ValueError if config.json is damaged.

    folder: the --save folder.
    """
    import jinja2

    metrics = [record for record in read_records(folder / METRICS) if _has_valid_numbers(record)]
    samples, history = (
        [record for record in read_records(folder / name) if isinstance(record.get("text"), str)]
        for name in (SAMPLES, HISTORY)
    )
    settings, config = _settings(folder / "config.json")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    curves, no_curves = _render_curves(metrics)
    every = -(-len(samples) // MOST_SAMPLES) or 1
    return environment.get_template("report.html").render(
        title=folder.resolve().name,
        now=f"{datetime.now().astimezone():%Y-%m-%d at %H:%M:%S %Z}",
        figures=summary_rows(metrics, settings),
        curves=curves,
        no_curves=no_curves,
        samples=samples,
        shown=samples[::-every][::-1],  # including the last sample
        history=history,
        differing=[(flag_name(key), value) for key, value in non_default_values(config).items()],
        flags=[(flag_name(key), value) for key, value in flatten_sections(config.as_dict()).items()]
        if "config" in settings
        else [],
        environment=settings.get("environment"),
    )


def _has_valid_numbers(record: Mapping[str, Any]) -> bool:
    """Return whether all values of a record of metrics can be plotted. A damaged record may have a huge number."""
    return all(
        value is None or isinstance(value, int | float) and abs(value) < MAX_NUMBER
        for name, value in record.items()
        if name != "split"
    )


def _settings(path: Path) -> tuple[dict[str, Any], Config]:
    """Return the content of config.json, and the `Config` that it describes. Raises ValueError, which names the file,
    if the file is damaged."""
    if not path.exists():
        return {}, Config()
    settings = read_json_object(path, MAX_CONFIG_BYTES)
    with wrap_errors(path):
        require(isinstance(settings.get("train_iters", 0), int), "its train_iters is not a number")
        require(isinstance(settings.get("environment", {}), dict), "its environment is not an object")
        return settings, Config.from_dict(settings.get("config", {}))


def summary_rows(metrics: Records, settings: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the most important numbers of a run as (name, value, remark), or [] before the first log line."""
    trained = [record for record in metrics if "split" not in record]
    if not trained:
        return []
    last = trained[-1]
    evaluated = [r for r in metrics if r.get("split") == "valid" and r.get("lm_loss") is not None]
    best = min(evaluated, key=lambda record: record["lm_loss"], default={})
    bits = f", {best['bits_per_byte']:.3f} bits per byte" if best.get("bits_per_byte") else ""
    rows = [
        ("iteration", f"{last['iteration']:,}", f"of {settings['train_iters']:,}" if "train_iters" in settings else ""),
        ("training loss", _format_loss(last), "nats per token"),
        ("lowest validation loss", _format_loss(best), f"at {best.get('iteration', 0):,}{bits}"),
    ]
    return [row for row in rows if row[1]]


def _format_loss(record: Mapping[str, Any]) -> str:
    """Format the loss of a record. The result is "" without a record, and a dash if the loss is not finite."""
    value = record.get("lm_loss")
    return f"{value:.4g}" if value is not None and math.isfinite(value) else "–" * bool(record)


def _render_curves(metrics: Records) -> tuple[str, str]:
    """Return (the curves as SVG, ""), or ("", the reason why there are no curves)."""
    others = {
        "learning rate": curve_points(metrics, "learning_rate"),
        "gradient norm, before clipping": curve_points(metrics, "grad_norm"),
        "tokens a second, all ranks": curve_points(metrics, "tokens_per_second"),
        "peak memory of rank 0, GiB": [(x, y / 2**30) for x, y in curve_points(metrics, "memory_bytes")],
    }
    for task in sorted({record["split"] for record in metrics if "accuracy" in record}):
        others[f"accuracy: {task}"] = curve_points(metrics, "accuracy", task)
    losses = loss_curves(metrics)
    if sum(len(curve.points) for curve in losses) < 2:
        return "", "no numbers yet"
    drawn = {title: [Curve("", GREEN, curve)] for title, curve in others.items() if curve}
    try:
        return as_svg({"loss, nats per token": losses, **drawn}), ""
    except ImportError:
        return "", "pip install matplotlib to see them"
