"""Which files hold documents: by their names, in the folders that flags name."""

from __future__ import annotations

import os
from pathlib import Path

BUILTIN = "builtin"
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
TEXT_SUFFIX = ".txt"
COMPRESSED_SUFFIXES = (".gz", ".zst")
MANIFESTS = "manifests"  # the folder in which a stage of tools/openwebtext/ keeps its manifests, beside its output


def files_of(path: str, flag: str) -> list[str]:
    """The files that `path`, given with `flag`, stands for: the file itself, or the files of JSON and text in the
    folder, sorted by name. Hidden files and subfolders are left out. FileNotFoundError or ValueError names the flag."""
    if path != BUILTIN and Path(path).is_dir():
        found = sorted(str(file) for file in Path(path).iterdir() if file.is_file() and holds_documents(file.name))
        if not found:
            raise FileNotFoundError(f"{flag}: {path}: there is no file of JSON lines or text in this folder")
    else:
        found = [path]
    for file in found:
        check_exists(file, flag)
    return found


def holds_documents(name: str) -> bool:
    """Whether a name in a folder is that of a file of JSON lines or text. A hidden file is not: it may be unfinished.
    """
    return not name.startswith(".") and uncompressed(name).endswith((*JSON_SUFFIXES, TEXT_SUFFIX))


def uncompressed(name: str) -> str:
    """A file's name without the suffix of its compression."""
    return name.removesuffix(".gz").removesuffix(".zst")


def check_exists(path: str, flag: str) -> None:
    """FileNotFoundError or ValueError where `path`, given with `flag`, is not a file."""
    if path != BUILTIN and not Path(path).exists():
        raise FileNotFoundError(f"{flag}: no such file: {path}")
    if path != BUILTIN and not Path(path).is_file():
        raise ValueError(f"{flag}: {path} is not a file: name the files in it")
    if path != BUILTIN and not os.access(path, os.R_OK):
        raise ValueError(f"{flag}: {path} may not be read by this user")


def is_json(path: str) -> bool:
    """Whether a file's name says that it holds JSON."""
    return Path(uncompressed(path)).suffix.lower() in JSON_SUFFIXES
