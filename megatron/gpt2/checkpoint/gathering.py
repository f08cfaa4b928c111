"""How rank 0 learns what the others wrote: each rank puts the table of its files into the checkpoint, last of all.

The table, or the error in its place, appears under its name as a whole or not at all. Rank 0 keeps its first line and
its hash: what the boxes are concerns only those who load them.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megatron.gpt2.checkpoint.files import DTYPES, write_synced
from megatron.gpt2.checkpoint.manifest import Contents, table_bytes, table_path
from megatron.gpt2.checkpoint.parsing import TensorInfo, check_sizes, parse_files

_GRACE = 5.0  # seconds that rank 0 waits for the parts of ranks that may be dead
_PAUSE = 0.02  # seconds between two looks
_NAMED = 8  # ranks that a message names


class Parts:
    """What the thread that writes a checkpoint, and the run, which has collectives, tell each other meanwhile.

    own: done when this rank's part is on the disk, or has failed. hurry: parts that are still missing may never come.
    problem: why any rank could not write its part, else "".
    """

    def __init__(self) -> None:
        self.own: Future[None] = Future()
        self.hurry, self.problem = threading.Event(), ""


def write_table(folder: Path, rank: int, tensors: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Write the table of this rank's `files`, with the entries that `write_tensors` returned. OSError where the table
    is not one that a reader accepts."""
    data = table_bytes(files, tensors)
    known = {name: TensorInfo(DTYPES[info["dtype"]], tuple(info["shape"])) for name, info in tensors.items()}
    try:
        check_sizes(folder, parse_files(json.loads(data.partition(b"\n")[2]), known).files)
    except ValueError as error:
        raise OSError(f"not what was written: {error}") from error
    _put(folder, rank, data)


def write_failure(folder: Path, rank: int, error: BaseException) -> None:
    """In the place of a rank's table: why the rank could not write its part."""
    _put(folder, rank, json.dumps({"error": str(error)}).encode())


def _put(folder: Path, rank: int, data: bytes) -> None:
    path = folder / table_path(rank)
    unfinished = path.with_suffix(".tmp")
    write_synced(unfinished, data)
    unfinished.rename(path)


def gather_tables(folder: Path, world_size: int, timeout_s: float, parts: Parts) -> Contents:
    """What all ranks wrote into `folder`, once their tables are there.

    OSError where a rank could not write its part. TimeoutError where a table is missing after `timeout_s` seconds, or a
    few seconds after `parts.hurry` is set.
    """
    paths = {Path(table_path(rank)).name: rank for rank in range(world_size)}
    tables = (folder / table_path(0)).parent
    found: dict[int, tuple[Mapping[str, Any], int, str]] = {}
    began = time.monotonic()
    deadline = began + timeout_s
    while True:
        # One look for all: of thousands, each alone would be a question to the file system.
        for name in paths.keys() & set(os.listdir(tables)):
            data = (tables / name).read_bytes()
            first = json.loads(data.partition(b"\n")[0])
            rank = paths.pop(name)
            if "error" in first:
                raise OSError(f"rank {rank} could not write its part of {folder}: {first['error']}")
            found[rank] = first, len(data), hashlib.sha256(data).hexdigest()
        if not paths:
            break
        if parts.problem:
            raise OSError(parts.problem)
        if parts.hurry.is_set():
            deadline = min(deadline, time.monotonic() + _GRACE)
        if time.monotonic() > deadline:
            missing = sorted(paths.values())
            more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
            raise TimeoutError(
                f"{folder}: nothing came from rank {', '.join(map(str, missing[:_NAMED]))}{more} within "
                f"{deadline - began:.3g} s; earlier checkpoints are untouched: do all nodes share the "
                "folder?"
            )
        time.sleep(_PAUSE)
    contents = Contents()
    for rank in range(world_size):
        contents.add(rank, *found.pop(rank))
    return contents


def share_line(line: str, rank: int, max_over_ranks: Callable[[int], int]) -> str:
    """On all ranks the line of the last rank whose line is not empty, or an empty one. A collective."""
    speaker = max_over_ranks(rank + 1 if line else 0)
    if not speaker:
        return ""
    data = line.encode() if rank + 1 == speaker else b""
    size = max_over_ranks(len(data))
    # 7 bytes fit into 64 bits
    numbers = [max_over_ranks(int.from_bytes(data[at : at + 7], "big")) for at in range(0, size, 7)]
    return b"".join(number.to_bytes(min(7, size - 7 * i), "big") for i, number in enumerate(numbers)).decode()
