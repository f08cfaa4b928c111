"""One run at a time in a --save folder."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from data_utils.files import take_lock


def lock_together(
    directory: str | Path, *, rank: int, max_over_ranks: Callable[[int], int], log: Callable[[str], None]
) -> BinaryIO | None:
    """Rank 0 locks `directory` and returns the open lock; the others return None.

    Every rank calls it. max_over_ranks: a collective, the largest of all ranks' numbers. ValueError on every rank where
    another run has the folder.
    """
    lock, problem = None, ""
    if rank == 0:
        try:
            lock = lock_folder(Path(directory), log)
        except ValueError as error:
            problem = str(error)
    if max_over_ranks(int(bool(problem))):
        raise ValueError(problem or f"--save {directory}: rank 0 cannot have it")
    return lock


def lock_folder(folder: Path, log: Callable[[str], None]) -> BinaryIO:
    """Make `folder` and lock it until the returned file is closed; the system closes it when this process dies.

    ValueError, one line, where another process has it. On a filesystem without locks nothing is locked, and `log` gets
    a warning.
    """
    path = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")  # not "w": what its holder says of itself must stay
    except OSError as error:
        raise ValueError(f"--save {folder}: cannot be written: {error.strerror}") from error
    try:
        taken = take_lock(file)
    except OSError as error:
        log(f"WARNING: {path} cannot be locked ({error.strerror}): nothing keeps a second run out of this folder")
        return file
    if not taken:
        file.seek(0)
        holder = file.read(200).decode(errors="replace").strip() or "another process"
        file.close()
        raise ValueError(
            f"--save {folder} is in use by {holder}: wait for that run, end it, or give this one another --save"
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    file.flush()
    return file
