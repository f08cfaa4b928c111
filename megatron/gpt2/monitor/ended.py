"""ended.json in the --save folder: that a run ended as it was asked to, and why.

Exit codes do not say so: torchrun returns 1 after SIGTERM even where its workers end with 0, and a run that was stopped
ends with 0 like one that is finished. The file is removed when a run starts. So a job script that finds none knows that
the run died.
"""

import contextlib
import json
import time
from pathlib import Path

from data_utils.files import replace_text

ENDED = "ended.json"
FINISHED = "finished"


def mark_ended(folder: Path, reason: str, iteration: int, exit_code: int) -> None:
    """Write the file. reason: FINISHED, or what asked for the stop. A disk that refuses it loses it."""
    record = {"reason": reason, "iteration": iteration, "exit_code": exit_code, "time": time.time()}
    with contextlib.suppress(OSError):
        replace_text(folder / ENDED, json.dumps(record) + "\n")


def clear_ended(folder: Path) -> None:
    """Remove the file of the run before."""
    (folder / ENDED).unlink(missing_ok=True)
