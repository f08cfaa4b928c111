"""What happened to a run, as each process of it saw it: one file per rank and per launcher in the --save folder.

    incidents/rank_00003.jsonl         starts and ends of this rank, and what it noticed, such as a lost rank
    incidents/launcher_node004.jsonl   how the ranks that it started ended, and when it started them again

A rank that is killed writes nothing. So the files of the others, read together, tell what died first.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.gpt2.monitor.plots import read_records

FOLDER = "incidents"


class Incidents:
    """Appends lines to the file `name` of `save_directory`. A line is one write, so that no reader sees half of it.

    attempt: how often the run was started again before, without a person. host: the name of the machine, where others
    know it by one of its own. `iteration`, of the lines that name no other,
    is -1 until a run has one; the training loop sets it, so that threads beside it need not know the run. A disk that
    refuses a line loses it: what is told here must not end a run.
    """

    def __init__(self, save_directory: str | Path, name: str, *, attempt: int = 0, host: str = "") -> None:
        self._path = Path(save_directory) / FOLDER / f"{name}.jsonl"
        self._always = {"who": name, "host": host or socket.gethostname(), "process": os.getpid(), "attempt": attempt}
        self.iteration = -1

    def note(self, kind: str, text: str = "", *, iteration: int | None = None, **details: Any) -> None:
        """Add a line: `kind` in a word or two, `text` as a person reads it, `details` in JSON's types. iteration: None
        takes `self.iteration`."""
        record: Mapping[str, Any] = {
            "time": time.time(),
            **self._always,
            "iteration": self.iteration if iteration is None else iteration,
            "kind": kind,
            "text": text,
            **details,
        }
        line = (json.dumps(record) + "\n").encode()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab", buffering=0) as file:
                file.write(line)
        except OSError:
            pass

    def refused(self, text: str) -> None:
        """A start ends here for bad input. Where no run was before, it leaves nothing behind."""
        if self._path.parent.is_dir():
            self.note("refused", text, exit_code=2)


def rank_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank_{rank:05d}"


def read_incidents(save_directory: str | Path) -> list[dict[str, Any]]:
    """The lines of all files, by time; what is damaged is left out."""
    found = [
        record
        for path in sorted((Path(save_directory) / FOLDER).glob("*.jsonl"))
        for record in read_records(path)
        if isinstance(record.get("time"), int | float)
    ]
    return sorted(found, key=lambda record: record["time"])
