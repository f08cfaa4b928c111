"""The --save folder: find the checkpoint to load, find the best checkpoint, make the folder, detect a checkpoint's
format.

The latest-iteration file, `latest_checkpointed_iteration.txt` (`LATEST_FILE`), names the iteration to load. If an
iteration is saved again, its existing folder is renamed to `iter_0000300.old-1`. `best/` (--keep-best) contains the
checkpoint with the lowest validation loss: iter_0000700/, a latest-iteration file and tokenizer/, so that `--load` can
open `best/`. A resumed run reads the lowest loss from the manifest in `best/`.

save_folder.py also recognises checkpoints of other programs by file names, so that training can refuse them.
`tools/checkpoint.py` reads such checkpoints with `megatron/gpt2/formats/`, which the training program does not import.
"""

import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from data_utils.command_line import Log, how_to_call
from data_utils.files import add_path, make_folder, rename_old, wrap_errors
from megatron.gpt2.checkpoint.reader import MANIFEST, NativeCheckpoint
from megatron.gpt2.monitor.html_report import METRICS

LATEST_FILE = "latest_checkpointed_iteration.txt"
BEST = "best"

_ITERATION = re.compile(r"iter_(\d{7,12})(?:\.old-(\d{1,3}))?", re.ASCII)
# (format, patterns of files in the folder of an iteration). "megatron" stands for all versions of Megatron's formats.
FORMAT_FILES = (
    ("native", MANIFEST),
    ("torch_dist", ".metadata", "metadata.json"),
    ("dcp", ".metadata"),
    ("megatron", "mp_rank_*/model*rng.pt"),
    ("deepspeed", "mp_rank_*_model_states.pt"),
    ("huggingface", "config.json", "model.safetensors*"),
    ("huggingface", "config.json", "pytorch_model.bin*"),
    ("nanogpt", "ckpt.pt"),
)
# files that a folder of nanoGPT does not contain
FOLDER_FILES = re.compile(r"model(_optim)?_rng\.pt|common\.pt|mp_rank_.*")
# a collective: each rank passes a text, and gets the texts of all ranks in their order
Gather = Callable[[str], list[str]]


class NoValidCheckpoint(ValueError):
    """Raised if every checkpoint of a folder is damaged."""

    cause = "damaged checkpoint"


class FolderInUse(ValueError):
    """Raised if another process uses the folder.

    exit_code: the exit code of a process that the error ends.
    """

    exit_code = 2


def gather_alone(text: str) -> list[str]:
    """Gather the texts of a run with one rank (`Gather`)."""
    return [text]


def list_iterations(directory: Path, *, include_old: bool = False) -> list[tuple[int, Path]]:
    """Return the iterations in `directory` and their folders, the newest first. With `include_old`, folders that were
    renamed to `.old-N` follow."""
    names = os.listdir(directory) if directory.is_dir() else []
    matches = [match for match in map(_ITERATION.fullmatch, names) if match and (include_old or not match[2])]
    matches.sort(key=lambda match: (not match[2], int(match[1]), int(match[2] or 0)), reverse=True)
    return [(int(match[1]), directory / match[0]) for match in matches]


def find_checkpoint(
    directory: str | Path, *, log: Log, rank: int = 0, gather: Gather = gather_alone, verify: bool = True
) -> NativeCheckpoint | None:
    """Open the checkpoint that `LATEST_FILE` names. If the named checkpoint is damaged or missing, open the newest
    valid one and warn.

    All ranks call this function and get the same result. Rank 0 proposes a checkpoint, every rank opens it, and each
    rank hashes its share of the files (`verify`). The checkpoint is used if it is valid on all ranks. Folders renamed
    to `.old-N` are tried last, unless the iteration in `LATEST_FILE` has no other folder. Nothing on the disk changes.
    Every rank logs the warnings.

    Return None if the folder does not exist or has no checkpoint. Raises ValueError if all its checkpoints are
    damaged.
    """
    directory = Path(directory)
    tracked, names, *problems = json.loads(gather(json.dumps(_load_order(directory)) if rank == 0 else "")[0])
    checkpoint = None
    for name in names:
        try:
            checkpoint = _open_on_all_ranks(directory / name, rank, gather, verify)
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
    for number, newer in list_iterations(directory):
        if checkpoint.iteration == tracked < number:
            log(
                f"WARNING: {newer} is newer than iteration {tracked}, which {LATEST_FILE} names and "
                "which is loaded; it will be renamed to .old-N when its iteration is saved again"
            )
    return checkpoint


def _load_order(directory: Path) -> tuple[Any, ...]:
    """Return the iteration in `LATEST_FILE`, the folder names in the order to try them, and any problem with
    `LATEST_FILE`."""
    names = [path.name for _, path in list_iterations(directory, include_old=True)]
    latest_file = directory / LATEST_FILE
    if not names and not os.path.lexists(latest_file):
        return None, names
    try:
        with wrap_errors(latest_file):
            if not latest_file.is_file():  # Opening a pipe would wait for a writer.
                raise ValueError("is not a file" if os.path.lexists(latest_file) else "missing")
            text = _read_start(latest_file)
            if not re.fullmatch(rb"\s*\d{1,12}\s*", text):
                raise ValueError(f"holds {text!r} instead of the number of an iteration")
    except ValueError as error:
        return None, names, str(error)
    preferred = [f"iter_{int(text):07d}"]
    if preferred[0] not in names:  # A crash between the two renames of a commit leaves only a folder `.old-N`.
        preferred += [name for name in names if name.startswith(f"{preferred[0]}.")][:1]
    return int(text), [*preferred, *(name for name in names if name not in preferred)]


def _read_start(path: Path) -> bytes:
    with open(path, "rb") as stream:
        return stream.read(80)


def _open_on_all_ranks(path: Path, rank: int, gather: Gather, verify: bool) -> NativeCheckpoint:
    """Open the checkpoint at `path`. If the checkpoint is not valid on one rank, every rank raises ValueError."""
    checkpoint = None
    try:
        if not path.is_dir():
            raise ValueError(f"{path}: missing, but {LATEST_FILE} names it")
        checkpoint = NativeCheckpoint(path)
        seen = checkpoint.manifest_sha256
    except ValueError as error:
        seen = str(error)
    answers = gather(seen)
    for other, answer in enumerate(answers):
        if answer != answers[0]:
            raise ValueError(f"{path}: rank {other} sees different files there: do all nodes share the folder?")
    if checkpoint is None:
        raise ValueError(seen)
    for problem in gather(checkpoint.find_damage(rank, len(answers), check_hashes=verify)):
        if problem:
            raise ValueError(problem)
    return checkpoint


def saved_best_loss(folder: Path, data: Mapping[str, str], log: Log) -> float:
    """Return the validation loss, in nats per token, of the checkpoint in `folder`. Return infinity if the folder has
    no valid checkpoint, or if the checkpoint has other fingerprints than `data`.

    data: the metadata `data_fingerprint` and `held_out_fingerprint`. Older checkpoints lack the second one.
    """
    try:
        checkpoint = find_checkpoint(folder, log=log, verify=False)
    except ValueError as error:
        log(f"WARNING: {error}")
        return math.inf
    if checkpoint is None or any(checkpoint.metadata.get(name, data[name]) != data[name] for name in data):
        return math.inf
    return float(checkpoint.metadata.get("valid_loss", math.inf))


def rename_old_best(save: Path, log: Log) -> None:
    """Rename `best/` of an earlier run in `save`. A run that starts at iteration 0 calls this function."""
    if (save / BEST / LATEST_FILE).exists():
        log(f"WARNING: {save / BEST} is of an earlier run: it is now {rename_old(save / BEST)}")


def make_save_folder(folder: Path) -> None:
    """Make `folder`. Raises ValueError, in one line, if the folder cannot be written or is the `best/` folder of a
    different run."""
    if folder.name == BEST and (folder.parent / METRICS).exists():
        raise ValueError(
            f"--save {folder} is where the run in {folder.parent} keeps its best checkpoint: give another "
            "--save to train on from it"
        )
    try:
        make_folder(folder)
    except OSError as error:
        add_path(error, folder)
        raise ValueError(f"--save {folder}: cannot be written: {error.strerror}") from error


def detect_format_by_file_names(path: str | Path, iteration: int | None = None) -> tuple[str, Path] | None:
    """Return the format of the checkpoint at `path`, and the iteration's folder or the file to open. None if the format
    is unknown. The function reads only file names and the latest-iteration file.

    If a folder has several iterations, the function chooses `iteration`. If `iteration` is None, the function chooses
    the iteration that `LATEST_FILE` names, or the newest iteration if this file does not exist.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".pt" and not FOLDER_FILES.fullmatch(path.name):
        return "nanogpt", path
    for folder in (path.parent, path.parent.parent) if path.is_file() else _candidates(path, iteration):
        for format, *patterns in FORMAT_FILES:
            if all(any(folder.glob(pattern)) for pattern in patterns):
                return format, folder / "ckpt.pt" if format == "nanogpt" else folder
    return None


def _candidates(path: Path, iteration: int | None) -> Iterator[Path]:
    """Yield `path` and its subfolders that may be the folder of the iteration, the most likely one first."""
    yield path
    names = [str(iteration), f"global_step{iteration}"]
    if iteration is None:
        # Megatron and this project use the first name, DeepSpeed the second.
        latest_files = (path / LATEST_FILE, path / "latest")
        names = [_read_start(file).decode("ascii", "replace").strip() for file in latest_files if file.is_file()]
    for name in names:
        if re.fullmatch(r"\w[\w.-]*", name, re.ASCII):  # a name that does not lead out of the folder
            yield from (path / f"iter_{int(name):07d}", path / name) if name.isdigit() else (path / name,)
    if iteration is None:
        yield from (folder for _, folder in list_iterations(path))


def require_native_format(
    load: str | Path, *, num_attention_heads: int | None = None, with_tokenizer: bool = False
) -> None:
    """Raise ValueError if `load` is an iteration's folder or another program's checkpoint. The message for a checkpoint
    of another program contains the command that converts it.

    with_tokenizer: the command asks for the tokenizer's files, because the caller has no flag for them.
    """
    format, path = detect_format_by_file_names(load) or ("native", None)
    if format == "native":
        if path == Path(load):
            raise ValueError(
                f"--load {load} is the folder of an iteration: give --load {path.parent}, whose {LATEST_FILE} names "
                "the iteration"
            )
        return
    flags = ""
    # The formats whose files may lack the number of heads.
    if num_attention_heads and format in ("megatron", "deepspeed", "dcp"):
        flags = f" --num-attention-heads {num_attention_heads}"
    if with_tokenizer and format != "huggingface":
        flags += " --vocab-file FILE --merge-file FILE"
    folder = shlex.quote(str(load).rstrip("/"))
    raise ValueError(
        f"--load {load}: convert it first: {how_to_call('checkpoint')} convert {folder} {folder}_native --to native"
        f"{flags}; then --load {folder}_native (it is in the format {format})"
    )
