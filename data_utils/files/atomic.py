"""Files that are replaced whole, and locks between processes that share a folder, without any collective.

After a crash, or when the machine stops, there is the old file or the new one. The system frees the lock of a process
that dies.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO


def flush_to_disk(file: IO[Any]) -> None:
    """Flush and fsync an open file."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: str | Path) -> None:
    """Put the names in `folder` on the disk: without it a rename may be lost when the machine stops."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: str | Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """A new file, open for bytes, that takes the name `path` when the block ends without an error: written beside it,
    fsynced, renamed, and the folder fsynced. An error in the block removes it and leaves `path` as it was.

    temporary: its name until then (default: one of this process alone). A fixed name is for a path that one process
    at a time writes: what a killed one left is then overwritten.
    """
    path = Path(path)
    new = temporary or path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with new.open("wb") as file:
            yield file
            flush_to_disk(file)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def replace_text(path: str | Path, text: str) -> None:
    """Replace `path` by `text` in UTF-8, atomically. A lone surrogate, which UTF-8 cannot hold, is written as "?"."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", errors="replace"))


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
