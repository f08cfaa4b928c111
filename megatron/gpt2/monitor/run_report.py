"""report.html: a run on one page that loads nothing else, made from the files of its save folder.

The curves are from `metrics.jsonl`, the texts from `samples.jsonl`, starts, warnings and ends from `history.jsonl`,
settings and environment from `config.json`. Where a file is missing, its part of the page is empty.
"""

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from html import escape
from pathlib import Path
from typing import Any

from data_utils.files import errors_of, parse_object, replace_text
from megatron.gpt2.config import Config, by_key, differing_flags, flag, require
from megatron.gpt2.monitor.html_page import cell, pairs, remark, scrolling, whole_page
from megatron.gpt2.monitor.plots import points, read_records
from megatron.gpt2.monitor.svg_chart import Curve, chart, number

METRICS, SAMPLES, HISTORY, REPORT = "metrics.jsonl", "samples.jsonl", "history.jsonl", "report.html"
MOST_SAMPLES, MOST_EVENTS = 40, 200  # on the page
TRAINED = {"iteration", "consumed_samples", "ms_per_iteration", "tokens_per_second"}  # in every record of training
GREATEST = 1e15  # numbers that are not below it are damaged

Records = list[dict[str, Any]]


def write_report(folder: str | Path) -> Path:
    """Make `folder`/report.html; returns its path.

    Raises OSError where it cannot be written, and ValueError where config.json is not of this project.
    """
    path = Path(folder) / REPORT
    replace_text(path, page(Path(folder)))
    return path


def page(folder: Path) -> str:
    """The whole page as HTML, of the run that saves in `folder`. ValueError where config.json is not of this
    project."""
    metrics = [record for record in read_records(folder / METRICS) if _is_of_numbers(record)]
    samples, history = (
        [record for record in read_records(folder / name) if "text" in record] for name in (SAMPLES, HISTORY)
    )
    settings, config = _settings(folder / "config.json")
    trained = [
        record for record in metrics if "split" not in record and all(record.get(key) is not None for key in TRAINED)
    ]
    title = folder.resolve().name
    parts = [
        f"<header><h1>{escape(title)}</h1>{status(history)}</header>",
        figures(metrics, trained, settings, config),
        f'<h2>Curves</h2><div class="charts">{"".join(charts(metrics))}</div>',
        "<h2>Samples</h2>",
        sample_table(samples),
        "<h2>Warnings, starts and ends</h2>",
        history_table(history),
        "<h2>Settings</h2>",
        settings_tables(settings, config),
        "<h2>Environment</h2>",
        environment_table(settings),
    ]
    return whole_page(title, parts)


def _is_of_numbers(record: Mapping[str, Any]) -> bool:
    """Whether a record of metrics has numbers alone that can be drawn, as every one that is not damaged."""
    return all(
        value is None or isinstance(value, int | float) and abs(value) < GREATEST
        for name, value in record.items()
        if name != "split"
    )


def _settings(path: Path) -> tuple[dict[str, Any], Config]:
    """The content of config.json, and the flags in it. ValueError, which names the file, where it is damaged."""
    if not path.exists():
        return {}, Config()
    with errors_of(path):
        settings = parse_object(path.read_bytes())
        require(isinstance(settings.get("train_iters", 0), int), "its train_iters are no number")
        require(isinstance(settings.get("environment", {}), dict), "its environment is no object")
        return settings, Config.from_dict(settings.get("config", {}))


def status(history: Records) -> str:
    """The last event of the run, and when the page was written."""
    last = str(history[-1]["text"]) if history else "no start is on record"
    return (
        f'<p class="status">{escape(last)}<br>this page was written on '
        f"{datetime.now().astimezone():%Y-%m-%d at %H:%M:%S %Z}</p>"
    )


def figures(metrics: Records, trained: Records, settings: Mapping[str, Any], config: Config) -> str:
    """The numbers that a reader looks for first."""
    if not trained:
        return remark("no iteration was logged yet")
    last = trained[-1]
    rows = [
        ("iteration", f"{last['iteration']:,}", f"of {settings['train_iters']:,}" if "train_iters" in settings else ""),
        ("training loss", _or_dash(last.get("lm_loss")), "nats per token"),
    ]
    evaluated = [r for r in metrics if r.get("split") == "valid" and r.get("lm_loss") is not None]
    if evaluated:
        best = min(evaluated, key=lambda record: record["lm_loss"])
        bits = f", {best['bits_per_byte']:.3f} bits per byte" if best.get("bits_per_byte") else ""
        rows.append(("lowest validation loss", _or_dash(best["lm_loss"]), f"at {best['iteration']:,}{bits}"))
    rows.append(("tokens", _in_words(last["consumed_samples"] * config.data.seq_length), "read in training"))
    seconds, before = 0.0, 0
    for record in trained:
        seconds += (record["iteration"] - before) * record["ms_per_iteration"] / 1000
        before = record["iteration"]
    rows.append(("training time", str(timedelta(seconds=round(seconds))), "without evaluations and saves"))
    mfu = f"MFU {last['mfu']:.1%}" if last.get("mfu") else ""
    rows.append(("tokens a second", f"{last['tokens_per_second']:,.0f}", mfu))
    if last.get("memory_bytes"):
        rows.append(("peak memory", f"{last['memory_bytes'] / 2**30:.2f} GiB", "of rank 0"))
    return (
        '<dl class="figures">'
        + "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><span>{escape(more)}</span></div>"
            for name, value, more in rows
        )
        + "</dl>"
    )


def charts(metrics: Records) -> list[str]:
    """The curves of the loss, the learning rate, the gradient norm, the speed and the memory over the iterations."""
    loss = [
        Curve("training", "blue", points(metrics, "lm_loss")),
        Curve("validation", "orange", points(metrics, "lm_loss", "valid"), dots=True),
    ]
    others = {
        "learning rate": points(metrics, "learning_rate"),
        "gradient norm, before clipping": points(metrics, "grad_norm"),
        "tokens a second, all ranks": points(metrics, "tokens_per_second"),
        "peak memory of rank 0, GiB": [(x, y / 2**30) for x, y in points(metrics, "memory_bytes")],
    }
    return [
        chart("loss, nats per token", loss, width=970, height=330),
        *(
            chart(title, [Curve("", "green", curve)], width=480, height=210, from_zero=True)
            for title, curve in others.items()
        ),
    ]


def sample_table(samples: Records) -> str:
    """The texts that the model wrote at its evaluations; MOST_SAMPLES of them at most."""
    if not samples:
        return remark("none yet: each evaluation writes one")
    shown = spread(samples, MOST_SAMPLES)
    rows = [cell(f"{s['iteration']:,}", "number") + cell(s["text"], "sample") for s in shown]
    left_out = remark(f"{len(shown)} of {len(samples)}: all are in {SAMPLES}") if len(shown) < len(samples) else ""
    return (
        remark("what the model writes after the words in brackets, by the same random numbers each time")
        + scrolling(("iteration", "text"), rows)
        + left_out
    )


def history_table(history: Records) -> str:
    """Warnings, starts and ends with their time and iteration; the last MOST_EVENTS of them."""
    if not history:
        return remark("none is on record")
    rows = [
        cell(event.get("time", ""))
        + cell(f"{event['iteration']:,}", "number")
        + cell(event["text"], "alarm" if str(event["text"]).startswith("WARNING") else "")
        for event in history[-MOST_EVENTS:]
    ]
    return scrolling(("time", "iteration", ""), rows)


def settings_tables(settings: Mapping[str, Any], config: Config) -> str:
    """The flags that differ from their defaults, and below them all flags."""
    if "config" not in settings:
        return remark("config.json is missing")
    every = [(flag(key), value) for key, value in by_key(config.as_dict()).items()]
    return (
        remark("flags that differ from their defaults")
        + pairs(differing_flags(config))
        + f"<details><summary>all {len(every)} flags</summary>{pairs(every)}</details>"
    )


def environment_table(settings: Mapping[str, Any]) -> str:
    """Versions, devices, hosts and the commit of the source."""
    environment = settings.get("environment")
    return pairs(list(environment.items())) if environment else remark("not on record")


def spread(records: Records, most: int) -> Records:
    """At most `most` of the records, evenly from the first to the last."""
    if len(records) <= most:
        return records
    return [records[round(i * (len(records) - 1) / (most - 1))] for i in range(most)]


def _or_dash(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else number(value)


def _in_words(count: int) -> str:
    for size, name in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:,}"
