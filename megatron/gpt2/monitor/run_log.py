"""The log of a run: the lines it prints, metrics.jsonl, samples.jsonl, history.jsonl, the trackers' files, the loss
curve and report.html.
"""

import dataclasses
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from data_utils.command_line import progress_bar
from data_utils.files import replace_text
from megatron.gpt2.monitor.incidents import read_records
from megatron.gpt2.monitor.plots import loss_curve
from megatron.gpt2.monitor.reporting import EvaluationRecord, IterationRecord
from megatron.gpt2.monitor.run_report import HISTORY, METRICS, REPORT, SAMPLES, write_report
from megatron.gpt2.monitor.trackers import Tracker

REPORT_SHARE = 0.01  # of a run's time at most goes into its report


class RunLog:
    """Prints the lines of a run and keeps its records in the save folder.

    active: only the active rank writes; on the others every method does nothing. start_iteration: numbers and samples
    beyond it belong to steps that are about to be done again, and are dropped. A run that starts from 0 renames all
    records of another run that it finds. trackers: get the numbers too, and are closed at the end.
    """

    def __init__(
        self,
        save_directory: str | Path,
        *,
        train_iters: int,
        start_iteration: int = 0,
        trackers: Sequence[Tracker] = (),
        active: bool = True,
    ) -> None:
        self.active = active
        self.directory = Path(save_directory)
        self._iteration, self._trackers, self._next_report, self._closed = start_iteration, trackers, 0.0, not active
        self._told = False  # that records are lost
        self.progress = progress_bar(total=train_iters, initial=start_iteration, unit="it", leave=False, seen=active)
        if not active:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, SAMPLES, HISTORY):
            path = self.directory / name
            if start_iteration == 0 and read_records(path):
                set_aside(path)
            elif name != HISTORY:  # what happened did happen
                keep_records_until(path, start_iteration)

    def info(self, text: str) -> None:
        """Print a line, above the progress bar if there is one. Warnings and the reason of a stop are kept too."""
        if not self.active:
            return
        self.progress.write(text, file=sys.stdout)
        sys.stdout.flush()
        if text.startswith(("WARNING", "stopped")):
            self.note(text)

    def step(self) -> None:
        """One iteration is done: move the progress bar."""
        self._iteration += 1
        self.progress.update()

    def rewind(self, iteration: int) -> None:
        """The run goes back to `iteration`: what is logged beyond it belongs to another course."""
        self.progress.update(iteration - self._iteration)
        self._iteration = iteration
        for name in (METRICS, SAMPLES) if self.active else ():
            keep_records_until(self.directory / name, iteration)

    def record(self, record: IterationRecord | EvaluationRecord) -> None:
        """Keep numbers in metrics.jsonl and the trackers."""
        metrics = dataclasses.asdict(record)
        if isinstance(record, EvaluationRecord):
            metrics["ppl"] = record.ppl
        for name, value in metrics.items():
            if isinstance(value, float) and not math.isfinite(value):
                metrics[name] = None  # JSON has no NaN
        self._append(METRICS, metrics)
        prefix = f"{metrics.pop('split')}/" if "split" in metrics else ""
        numbers = {prefix + name: value for name, value in metrics.items() if name != "iteration" and value is not None}
        for tracker in self._trackers:
            tracker.log(numbers, record.iteration)

    def sample(self, text: str) -> None:
        """Keep a text that the model wrote at this iteration."""
        self._append(SAMPLES, {"iteration": self._iteration, "text": text})

    def note(self, text: str) -> None:
        """Keep what happened at this iteration: a start, a warning, the end."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self._append(HISTORY, {"iteration": self._iteration, "time": now, "text": text})

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        if not self.active:
            return
        try:
            with open(self.directory / name, "a", encoding="utf-8") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")
        except OSError as error:  # of a full disk, say, which must not end a run
            if not self._told:
                self._told = True  # first: the warning is a record too
                self.info(f"WARNING: {name} lacks lines from here on: {error.strerror}")

    def report(self) -> None:
        """Write report.html, unless that would take more than the share REPORT_SHARE of the run's time."""
        began = time.monotonic()
        if not self.active or began < self._next_report:
            return
        self._write(REPORT, lambda path: str(write_report(path.parent)))
        now = time.monotonic()
        self._next_report = now + (now - began) / REPORT_SHARE

    def _write(self, name: str, write: Callable[[Path], str]) -> str:
        """Return what `write` returns; nothing, with a warning, if the disk refuses the file."""
        try:
            return write(self.directory / name)
        except OSError as error:
            self.info(f"WARNING: {name} is not written: {error.strerror}")
            return ""

    def close(self, title: str = "GPT-2") -> str:
        """Close the files, write the report and draw the loss curve.

        Returns the path of the curve, the curve as text if matplotlib is not installed, or "" if there are fewer than
        two points, the disk refuses the file, or the log is closed already.
        """
        if self._closed:
            return ""
        self._closed = True
        self.progress.close()
        for tracker in self._trackers:
            tracker.close()
        self._write(REPORT, lambda path: str(write_report(path.parent)))
        return self._write("loss.png", lambda path: loss_curve(self.directory / METRICS, path, title))


def set_aside(path: Path) -> Path:
    """Rename a file or folder to `NAME.old-N`, with the first N that is free; returns the new path."""
    aside = next(new for n in itertools.count(1) if not (new := path.with_name(f"{path.name}.old-{n}")).exists())
    os.replace(path, aside)
    return aside


def keep_records_until(path: Path, iteration: int) -> None:
    """Drop the records beyond `iteration` from the file `path`."""
    if records := read_records(path):
        replace_text(path, "".join(json.dumps(record) + "\n" for record in records if record["iteration"] <= iteration))
