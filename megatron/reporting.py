"""What a person sees of a run, and the records that stay behind: tables, log lines in Megatron's form,
metrics.jsonl, TensorBoard, the progress bar and the closing report.

The functions make text out of values; `RunLog` alone writes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron.plots import loss_curve, read_metrics

WIDTH = 100  # of the rules around tables and evaluations


@dataclass(frozen=True)
class IterationRecord:
    """One logged iteration; means are over the iterations since the last log."""

    iteration: int
    consumed_samples: int
    lm_loss: float              # nats per token, mean
    learning_rate: float
    loss_scale: float
    grad_norm: float            # before clipping
    ms_per_iteration: float     # mean
    tokens_per_second: float    # of all ranks together
    mfu: float | None           # fraction of the devices' peak; None where the peak is not known

    def metrics(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class EvaluationRecord:
    """The loss of one split ("valid" or "test") at one iteration."""

    iteration: int
    split: str
    lm_loss: float              # nats per token
    bits_per_byte: float | None = None

    @property
    def ppl(self) -> float:
        return math.exp(self.lm_loss) if self.lm_loss < 700 else math.inf  # exp overflows a float at 710

    def metrics(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "ppl": self.ppl}


def aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    """`name   value` lines with the values under one another."""
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:<{width}}  {value}" for name, value in rows]


def start_table(rows: Sequence[tuple[str, str]], flags: Sequence[tuple[str, str]]) -> str:
    """The table at the start of a run: its facts, then every flag that differs from its default."""
    lines = ["-" * WIDTH, *aligned(rows), "-" * WIDTH]
    if flags:
        lines += ["  flags that differ from their defaults:", *aligned(flags), "-" * WIDTH]
    return "\n".join(lines)


def iteration_line(record: IterationRecord, *, train_iters: int, seconds_to_go: float, skipped: int = 0) -> str:
    """Megatron's line of one logged iteration; `skipped` counts steps since the last log that overflowed."""
    parts = [
        f"iteration {record.iteration:8d}/{train_iters:8d}",
        f"elapsed time per iteration (ms): {record.ms_per_iteration:.1f}",
        f"learning rate: {record.learning_rate:.3E}",
        f"lm loss: {record.lm_loss:.6E}",
        f"loss scale: {record.loss_scale:.1f}",
        f"grad norm: {record.grad_norm:.3f}",
        f"tokens/s: {record.tokens_per_second:,.0f}",
    ]
    if record.mfu is not None:
        parts.append(f"MFU: {record.mfu:.1%}")
    parts.append(f"time to go: {timedelta(seconds=round(seconds_to_go))}")
    if skipped:
        parts.append(f"number of skipped iterations: {skipped}")
    return " | ".join(parts) + " |"


def evaluation_line(record: EvaluationRecord, *, final: bool = False) -> str:
    """Megatron's framed line of an evaluation; `final` is the one at the end of training."""
    data = {"valid": "val"}.get(record.split, record.split)
    where = f"the end of training for {data} data" if final else f"iteration {record.iteration}"
    line = f"validation loss at {where} | LM loss: {record.lm_loss:.6E} | LM PPL: {record.ppl:.6E}"
    if record.bits_per_byte is not None:
        line += f" | bits per byte: {record.bits_per_byte:.4f}"
    frame = "-" * len(line)
    return f"{frame}\n{line}\n{frame}"


def memory_line(device: torch.device) -> str:
    """This rank's memory in MB (2^20 bytes): the allocator's on a GPU, the process's resident set on a CPU."""
    if device.type == "cuda":
        sizes = {"allocated": torch.cuda.memory_allocated(device),
                 "max allocated": torch.cuda.max_memory_allocated(device),
                 "reserved": torch.cuda.memory_reserved(device)}
    else:
        sizes = resident_memory()
    return " | ".join(["memory (MB)", *(f"{name}: {size / 2**20:,.1f}" for name, size in sizes.items())])


def resident_memory() -> dict[str, int]:
    """Bytes of the resident set, now and at its peak, as far as the system tells."""
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if line.startswith("Vm"))
        return {"resident": 1024 * int(fields["VmRSS"].split()[0]),
                "peak resident": 1024 * int(fields["VmHWM"].split()[0])}
    import resource  # not on Windows, hence here

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak resident": peak if sys.platform == "darwin" else 1024 * peak}  # macOS counts bytes


def closing_report(*, bits_per_byte: float | None, baselines: Mapping[str, float | None], sample: str,
                   checkpoint: str | Path, plot: str, next_commands: Sequence[tuple[str, str]]) -> str:
    """The end of a run: the model beside its baselines, a sample, where things are and what to run next.

    `baselines` maps a description to bits per byte (None: not computed); `plot` is the path of the PNG or a
    text curve; `next_commands` are (what it does, command).
    """
    def figure(value: float | None) -> str:
        return "not computed" if value is None else f"{value:.3f}"

    scores = [("this model", figure(bits_per_byte)), *((name, figure(value)) for name, value in baselines.items())]
    lines = ["-" * WIDTH, "validation, bits per byte (less is better):", *aligned(scores),
             "", "a sample of the model's text:", *("  " + line for line in sample.splitlines()), ""]
    paths = [("checkpoint", str(checkpoint))]
    if "\n" in plot:
        lines += [*plot.splitlines(), ""]
    else:
        paths.append(("loss curve", plot))
    lines += [*aligned(paths), "", "next:"]
    for what, command in next_commands:
        lines += [f"  # {what}", f"  {command}"]
    return "\n".join([*lines, "-" * WIDTH])


class RunLog:
    """Prints the lines of a run and keeps its metrics.jsonl, TensorBoard events and loss curve.

    Only the `active` rank writes; on the others every method does nothing. Records of metrics.jsonl beyond
    `start_iteration` belong to steps that are about to be done again, and are dropped; those of another run are
    set aside where this one starts from 0.

    Raises ValueError on every rank alike where TensorBoard is asked for and not installed.
    """

    def __init__(self, save_directory: str | Path, *, train_iters: int, start_iteration: int = 0,
                 tensorboard_dir: str | None = None, active: bool = True) -> None:
        if tensorboard_dir is not None and importlib.util.find_spec("tensorboard") is None:
            raise ValueError("--tensorboard-dir needs TensorBoard: pip install 'gpt2-model-parallel[log]'")
        self.active = active
        self.directory = Path(save_directory)
        self.metrics_path = self.directory / "metrics.jsonl"
        self.progress: Any = None  # a tqdm bar, on a terminal
        self._tensorboard: Any = None
        if not active:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        keep_records_until(self.metrics_path, start_iteration)
        self._metrics = self.metrics_path.open("a", encoding="utf-8")
        if tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(tensorboard_dir, purge_step=start_iteration + 1)
        self.progress = progress_bar(train_iters, start_iteration)

    def say(self, text: str) -> None:
        """Print a line, above the progress bar where there is one."""
        if not self.active:
            return
        if self.progress is not None:
            self.progress.write(text, file=sys.stdout)
        else:
            print(text)
        sys.stdout.flush()

    def step(self) -> None:
        """One iteration is done: move the progress bar."""
        if self.progress is not None:
            self.progress.update()

    def record(self, record: IterationRecord | EvaluationRecord) -> None:
        """Keep a record in metrics.jsonl and TensorBoard."""
        if not self.active:
            return
        metrics = {key: None if isinstance(value, float) and not math.isfinite(value) else value
                   for key, value in record.metrics().items()}  # JSON has no NaN
        self._metrics.write(json.dumps(metrics, allow_nan=False) + "\n")
        self._metrics.flush()
        if self._tensorboard is not None:
            prefix = f"{metrics.pop('split')}/" if "split" in metrics else ""
            for key, value in metrics.items():
                if key != "iteration" and value is not None:
                    self._tensorboard.add_scalar(prefix + key, value, record.iteration)

    def close(self, title: str = "GPT-2") -> str:
        """Close the files and draw the loss curve: its path, or the curve as text without matplotlib."""
        if not self.active:
            return ""
        if self.progress is not None:
            self.progress.close()
            self.progress = None
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._metrics.close()
        png = self.directory / "loss.png"
        return loss_curve(self.metrics_path, png, title) or str(png)


def keep_records_until(path: Path, iteration: int) -> None:
    """Drop the records beyond `iteration`, by an atomic replacement: a crash leaves the old file or the new one.

    A run that starts from 0 continues nothing: the records of another run in the same folder are set aside.
    """
    records = read_metrics(path) if path.exists() else []
    if records and iteration == 0:
        aside = next(name for n in itertools.count(1) if not (name := path.with_name(f"{path.name}.old-{n}")).exists())
        os.replace(path, aside)
    elif records:
        new = path.with_name(path.name + ".tmp")
        with new.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records if record["iteration"] <= iteration)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)


def progress_bar(train_iters: int, start_iteration: int) -> Any:
    """A tqdm bar on standard error, or None where that is no terminal or tqdm is not installed."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=train_iters, initial=start_iteration, unit="it", dynamic_ncols=True, leave=False)
