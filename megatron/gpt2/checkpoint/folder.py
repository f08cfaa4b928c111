"""A --save folder: which of its checkpoints is loaded, which is the best one, one run in it at a time; and which program
wrote what a --load names.

`latest_checkpointed_iteration.txt`, the tracker, names the iteration to load. A number that is saved again has its
existing folder renamed aside, `iter_0000300.old-1`. `best/` (--keep-best) holds the checkpoint with the lowest
validation loss, as a folder like the one around it, for `--load`: iter_0000700/, its tracker, tokenizer/. The loss is
only in the manifest of that checkpoint. A run that continues reads it from there.

The checkpoints of other programs are told by the names of their files, so that training can refuse them.
`megatron/gpt2/formats/` reads those, for `tools/checkpoint.py`. The training program does not import it.
"""

import json
import math
import os
import re
import shlex
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from data_utils.command_line import how_to_call
from data_utils.files import errors_of, take_lock
from megatron.gpt2.checkpoint.reader import MANIFEST, Checkpoint
from megatron.gpt2.monitor.run_log import set_aside
from megatron.gpt2.monitor.run_report import METRICS

TRACKER = "latest_checkpointed_iteration.txt"
BEST = "best"
_ITERATION = re.compile(r"iter_(\d{7,12})(?:\.old-(\d{1,3}))?", re.ASCII)
# A format, and patterns of the files that all lie in the folder of its iteration. "megatron" is all versions.
SIGNS = (
    ("native", MANIFEST),
    ("torch_dist", ".metadata", "metadata.json"),
    ("dcp", ".metadata"),
    ("megatron", "mp_rank_*/model*rng.pt"),
    ("deepspeed", "mp_rank_*_model_states.pt"),
    ("huggingface", "config.json", "model.safetensors*"),
    ("huggingface", "config.json", "pytorch_model.bin*"),
    ("nanogpt", "ckpt.pt"),
)
OF_A_FOLDER = re.compile(r"model(_optim)?_rng\.pt|common\.pt|mp_rank_.*")  # files with the suffix of nanoGPT's
Log = Callable[[str], None]
Gather = Callable[[str], list[str]]  # the texts of all ranks, by rank: every rank calls it with its own


class NoValidCheckpoint(ValueError):
    """A folder has checkpoints, and all are damaged."""

    cause = "damaged checkpoint"


def alone(text: str) -> list[str]:
    """`Gather` for one rank."""
    return [text]


def iterations(directory: Path, *, aside: bool = False) -> list[tuple[int, Path]]:
    """The iterations in `directory`, the newest first, each with its folder; with `aside`, after all of them those that
    were renamed aside."""
    names = os.listdir(directory) if directory.is_dir() else []
    found = [match for match in map(_ITERATION.fullmatch, names) if match and (aside or not match[2])]
    found.sort(key=lambda match: (not match[2], int(match[1]), int(match[2] or 0)), reverse=True)
    return [(int(match[1]), directory / match[0]) for match in found]


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
    tracked, names, *problems = json.loads(gather(json.dumps(_proposals(directory)) if rank == 0 else "")[0])
    checkpoint = None
    for name in names:
        try:
            checkpoint = _open_together(directory / name, rank, gather, verify)
            break
        except ValueError as error:
            problems.append(str(error))
    for problem in problems:
        log(f"WARNING: {problem}")
    if checkpoint is None:
        if problems:
            raise NoValidCheckpoint(
                f"{directory}: holds no valid checkpoint: {problems[0]}; give a --load "
                "that holds one, or none and a new --save to start from random weights"
            )
        return None
    if problems:
        log(f"WARNING: {checkpoint.path} is loaded, the newest valid checkpoint there")
    for number, newer in iterations(directory):
        if checkpoint.iteration == tracked < number:
            log(
                f"WARNING: {newer} is newer than iteration {tracked}, which {TRACKER} names and "
                "which is loaded; it will be renamed aside when its number is saved again"
            )
    return checkpoint


def _proposals(directory: Path) -> tuple[Any, ...]:
    """The tracker's iteration, the names of what to try in this order, and what is wrong with the tracker, if
    anything is."""
    names = [path.name for _, path in iterations(directory, aside=True)]
    tracker = directory / TRACKER
    if not names and not os.path.lexists(tracker):
        return None, names
    try:
        with errors_of(tracker):
            if not tracker.is_file():  # a pipe would keep us waiting
                raise ValueError("is no file" if os.path.lexists(tracker) else "missing")
            text = _beginning(tracker)
            if not re.fullmatch(rb"\s*\d{1,12}\s*", text):
                raise ValueError(f"holds {text!r} instead of the number of an iteration")
    except ValueError as error:
        return None, names, str(error)
    tracked = f"iter_{int(text):07d}"
    return int(text), [tracked, *(name for name in names if name != tracked)]


def _beginning(path: Path) -> bytes:
    with open(path, "rb") as stream:
        return stream.read(80)


def _open_together(path: Path, rank: int, gather: Gather, verify: bool) -> Checkpoint:
    """The checkpoint at `path` if every rank finds it valid, else ValueError. All ranks take the same branches."""
    checkpoint = None
    try:
        if not path.is_dir():
            raise ValueError(f"{path}: missing, though {TRACKER} names it")
        checkpoint = Checkpoint(path)
        seen = checkpoint.digest
    except ValueError as error:
        seen = str(error)
    answers = gather(seen)
    for other, answer in enumerate(answers):
        if answer != answers[0]:
            raise ValueError(f"{path}: rank {other} does not see the same there: do all nodes share the folder?")
    if checkpoint is None:
        raise ValueError(seen)
    for problem in gather(checkpoint.damage(rank, len(answers), hashed=verify)):
        if problem:
            raise ValueError(problem)
    return checkpoint


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


def recognise(path: str | Path, iteration: int | None = None) -> tuple[str, Path] | None:
    """The format of what lies at `path`, and the thing to open: an iteration's folder, or a file. No file is read.

    If a folder holds several iterations: `iteration`, else the tracker's, else the newest. None if nothing is known.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".pt" and not OF_A_FOLDER.fullmatch(path.name):
        return "nanogpt", path
    for folder in (path.parent, path.parent.parent) if path.is_file() else _candidates(path, iteration):
        for format, *patterns in SIGNS:
            if all(any(folder.glob(pattern)) for pattern in patterns):
                return format, folder / "ckpt.pt" if format == "nanogpt" else folder
    return None


def _candidates(path: Path, iteration: int | None) -> Iterator[Path]:
    """`path` itself, and the folders inside of it that may hold the iteration, the likeliest first."""
    yield path
    names = [str(iteration), f"global_step{iteration}"]
    if iteration is None:
        trackers = (path / TRACKER, path / "latest")  # Megatron's and ours; DeepSpeed's
        names = [_beginning(file).decode("ascii", "replace").strip() for file in trackers if file.is_file()]
    for name in names:
        if re.fullmatch(r"\w[\w.-]*", name, re.ASCII):  # no way out of the folder
            yield from (path / f"iter_{int(name):07d}", path / name) if name.isdigit() else (path / name,)
    if iteration is None:
        yield from (folder for _, folder in iterations(path))


def refuse_foreign(load: str | Path, *, num_attention_heads: int | None = None, with_tokenizer: bool = False) -> None:
    """Another program's checkpoint is converted first, once: ValueError with the command.

    with_tokenizer: the result needs a tokenizer, because no flag will say which.
    """
    format, _ = recognise(load) or ("native", None)
    if format == "native":
        return
    flags = ""
    if format in ("megatron", "deepspeed", "dcp"):  # these may lack the number of heads
        flags = f" --num-attention-heads {num_attention_heads or 'N'}"
    if with_tokenizer and format != "huggingface":
        flags += " --vocab-file FILE --merge-file FILE"
    folder = shlex.quote(str(load).rstrip("/"))
    raise ValueError(
        f"--load {load} is a checkpoint in the format {format}: {how_to_call('checkpoint')} convert "
        f"{folder} {folder}_native --to native{flags} converts it; then --load {folder}_native"
    )
