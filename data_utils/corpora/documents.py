"""Documents out of files of loose JSON and plain text, compressed or not.

The names of files say which of a folder hold documents, and of what form. Bad lines are skipped, counted and named.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from data_utils.corpora.builtin import builtin_documents
from data_utils.files.compression import open_bytes

BUILTIN = "builtin"
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
TEXT_SUFFIX = ".txt"
COMPRESSED_SUFFIXES = (".gz", ".zst")
MANIFESTS = "manifests"  # the folder in which a stage of tools/openwebtext/ keeps its manifests, beside its output

DEFAULT_KEYS = ("text", "sentence")
MOST_BAD_LINES = 0.001
SHOWN_BAD_LINES = 5
HOPELESS_LINES = 1000  # bad ones before the first good one, at which the file or shard is refused

Log = Callable[[str], None]


def files_of(path: str, flag: str) -> list[str]:
    """The files that `path`, given with `flag`, stands for: the file itself, or the files of JSON and text in the
    folder, sorted by name. Hidden files and subfolders are left out. FileNotFoundError or ValueError names the flag."""
    if path != BUILTIN and Path(path).is_dir():
        found = list(map(str, documents_in(Path(path))))
        if not found:
            raise FileNotFoundError(f"{flag}: {path}: there is no file of JSON lines or text in this folder")
    else:
        found = [path]
    for file in found:
        check_exists(file, flag)
    return found


def documents_in(folder: Path) -> list[Path]:
    """The files of JSON lines or text in a folder, sorted by name. A hidden file is left out: it may be unfinished."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file()
        and not file.name.startswith(".")
        and uncompressed(file.name).endswith((*JSON_SUFFIXES, TEXT_SUFFIX))
    )


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


class Lines:
    """Counts the lines of a file, names the first bad ones, and refuses the file where they are too many."""

    def __init__(self, path: str, log: Log, max_bad_fraction: float) -> None:
        self.path, self.log, self.max_bad_fraction = path, log, max_bad_fraction
        self.good = self.empty = self.bad = 0
        self.first_bad = ""

    def skip(self, number: int, reason: str) -> None:
        """Count line `number`, which is unusable for `reason`. ValueError where the first HOPELESS_LINES all are."""
        self.bad += 1
        self.first_bad = self.first_bad or f"{self.path}:{number}: {reason}"
        if self.bad <= SHOWN_BAD_LINES:
            self.log(f"{self.path}:{number}: skipped: {reason}")
        if self.bad == HOPELESS_LINES and not self.good:
            self.check()  # rather now than after hours

    def check(self) -> None:
        """After the last line: ValueError where too many lines are bad or none holds text, else a line to the log."""
        lines = self.good + self.empty + self.bad
        if self.bad > self.max_bad_fraction * lines:
            advice = (
                "name the field that holds the text with --text-key, or mend the file"
                if is_json(self.path)
                else "convert the file to UTF-8"
            )
            raise ValueError(
                f"{self.first_bad}; {self.bad} of {lines} lines are unusable, more than "
                f"--max-bad-fraction {self.max_bad_fraction:g}: {advice}"
            )
        if not self.good:
            raise ValueError(f"{self.path} holds no text")
        if self.bad or self.empty:
            self.log(f"{self.path}: of {lines} lines {self.bad} bad and {self.empty} empty ones are skipped")


def documents(path: str, text_key: str | None, log: Log, max_bad_fraction: float = MOST_BAD_LINES) -> Iterator[str]:
    """The documents of one file in its order, none of them empty; `builtin` names the built-in corpus.

    JSON is recognised by the file's name: one object a line, or one array of objects. Any other file is one document.
    ValueError names the file and line where more than `max_bad_fraction` of the lines are unusable, and the file where
    it holds no text at all.
    """
    if path == BUILTIN:
        yield from builtin_documents()
        return
    lines = Lines(path, log, max_bad_fraction)
    content = _content(path)
    yield from _json_documents(content, text_key, lines) if is_json(path) else _plain_document(content, lines)


def default_key(path: str) -> str | None:
    """The field that `documents` reads where no text key is given. None where the file is not JSON, or where
    `documents` would refuse it. Reads the file up to the first object that has such a field."""
    if not is_json(path):
        return None
    items = (line for line in objects(_content(path), path) if not isinstance(line, bytes) or line.strip())
    for line in itertools.islice(items, HOPELESS_LINES):
        with contextlib.suppress(ValueError, RecursionError):
            key = _default_key(json_object(line))
            if key is not None:
                return key
    return None


def _content(path: str) -> Iterator[bytes]:
    """The lines of a file, decompressed."""
    with open_bytes(path) as file:
        yield from file


def _json_documents(content: Iterator[bytes], text_key: str | None, lines: Lines) -> Iterator[str]:
    for number, line in enumerate(objects(content, lines.path), 1):
        if isinstance(line, bytes) and not line.strip():
            continue
        try:
            item = json_object(line)
            if text_key is None:
                text_key = _default_key(item)
                if text_key is None:
                    raise ValueError(f"neither {' nor '.join(DEFAULT_KEYS)} is a field of it, {_keys(item)}")
                lines.log(f"{lines.path}: the text is the field {text_key!r} (--text-key)")
            text = text_of(item, text_key)
        except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            lines.skip(number, "nested too deeply" if isinstance(error, RecursionError) else str(error))
            continue
        if text:
            lines.good += 1
            yield text
        else:
            lines.empty += 1
    lines.check()


def json_object(line: Any) -> dict[str, Any]:
    """The object that a line of bytes holds, or `line` itself where it is an object. ValueError or RecursionError for
    anything else."""
    item = json.loads(line.decode("utf-8")) if isinstance(line, bytes) else line
    if not isinstance(item, dict):
        raise ValueError("not an object")
    return item


def text_of(item: dict[str, Any], key: str) -> str:
    """The text in the field `key`. ValueError says what is there instead."""
    if key not in item:
        raise ValueError(f"no field {key!r}, {_keys(item)}")
    text = item[key]
    if not isinstance(text, str):
        raise ValueError(f"the field {key!r} is not a string")
    utf8(text)
    return text


def utf8(text: str) -> bytes:
    """`text` as UTF-8; ValueError where it holds a lone surrogate, which tokenizer libraries replace silently."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text with a lone surrogate {text[error.start]!r} at character {error.start} is not Unicode"
        ) from None


def _default_key(item: dict[str, Any]) -> str | None:
    return next((key for key in DEFAULT_KEYS if key in item), None)


def objects(content: Iterable[bytes], path: str) -> Iterator[Any]:
    """The items of a file that is one JSON array; of any other file its lines, as bytes. ValueError where an array is
    damaged."""
    begun, content = False, iter(content)
    for line in content:
        if not begun:
            line = line.removeprefix(b"\xef\xbb\xbf")
            if line.lstrip()[:1] == b"[":
                try:
                    yield from json.loads((line + b"".join(content)).decode("utf-8"))
                    return
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path} begins as a JSON array but is none: {error}") from None
            begun = bool(line.strip())
        yield line


def _keys(item: dict[str, Any]) -> str:
    return "which has " + (", ".join(repr(key) for key in list(item)[:10]) or "no fields")


def _plain_document(content: Iterator[bytes], lines: Lines) -> Iterator[str]:
    """The whole file as one document, byte for byte but for lines that are not UTF-8."""
    parts = []
    for number, line in enumerate(content, 1):
        try:
            parts.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            lines.skip(number, str(error))
    lines.good = len(parts)
    lines.check()
    yield "".join(parts)
