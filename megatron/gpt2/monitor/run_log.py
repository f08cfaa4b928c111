"""The log of a run: printed lines, metrics.jsonl, samples.jsonl, history.jsonl, metric writers, loss.png and
report.html."""

import contextlib
import dataclasses
import importlib.util
import json
import math
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from data_utils.command_line import progress_bar
from data_utils.files import append_line, atomic_write_text, fsync_path, rename_old
from megatron.gpt2.config import Config
from megatron.gpt2.monitor.html_report import HISTORY, METRICS, REPORT, SAMPLES, write_report
from megatron.gpt2.monitor.incidents import read_records
from megatron.gpt2.monitor.log_lines import EvaluationRecord, IterationRecord, TaskRecord
from megatron.gpt2.monitor.plots import plot_loss

WANDB_ID = "wandb_run_id.txt"
REPORT_TIME_SHARE = 0.01  # During a run, writing report.html takes at most this share of the time.


class TensorBoard:
    """Writes TensorBoard event files. TensorBoard hides points of an earlier run after `start_iteration`."""

    def __init__(self, config: Config, start_iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(config.train.tensorboard_dir, purge_step=start_iteration + 1)
        self.close = self._writer.close

    def log(self, numbers: Mapping[str, float], iteration: int) -> None:
        """Write a scalar for each of the `numbers`."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, iteration)


class WeightsAndBiases:
    """Logs to Weights & Biases. The file `wandb_run_id.txt` in the --save folder has the id of the run there, so that a
    run that continues from a checkpoint also continues there.
    """

    def __init__(self, config: Config, start_iteration: int) -> None:
        import wandb

        train, save = config.train, Path(str(config.checkpoint.save))
        folder, known = Path(train.wandb_save_dir or save), save / WANDB_ID
        for path in (folder, save):  # If the folder does not exist, wandb uses a temporary folder.
            path.mkdir(parents=True, exist_ok=True)
        if not (start_iteration and known.exists()):
            known.write_text(secrets.token_hex(4) + "\n", encoding="ascii")
        try:
            self._run: Any = wandb.init(
                project=train.wandb_project,
                entity=train.wandb_entity,
                name=train.wandb_exp_name or save.name,
                dir=folder,
                id=known.read_text(encoding="ascii").strip(),
                resume="allow",
                config=config.as_dict(),
            )
        except wandb.Error as error:
            raise ValueError(
                f"--wandb-project {train.wandb_project}: {error} (WANDB_MODE=offline needs neither network nor account)"
            ) from error
        self.close = self._run.finish

    def log(self, numbers: Mapping[str, float], iteration: int) -> None:
        """Send the `numbers` of an iteration to Weights & Biases."""
        self._run.log(dict(numbers), step=iteration)  # wandb ignores the iterations that a rewound run repeats.


MetricWriter = TensorBoard | WeightsAndBiases


def open_metric_writers(config: Config, *, start_iteration: int, active: bool) -> list[MetricWriter]:
    """Open the metric writers that the flags select, on the active rank. Raises ValueError on every rank if a library
    is not installed, and on the active rank if a writer cannot start.

    active: whether this rank writes metrics; on other ranks the list is empty.
    """
    metric_writers: list[MetricWriter] = []
    for flag, wanted, module, writer in (
        ("--tensorboard-dir", config.train.tensorboard_dir, "tensorboard", TensorBoard),
        ("--wandb-project", config.train.wandb_project, "wandb", WeightsAndBiases),
    ):
        if wanted is not None and importlib.util.find_spec(module) is None:
            raise ValueError(f"{flag} needs {module}: pip install {module}")
        if wanted is not None and active:
            metric_writers.append(writer(config, start_iteration))
    return metric_writers


class RunLog:
    """Prints the lines of a run and writes its records into the --save folder.

    active: whether this rank prints and writes. On all other ranks the methods do nothing.
    start_iteration: the iteration at which the run starts. Metrics and samples of later iterations are removed, because
        these steps are repeated. A run that starts at 0 renames the record files of an earlier run.
    metric_writers: writers that also get the metrics. `RunLog.close` closes these writers.
    is_owner: a function that returns whether the folder still belongs to this run. If the folder belongs to a different
        run, nothing is written.
    """

    def __init__(
        self,
        save_directory: str | Path,
        *,
        train_iters: int,
        start_iteration: int = 0,
        metric_writers: Sequence[MetricWriter] = (),
        active: bool = True,
        is_owner: Callable[[], bool] = lambda: True,
    ) -> None:
        self.active, self._is_owner = active, is_owner
        self.directory, self._metric_writers = Path(save_directory), metric_writers
        self._iteration, self._next_report, self._closed = start_iteration, 0.0, not active
        self._has_warned = False  # whether the warning that records cannot be written was printed
        self.progress = progress_bar(total=train_iters, initial=start_iteration, unit="it", leave=False, visible=active)
        if not active:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, SAMPLES, HISTORY):
            path = self.directory / name
            if start_iteration == 0 and read_records(path):
                rename_old(path)
            elif name != HISTORY:  # history.jsonl is never shortened.
                drop_records_after(path, start_iteration)

    def info(self, text: str) -> None:
        """Print a line above the progress bar. Lines that begin with WARNING or "stopped" are also written to
        history.jsonl."""
        if not self.active:
            return
        self.progress.write(text, file=sys.stdout)
        sys.stdout.flush()
        if text.startswith(("WARNING", "stopped")):
            self.note(text)

    def count_iteration(self) -> None:
        """Count an iteration and move the progress bar."""
        self._iteration += 1
        self.progress.update()

    def rewind(self, iteration: int) -> None:
        """Set the progress back to `iteration`, and remove later metrics and samples."""
        self.progress.update(iteration - self._iteration)
        self._iteration = iteration
        for name in (METRICS, SAMPLES) if self.active else ():
            drop_records_after(self.directory / name, iteration)

    def record(self, record: IterationRecord | EvaluationRecord | TaskRecord) -> None:
        """Write a record to metrics.jsonl and the metric writers."""
        metrics = dataclasses.asdict(record)
        if isinstance(record, EvaluationRecord):
            metrics["ppl"] = record.ppl
        for name, value in metrics.items():
            if isinstance(value, float) and not math.isfinite(value):
                metrics[name] = None  # JSON has no NaN.
        self._append(METRICS, metrics)
        prefix = f"{metrics.pop('split')}/" if "split" in metrics else ""
        numbers = {prefix + name: value for name, value in metrics.items() if name != "iteration" and value is not None}
        for writer in self._metric_writers:
            writer.log(numbers, record.iteration)

    def sample(self, text: str) -> None:
        """Write a text sample of the model to samples.jsonl."""
        self._append(SAMPLES, {"iteration": self._iteration, "text": text})

    def note(self, text: str) -> None:
        """Write an event to history.jsonl: a start, a warning or the end."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self._append(HISTORY, {"iteration": self._iteration, "time": now, "text": text})

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        if not self.active:
            return
        try:
            if self._is_owner():
                append_line(self.directory / name, json.dumps(record, allow_nan=False))
        except OSError as error:  # A full disk, for example, must not end a run.
            if not self._has_warned:
                self._has_warned = True  # Set before `info`, which also writes a record.
                self.info(f"WARNING: {name} will lack lines from now on: {error.strerror}")

    def sync(self) -> None:
        """Flush the records to the disk. A call before each save ensures that, after a power failure, the
        records have all iterations of the checkpoint."""
        # The name "" stands for the folder itself, whose list of files is flushed, too.
        for name in (METRICS, SAMPLES, HISTORY, "") if self.active else ():
            with contextlib.suppress(OSError):  # The file may not exist yet.
                fsync_path(self.directory / name)

    def report(self, *, final: bool = False) -> None:
        """Write report.html. During the run, calls are skipped so that reports take at most REPORT_TIME_SHARE of the
        time.

        final: whether to write the report in any case."""
        began = time.monotonic()
        if not self.active or began < self._next_report and not final:
            return
        self._write(REPORT, lambda path: str(write_report(path.parent)))
        now = time.monotonic()
        self._next_report = now + (now - began) / REPORT_TIME_SHARE

    def _write(self, name: str, write: Callable[[Path], str]) -> str:
        """Call `write` with the path of the file `name` and return the result. If the file cannot be written, log a
        warning and return ""."""
        try:
            return write(self.directory / name) if self._is_owner() else ""
        except OSError as error:
            self.info(f"WARNING: {name} was not written: {error.strerror}")
            return ""

    def close(self, title: str = "GPT-2") -> str:
        """Close the metric writers, write the report and plot the loss. Return the result of `plot_loss`, or "" if the
        image cannot be written or the log is already closed.
        """
        if self._closed:
            return ""
        self._closed = True
        self.progress.close()
        for writer in self._metric_writers:
            writer.close()
        self.report(final=True)
        return self._write("loss.png", lambda path: plot_loss(self.directory / METRICS, path, title))


def drop_records_after(path: Path, iteration: int) -> None:
    """Remove the records after `iteration` from the file `path`."""
    if records := read_records(path):
        atomic_write_text(
            path, "".join(json.dumps(record) + "\n" for record in records if record["iteration"] <= iteration)
        )
