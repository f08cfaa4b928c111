"""Incident logs of a run: one file per rank and per launcher in the --save folder.

    incidents/rank_00003.jsonl         starts and ends of rank 3, and failures that it found, such as a lost rank
    incidents/launcher_node004.jsonl   how the ranks of the launcher on node004 ended, and their restarts
    ended.json                         why the run ended, if it was not killed

A killed rank cannot write why it ended. The files of all processes together show what failed first.
"""

import contextlib
import errno
import json
import os
import re
import socket
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data_utils.command_line import ROOT
from data_utils.files import append_line, atomic_write_text, fsync_path

FOLDER = "incidents"
ENDED = "ended.json"
FINISHED = "finished"
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
# If another rank has ended, gloo raises a plain RuntimeError whose message matches this pattern.
COLLECTIVE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|closed by peer|socket|gloo|nccl|timed out|timeout",
    re.IGNORECASE,
)
OUT_OF_MEMORY = re.compile("can't allocate memory|bad_alloc|CUDA error: out of memory")


class IncidentLog:
    """Appends lines to incidents/`name`.jsonl in `save_directory`. A line that cannot be written is lost, because
    logging must not end a run.

    attempt: the number of automatic restarts so far.
    host: the name of the machine (default: its host name).
    iteration: the iteration of new lines. The training loop sets the iteration; before training it is -1.
    """

    def __init__(self, save_directory: str | Path, name: str, *, attempt: int = 0, host: str = "") -> None:
        self._path = Path(save_directory) / FOLDER / f"{name}.jsonl"
        self._always = {"who": name, "host": host or socket.gethostname(), "process": os.getpid(), "attempt": attempt}
        self.iteration = -1

    def note(self, kind: str, text: str = "", *, iteration: int | None = None, **details: Any) -> None:
        """Append a line.

        kind: one or two words.
        text: the message.
        details: JSON values.
        iteration: None for `self.iteration`.
        """
        at = self.iteration if iteration is None else iteration
        record = {"time": time.time(), **self._always, "iteration": at, "kind": kind, "text": text, **details}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._path.parent.is_symlink():  # Through a link, the program would write outside of --save.
                append_line(self._path, json.dumps(record))

    def sync(self) -> None:
        """Write the lines to the disk."""
        with contextlib.suppress(OSError):
            fsync_path(self._path)

    def error(self, error: BaseException) -> None:
        """Record that `error` ends this process. The line has the message, the cause, and the line of code that raised
        the error."""
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(ROOT))]
        at = f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else ""
        text = " ".join(f"{type(error).__name__}: {error}".split())[:3000]
        self.note("error", text, at=at, cause=cause_of_error(error))

    def refused(self, error: BaseException) -> None:
        """Record that a run did not start because of bad input. If the folder has no earlier run, write nothing."""
        if self._path.parent.is_dir():
            self.note("refused", str(error), exit_code=2, cause=cause_of_error(error))


def cause_of_error(error: BaseException) -> str:
    """Return the kind of an exception: its attribute `cause`, if it has one. Otherwise "out of memory", "not finite",
    "full disk", "another rank" (a collective failed), "bad input" or "program"."""
    if own := getattr(error, "cause", ""):
        return str(own)
    if is_out_of_memory(error):
        return "out of memory"
    if isinstance(error, FloatingPointError):
        return "not finite"
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return "full disk"
    if isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and COLLECTIVE.search(str(error)):
        return "another rank"
    return "bad input" if isinstance(error, ValueError | OSError) else "program"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that Python or torch's allocator on a GPU or CPU ran out of memory."""
    is_full = isinstance(error, RuntimeError) and bool(OUT_OF_MEMORY.search(str(error)))
    return is_full or isinstance(error, torch.OutOfMemoryError | MemoryError)


def rank_file_name(rank: int) -> str:
    """Return the name of the incident file of a rank, without its suffix."""
    return f"rank_{rank:05d}"


# {field of an incident: its default}. The value of a field must have the type of its default.
INCIDENT_DEFAULTS: dict[str, Any] = {"time": 0.0, "who": "", "kind": "", "text": "", "iteration": -1, "host": "?"}
INCIDENT_DEFAULTS |= {"attempt": 0, "rank": -1, "ranks": [], "silences": {}, "stack": [], "cut": [], "first": True}
INCIDENT_DEFAULTS |= {"signal": "", "exit_code": 0, "cause": "", "at": ""}


def read_incidents(save_directory: str | Path) -> list[dict[str, Any]]:
    """Return the incidents of all processes, sorted by time. Missing fields get their INCIDENT_DEFAULTS, and damaged
    lines are skipped."""
    found = [
        INCIDENT_DEFAULTS | record
        for path in sorted((Path(save_directory) / FOLDER).glob("*.jsonl"))
        for record in read_records(path)
        if all(isinstance(record.get(name, value), type(value)) for name, value in INCIDENT_DEFAULTS.items())
    ]
    return sorted(found, key=lambda record: record["time"])


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a JSON lines file that have an iteration, or [] if the file does not exist. Damaged lines,
    such as a last line that a crash has cut off, are skipped.
    """
    records = []
    for line in Path(path).read_bytes().splitlines() if Path(path).is_file() else ():  # Reading a pipe would block.
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line.decode("utf-8"))
            if isinstance(record, dict) and isinstance(record.get("iteration"), int):
                records.append(record)
    return records


def write_ended(folder: Path, reason: str, iteration: int, exit_code: int) -> None:
    """Write ended.json into the --save folder, if possible.

    The start of a run removes ended.json. If a job script finds no file, the run has died. Exit codes do not show
    whether a run has died: torchrun returns 1 after SIGTERM even if its workers return 0, and stopped and finished runs
    both return 0.

    reason: FINISHED, or the reason of the stop.
    """
    record = {"reason": reason, "iteration": iteration, "exit_code": exit_code, "time": time.time()}
    with contextlib.suppress(OSError):
        atomic_write_text(folder / ENDED, json.dumps(record) + "\n")
