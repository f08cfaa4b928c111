"""A --save folder: which of its checkpoints is loaded, which is the best one, and one run in it at a time.

`latest_checkpointed_iteration.txt`, the tracker, names the iteration to load. A number that is saved again has its
existing folder renamed aside, `iter_0000300.old-1`. `best/` (--keep-best) holds the checkpoint with the lowest
validation loss, as a folder like the one around it, for `--load`: iter_0000700/, its tracker, tokenizer/. The loss is
only in the manifest of that checkpoint. A run that continues reads it from there.
"""

import json
import math
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from data_utils.files import take_lock
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.monitor.run_log import set_aside
from megatron.gpt2.monitor.run_report import METRICS

TRACKER = "latest_checkpointed_iteration.txt"
BEST = "best"
_OLD = 1000  # an iteration is renamed aside fewer times than this
_ITERATION = re.compile(r"iter_(\d{7,12})(?:\.old-(\d{1,3}))?", re.ASCII)
Log = Callable[[str], None]
Gather = Callable[[str], list[str]]  # the texts of all ranks, by rank: every rank calls it with its own


class NoValidCheckpoint(ValueError):
    """A folder has checkpoints, and all are damaged."""

    cause = "damaged checkpoint"


def alone(text: str) -> list[str]:
    """`Gather` for one rank."""
    return [text]


def _found(directory: Path) -> list[re.Match[str]]:
    """The iterations in `directory`, the newest first, and after all of them those that were renamed aside."""
    names = os.listdir(directory) if directory.is_dir() else []
    return sorted(
        filter(None, map(_ITERATION.fullmatch, names)),
        key=lambda match: (not match[2], int(match[1]), int(match[2] or 0)),
        reverse=True,
    )


def iterations(directory: Path) -> list[tuple[int, Path]]:
    """The iterations in `directory`, the newest first, each with its folder. Those that were renamed aside are left
    out."""
    return [(int(match[1]), directory / match[0]) for match in _found(directory) if not match[2]]


def aside(folder: Path) -> Path:
    """A name that an existing checkpoint gets when its number is needed."""
    return next(path for old in range(1, _OLD) if not (path := Path(f"{folder}.old-{old}")).exists())


def find_checkpoint(
    directory: str | Path, *, log: Log, rank: int = 0, gather: Gather = alone, verify: bool = True
) -> Checkpoint | None:
    """The checkpoint to load: the tracker's, or if that is damaged or missing the newest valid one, loudly.

    All ranks call it, with `gather`, a collective, and all get the same answer: rank 0 proposes, everyone opens, each
    hashes its share of the files (`verify`), and a checkpoint counts if all agree. An iteration that was renamed aside
    is the last resort. Nothing is changed on the disk. `log` gets the warnings on every rank.

    Returns None if the folder is missing or holds no checkpoint. ValueError if it holds some and none is valid.
    """
    directory = Path(directory)
    tracked, names, refused = json.loads(gather(json.dumps(_proposals(directory)) if rank == 0 else "")[0])
    if not names and not refused:
        return None
    for warning in refused:
        log(f"WARNING: {warning}")
    for name in names:
        checkpoint, problem = _open_together(directory / name, rank, gather, verify)
        if checkpoint is not None:
            break
        log(f"WARNING: {problem}")
        refused.append(problem)
    else:
        raise NoValidCheckpoint(
            f"{directory}: holds no valid checkpoint: {refused[0]}; give a --load "
            "that holds one, or none and a new --save to start from random weights"
        )
    if refused:
        log(f"WARNING: {checkpoint.path} is loaded, the newest valid checkpoint there")
    for name in names:
        match = _ITERATION.fullmatch(name)
        if checkpoint.iteration == tracked and match and int(match[1]) > tracked and not match[2]:
            log(
                f"WARNING: {directory / name} is newer than iteration {tracked}, which {TRACKER} names and "
                "which is loaded; it will be renamed aside when its number is saved again"
            )
    return checkpoint


def _proposals(directory: Path) -> tuple[int | None, list[str], list[str]]:
    """The tracker's iteration, the names of what to try in this order, and what is wrong so far."""
    names = [match[0] for match in _found(directory)]
    tracker = directory / TRACKER
    if os.path.lexists(tracker) and not tracker.is_file():  # a pipe would keep us waiting
        return None, names, [f"{tracker}: is no file"]
    try:
        with open(tracker, "rb") as stream:
            text = stream.read(80)
    except FileNotFoundError:
        return None, names, [f"{tracker}: missing"] if names else []
    except OSError as error:
        return None, names, [f"{tracker}: cannot be read: {error.strerror}"]
    if not re.fullmatch(rb"\s*\d{1,12}\s*", text):
        return None, names, [f"{tracker}: holds {text!r} instead of the number of an iteration"]
    tracked = f"iter_{int(text):07d}"
    return int(text), [tracked] + [name for name in names if name != tracked], []


def _open_together(path: Path, rank: int, gather: Gather, verify: bool) -> tuple[Checkpoint | None, str]:
    """The checkpoint at `path` if every rank finds it valid, else why not. All ranks take the same branches."""
    checkpoint = None
    try:
        if not path.is_dir():
            raise ValueError(f"{path}: missing, though {TRACKER} names it")
        checkpoint = Checkpoint(path)
        seen = checkpoint.digest
    except ValueError as error:
        seen = str(error)
    answers = gather(seen)
    odd = next((other for other, answer in enumerate(answers) if answer != answers[0]), 0)
    if odd:
        return None, f"{path}: rank {odd} does not see the same there: do all nodes share the folder?"
    if checkpoint is None:
        return None, seen
    problem = next(filter(None, gather(checkpoint.damage(rank, len(answers), hashed=verify))), "")
    return (None, problem) if problem else (checkpoint, "")


def best_loss(folder: Path, data_fingerprint: str, log: Log) -> float:
    """The validation loss, in nats per token, of the checkpoint in `folder`. Infinite if the folder holds no valid
    checkpoint, or one that was trained on other data."""
    try:
        checkpoint = find_checkpoint(folder, log=log, verify=False)
    except ValueError as error:
        log(f"WARNING: {error}")
        return math.inf
    if checkpoint is None or checkpoint.facts.get("data_fingerprint") != data_fingerprint:
        return math.inf
    return float(checkpoint.facts.get("valid_loss", math.inf))


def set_best_aside(save: Path, log: Log) -> None:
    """Rename the best checkpoint of an earlier run, in the folder of one that starts from iteration 0."""
    if (save / BEST / TRACKER).exists():
        log(f"WARNING: {save / BEST} is of an earlier run: it is now {set_aside(save / BEST)}")


def lock_folder(folder: Path, log: Log) -> BinaryIO:
    """Make `folder` and lock it until the returned file is closed; the system closes it when this process dies.

    ValueError, one line, if another process has it, or if another run keeps its best checkpoint there. On a filesystem
    without locks nothing is locked, and `log` gets a warning.
    """
    if folder.name == BEST and (folder.parent / METRICS).exists():
        raise ValueError(
            f"--save {folder} is where the run in {folder.parent} keeps its best checkpoint: give another "
            "--save to train on from it"
        )
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
