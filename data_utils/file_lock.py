"""What processes that share a folder need: a lock without any collective, and files and names that survive a crash."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def file_lock(path: Path, waiting: Callable[[], object]) -> Iterator[None]:
    """Hold `path`, calling `waiting` once where another process has it. The system frees it when its holder dies.

    The file stays: removing it would let two processes hold two locks of one name. OSError where it can't be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def replace_text(path: Path, text: str) -> None:
    """`path` is this text from now on, in UTF-8; at any moment, also after a crash, it is whole: the old one or the new
    one. What is no text, a lone half of a surrogate pair, is written as "?"."""
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with new.open("w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Put the names in `folder` on the disk: without it a rename may be lost when the machine stops."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
