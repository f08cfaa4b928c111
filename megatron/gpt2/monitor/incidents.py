"""What happened to a run, as each process of it saw it: one file per rank and per launcher in the --save folder.

    incidents/rank_00003.jsonl         starts and ends of this rank, and what it noticed, such as a lost rank
    incidents/launcher_node004.jsonl   how the ranks that it started ended, and when it started them again
    ended.json                         that the run ended as it was asked to, and why

A rank that is killed writes nothing. So the files of the others, read together, tell what died first.
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
from data_utils.files import replace_text

FOLDER = "incidents"
ENDED = "ended.json"
FINISHED = "finished"
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
# gloo raises a plain RuntimeError when a peer is gone.
COLLECTIVE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|closed by peer|socket|gloo|nccl|timed out|timeout",
    re.IGNORECASE,
)
OUT_OF_MEMORY = re.compile("can't allocate memory|bad_alloc|CUDA error: out of memory")


class Incidents:
    """Appends lines to the file `name` of `save_directory`. A line is one write, so that no reader sees half of it.

    attempt: how often the run was started again before, without a person. host: the name of the machine, if others
    know it by a different one than its own. `iteration`, of the lines that name no other, is -1 until a run has one;
    the training loop sets it, so that its threads need not know the run. If the disk refuses a line, the line is lost:
    what is told here must not end a run.
    """

    def __init__(self, save_directory: str | Path, name: str, *, attempt: int = 0, host: str = "") -> None:
        self._path = Path(save_directory) / FOLDER / f"{name}.jsonl"
        self._always = {"who": name, "host": host or socket.gethostname(), "process": os.getpid(), "attempt": attempt}
        self.iteration = -1

    def note(self, kind: str, text: str = "", *, iteration: int | None = None, **details: Any) -> None:
        """Add a line: `kind` in a word or two, `text` as a person reads it, `details` in JSON's types. iteration: None
        takes `self.iteration`."""
        at = self.iteration if iteration is None else iteration
        record = {"time": time.time(), **self._always, "iteration": at, "kind": kind, "text": text, **details}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab", buffering=0) as file:
                file.write((json.dumps(record) + "\n").encode())

    def error(self, error: BaseException) -> None:
        """Note that this process ends because of `error`: its text, its cause, and the line of this project that it is
        from."""
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(ROOT))]
        at = f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else ""
        text = " ".join(f"{type(error).__name__}: {error}".split())[:3000]
        self.note("error", text, at=at, cause=cause_of_error(error))

    def refused(self, error: BaseException) -> None:
        """Note that a start ends here for bad input. If no run was before, it leaves nothing behind."""
        if self._path.parent.is_dir():
            self.note("refused", str(error), exit_code=2, cause=cause_of_error(error))


def cause_of_error(error: BaseException) -> str:
    """Return what an exception says of the machine or its files: its own `cause`, if its class has one, "out of
    memory", "not finite", "full disk", "another rank" if a collective failed, "bad input", or "program"."""
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
    """Whether a GPU's allocator, a CPU's (a RuntimeError of torch) or Python's raised `error` for want of memory."""
    is_full = isinstance(error, RuntimeError) and bool(OUT_OF_MEMORY.search(str(error)))
    return is_full or isinstance(error, torch.OutOfMemoryError | MemoryError)


def rank_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank_{rank:05d}"


# Fields of an incident and their types. The first five are in every one.
FIELDS: dict[str, Any] = {"time": int | float, "who": str, "kind": str, "text": str, "iteration": int}
FIELDS |= {"host": str, "attempt": int, "rank": int, "ranks": list, "silences": dict, "stack": list}
FIELDS |= {"signal": str, "exit_code": int, "cause": str, "at": str}


def read_incidents(save_directory: str | Path) -> list[dict[str, Any]]:
    """Return the lines of all files, by time; a line that is damaged is left out."""
    found = [
        record
        for path in sorted((Path(save_directory) / FOLDER).glob("*.jsonl"))
        for record in read_records(path)
        if all(name in record for name in list(FIELDS)[:5])
        and all(isinstance(record[name], kind) for name, kind in FIELDS.items() if name in record)
    ]
    return sorted(found, key=lambda record: record["time"])


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines that have an iteration; none if there is no file.

    A line that is damaged is left out, such as the last one, which a crash has cut short.
    """
    records = []
    for line in Path(path).read_bytes().splitlines() if Path(path).exists() else ():
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line.decode("utf-8"))
            if isinstance(record, dict) and isinstance(record.get("iteration"), int):
                records.append(record)
    return records


def mark_ended(folder: Path, reason: str, iteration: int, exit_code: int) -> None:
    """Write ended.json into the --save folder, unless the disk refuses it. reason: FINISHED, or what asked for the
    stop.

    Exit codes do not say it: torchrun returns 1 after SIGTERM even if its workers end with 0, and a run that was
    stopped ends with 0 like one that is finished. The file is removed when a run starts. So a job script that finds
    none can tell that the run died.
    """
    record = {"reason": reason, "iteration": iteration, "exit_code": exit_code, "time": time.time()}
    with contextlib.suppress(OSError):
        replace_text(folder / ENDED, json.dumps(record) + "\n")
