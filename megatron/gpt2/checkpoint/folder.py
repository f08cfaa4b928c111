"""Save and load: the commit protocol, and the way back from damage.

    checkpoints/gpt2_345m/
      latest_checkpointed_iteration.txt     the tracker: the iteration to load
      iter_0000300/manifest.json, boxes/rank_00000.jsonl, mp_rank_00/model.safetensors, master_dp_00.safetensors, ...

Every rank writes its files into `iter_0000300.tmp-<attempt>/`, and last its table: the boxes and hashes of what it
wrote. Rank 0 waits for all tables, writes the manifest, renames the folder and replaces the tracker. Nothing here
is a collective operation, and a crash at any moment leaves the earlier checkpoints and their tracker untouched.

`attempt` is a word that all ranks share and that no other save shares (one random number, broadcast when the run
starts, with a count of its saves). It keeps what a crashed attempt left behind, files and tables alike, out of this
one without any waiting: its folder has another name. Rank 0 removes such folders when it next saves.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from data_utils.files import sync_folder
from megatron.gpt2.checkpoint.files import THREADS, Piece, in_threads, write_synced, write_tensors
from megatron.gpt2.checkpoint.gathering import Parts, gather_tables, share_line, write_failure, write_table
from megatron.gpt2.checkpoint.manifest import MANIFEST
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.state import load_model, load_rng, load_state, model_pieces, rng_pieces, state_pieces

__all__ = [
    "TRACKER",
    "Checkpoint",
    "Piece",
    "find_checkpoint",
    "load_model",
    "load_rng",
    "load_state",
    "model_pieces",
    "rng_pieces",
    "state_pieces",
    "write_checkpoint",
]

TRACKER = "latest_checkpointed_iteration.txt"
_OLD = 1000  # an iteration is renamed aside fewer times than this
_ITERATION = re.compile(r"iter_(\d{7,12})(?:\.old-(\d{1,3}))?", re.ASCII)


def write_checkpoint(
    directory: str | Path,
    iteration: int,
    *,
    facts: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Piece]],
    rank: int,
    world_size: int,
    attempt: str,
    timeout_s: float,
    log: Callable[[str], None] = print,
    keep_last: int | None = None,
    parts: Parts | None = None,
) -> Path:
    """Write this rank's `files` ({path in the iteration's folder: {tensor name: piece}}); rank 0 commits.

    All ranks call it at the same step. Rank 0 returns once the checkpoint is committed, each other rank once its part
    is on the disk. facts: what the manifest says about the run, in JSON's types; read on rank 0 alone. keep_last: how
    many iterations rank 0 leaves, this one among them (default: all).

    OSError, one line, where this rank cannot write, and on rank 0 where any rank cannot. TimeoutError, which is an
    OSError, where a rank's part is missing after `timeout_s` seconds, or a few seconds after `parts.hurry` is set.
    """
    directory, parts = Path(directory), parts or Parts()
    final = directory / f"iter_{iteration:07d}"
    folder = directory / f"{final.name}.tmp-{attempt}"
    if rank == 0:
        for stale in set(directory.glob("iter_*.tmp-*")) - {folder}:  # others may be writing into that one already
            shutil.rmtree(stale, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        tensors: dict[str, Any] = {}
        listed: dict[str, Any] = {}
        # What is made when it is written may be as large as memory: one at a time.
        streamed = any(piece.make for pieces in files.values() for piece in pieces.values())
        for written in in_threads(
            lambda file: write_tensors(folder, file, iteration, files[file]), files, 1 if streamed else THREADS
        ):
            tensors.update(written["tensors"])
            listed.update(written["files"])
        write_table(folder, rank, tensors, listed)
        parts.own.set_result(None)
        if rank == 0:
            contents = gather_tables(folder, world_size, timeout_s, parts)
            _commit(folder, final, contents.manifest_bytes(iteration, facts), log)
    except BaseException as error:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            # Room for the word of the failure, so that rank 0 need not wait for the time-out.
            with contextlib.suppress(OSError):
                for file in files:
                    (folder / file).unlink(missing_ok=True)
                write_failure(folder, rank, error)
        raise
    if rank == 0 and keep_last is not None:
        _remove_older(directory, iteration, keep_last, log)
    return final


def _commit(folder: Path, final: Path, manifest: bytes, log: Callable[[str], None]) -> None:
    """Make `folder`, complete but for its manifest, the checkpoint `final`."""
    write_synced(folder / MANIFEST, manifest)
    try:
        written = Checkpoint(folder)  # what cannot be opened must not be committed
    except ValueError as error:
        raise OSError(f"not what was written: {error}") from error
    for parent in [*(path for path in folder.iterdir() if path.is_dir()), folder]:
        sync_folder(parent)
    tracker = final.parent / TRACKER
    successor = tracker.with_name(TRACKER + ".tmp")
    write_synced(successor, f"{written.iteration}\n".encode())  # now: a full disk must not stop us half-way
    if final.exists():
        aside = _aside(final)
        log(f"WARNING: {final} exists already and is saved again: the existing one is now {aside}")
        final.rename(aside)
    folder.rename(final)
    sync_folder(final.parent)
    # The tracker comes last: a crash before this line leaves the earlier checkpoint in charge.
    successor.replace(tracker)
    sync_folder(final.parent)


def _remove_older(directory: Path, iteration: int, keep_last: int, log: Callable[[str], None]) -> None:
    """Remove iterations before `iteration`, which is committed and in the tracker; the newest `keep_last` - 1 stay.

    Newer ones, and those that were renamed aside, belong to another course of the run, and a person decides about them.
    A folder is first renamed to a name that no load takes and that the next save clears away.
    """
    found = [match for match in map(_ITERATION.fullmatch, os.listdir(directory)) if match and match[2] is None]
    older = sorted(int(match[1]) for match in found if int(match[1]) < iteration)
    try:
        for number in older[: max(0, len(older) - keep_last + 1)]:
            folder = _path(directory, number * _OLD)
            removed = folder.rename(f"{folder}.tmp-removed")
            sync_folder(directory)
            shutil.rmtree(removed)
    except OSError as error:
        log(f"WARNING: --keep-last {keep_last}: {error.filename} could not be removed: {error.strerror}")


def set_newer_aside(directory: str | Path, iteration: int, log: Callable[[str], None]) -> int:
    """Rename the checkpoints beyond `iteration` aside, and let the tracker name the newest of the others: its
    iteration, or -1, with nothing changed, where there is none. Rank 0 calls it, while no save is under way."""
    directory = Path(directory)
    found = sorted(
        int(match[1]) for match in map(_ITERATION.fullmatch, os.listdir(directory)) if match and match[2] is None
    )
    if not (older := [number for number in found if number <= iteration]):
        return -1
    # First: a crash after it leaves a tracker that is right.
    successor = directory / f"{TRACKER}.tmp"
    write_synced(successor, f"{older[-1]}\n".encode())
    successor.replace(directory / TRACKER)
    for number in found[len(older) :]:
        folder = _path(directory, number * _OLD)
        log(f"{folder} is now {folder.rename(_aside(folder))}")
    sync_folder(directory)
    return older[-1]


def _aside(folder: Path) -> Path:
    """A name that an existing checkpoint gets when its number is needed."""
    return next(path for old in range(1, _OLD) if not (path := Path(f"{folder}.old-{old}")).exists())


def find_checkpoint(
    directory: str | Path,
    *,
    log: Callable[[str], None],
    max_over_ranks: Callable[[int], int] = lambda n: n,
    share: tuple[int, int] = (0, 1),
    verify: bool = True,
) -> Checkpoint | None:
    """The checkpoint to load: the tracker's, or where that is damaged or missing the newest valid one, loudly.

    All ranks call it, with `share` = (rank, world size) and `max_over_ranks` = the largest of all ranks' numbers (a
    collective on a 64-bit integer), and all get the same answer: rank 0 proposes, everyone opens, each hashes its
    share of the files (`verify`), and a checkpoint counts where all agree. An iteration that was renamed aside is the
    last resort. Nothing is changed on the disk. `log` gets the warnings on every rank, those about the tracker on
    rank 0 alone.

    Returns None where the folder is missing or holds no checkpoint. ValueError where it holds some and none is valid.
    """
    directory = Path(directory)
    tracked, proposals, refused = _proposals(directory) if share[0] == 0 else (None, [], [])
    if not max_over_ranks(len(proposals) + len(refused)):
        return None
    for warning in refused:
        log(f"WARNING: {warning}")
    for i in range(max_over_ranks(len(proposals))):
        path = _path(directory, max_over_ranks(proposals[i] if share[0] == 0 else 0))
        checkpoint, problem = _open_together(path, max_over_ranks, share, verify)
        if checkpoint is not None:
            break
        log(f"WARNING: {problem}")
        refused.append(problem)
    else:
        raise ValueError(
            f"{directory}: holds no valid checkpoint: {next(iter(refused), 'see rank 0')}; give a --load "
            "that holds one, or none and a new --save to start from random weights"
        )
    if refused:
        log(f"WARNING: {checkpoint.path} is loaded, the newest valid checkpoint there")
    for proposal in proposals:
        if tracked is not None and checkpoint.iteration == tracked < proposal // _OLD and not proposal % _OLD:
            log(
                f"WARNING: {_path(directory, proposal)} is newer than iteration {tracked}, which {TRACKER} names and "
                "which is loaded; it will be renamed aside when its number is saved again"
            )
    return checkpoint


def _open_together(
    path: Path, max_over_ranks: Callable[[int], int], share: tuple[int, int], verify: bool
) -> tuple[Checkpoint | None, str]:
    """The checkpoint at `path` if every rank finds it valid, else why not. The branches depend on shared numbers."""
    rank, world_size = share
    checkpoint, problem = None, ""
    try:
        if not path.is_dir():
            raise ValueError(f"{path}: missing, though {TRACKER} names it")
        checkpoint = Checkpoint(path)
    except ValueError as error:
        problem = str(error)
    seen = int(checkpoint.digest[:15], 16) if checkpoint else -1
    same = seen == max_over_ranks(seen)
    odd = max_over_ranks(0 if checkpoint and same else rank + 1)
    if odd or checkpoint is None:
        return None, problem or f"{path}: rank {odd - 1} does not see the same there: do all nodes share the folder?"
    problem = share_line(checkpoint.damage(rank, world_size, hashed=verify), rank, max_over_ranks)
    return (None, problem) if problem else (checkpoint, "")


def _proposals(directory: Path) -> tuple[int | None, list[int], list[str]]:
    """The tracker's iteration, what to try in this order (as numbers for `_path`), and what is wrong so far."""
    found = [match for match in map(_ITERATION.fullmatch, os.listdir(directory) if directory.is_dir() else ()) if match]
    numbers = [int(match[1]) * _OLD + int(match[2] or 0) for match in found]
    numbers.sort(key=lambda number: (number % _OLD == 0, number // _OLD, number), reverse=True)
    tracker = directory / TRACKER
    if os.path.lexists(tracker) and not tracker.is_file():  # a pipe would keep us waiting
        return None, numbers, [f"{tracker}: is no file"]
    try:
        with open(tracker, "rb") as stream:
            text = stream.read(80)
    except FileNotFoundError:
        return None, numbers, [f"{tracker}: missing"] if numbers else []
    except OSError as error:
        return None, numbers, [f"{tracker}: cannot be read: {error.strerror}"]
    if not re.fullmatch(rb"\s*\d{1,12}\s*", text):
        return None, numbers, [f"{tracker}: holds {text!r} instead of the number of an iteration"]
    tracked = int(text)
    return tracked, [tracked * _OLD] + [number for number in numbers if number != tracked * _OLD], []


def _path(directory: Path, number: int) -> Path:
    return directory / (f"iter_{number // _OLD:07d}" + (f".old-{number % _OLD}" if number % _OLD else ""))
