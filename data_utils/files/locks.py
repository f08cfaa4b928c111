"""Locks between processes that share a folder, without any collective: the system frees them when their holder dies."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any


def take_lock(file: IO[Any]) -> bool:
    """Lock the open `file` until it is closed. False where another process has it; OSError where its file system has
    no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def file_lock(path: Path, waiting: Callable[[], object]) -> Iterator[None]:
    """Hold `path`, calling `waiting` once where another process has it. The system frees it when its holder dies.

    The file stays: removing it would let two processes hold two locks of one name. OSError where it can't be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        if not take_lock(file):
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
