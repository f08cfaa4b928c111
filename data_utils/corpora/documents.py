"""Documents out of files of loose JSON and plain text, compressed or not, and the names that stand for such files.

The names of files say which of a folder hold documents, and of what form. Bad lines are skipped, counted and named.

`--train-data wikipedia` reads the files that an entry of a JSON file lists:

    {"wikipedia": {"files": ["data/wikipedia/wikidump_lines.json"], "text_key": "text"}}

The file is $MEGATRON_CORPORA, else data/corpora.json in the current folder, else the one of this checkout. A path in it
is relative to the current folder, as a path on the command line is; `text_key` may be left out.
"""

import contextlib
import gzip
import io
import itertools
import json
import os
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from data_utils.command_line import how_to_call
from data_utils.corpora.builtin import builtin_documents

BUILTIN = "builtin"
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
TEXT_SUFFIX = ".txt"
COMPRESSED_SUFFIXES = (".gz", ".zst")
MANIFESTS = "manifests"  # the folder in which a stage of tools/openwebtext/ keeps its manifests, next to its output
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
ZSTD_SKIPPABLE = b"\x2a\x4d\x18"  # after a first byte of 0x50 to 0x5f; pzstd begins its files so
BLOCK = 1 << 18
BOM = b"\xef\xbb\xbf"

DEFAULT_KEYS = ("text", "sentence")
MOST_BAD_LINES = 0.001
SHOWN_BAD_LINES = 5
HOPELESS_LINES = 1000  # bad ones before the first good one, at which the file or shard is refused

SHIPPED_CORPORA = Path("data", "corpora.json")
CORPORA_VARIABLE = "MEGATRON_CORPORA"

Log = Callable[[str], None]
Corpus = tuple[tuple[str, ...], str | None]  # files, text key


# --- which files


def find_corpora(flags: Mapping[str, Sequence[str]], text_key: str | None) -> tuple[list[tuple[str, ...]], str | None]:
    """The files of each flag, in order, with a named corpus replaced by its files; and the text key: the one that is
    given, else that of the corpora.

    flags: the words of each flag. A path that holds a "/" or a "." is never a name. FileNotFoundError names a corpus
    whose file is missing, and the line to write. ValueError if two corpora have different text keys.
    """
    listed = _corpora_file()
    corpora = read_corpora(listed) if listed.is_file() or CORPORA_VARIABLE in os.environ else {}
    found, keys = [], {}
    for flag, names in flags.items():
        files: list[str] = []
        for name in names:
            if name in corpora:
                paths, keys[name] = corpora[name]
                for path in paths:
                    if not Path(path).exists():
                        raise FileNotFoundError(
                            f"{flag} {name}: there is no file {path}, which {listed} names: put it "
                            f"there, or write {_entry_of(name)} into {listed}"
                        )
                files += paths
            elif name != BUILTIN and not Path(name).exists() and not {"/", "."} & set(name):
                raise FileNotFoundError(
                    f"{flag}: no such file: {name}; nor is it a corpus, which {_entry_of(name)} in {listed} "
                    "would make it"
                )
            else:
                files.append(name)
        found.append(tuple(files))
    if text_key is None and keys:
        if len(set(keys.values())) > 1:
            raise ValueError(
                f"{' and '.join(keys)} have their text in different fields: give --text-key, or make a "
                f".bin/.idx pair of each with {how_to_call('preprocess_data')} for --data-path"
            )
        text_key = next(iter(keys.values()))
    return found, text_key


def _corpora_file() -> Path:
    """The file of named corpora; it need not exist."""
    if CORPORA_VARIABLE in os.environ:
        return Path(os.environ[CORPORA_VARIABLE])
    shipped = Path(__file__).resolve().parents[2] / SHIPPED_CORPORA
    return SHIPPED_CORPORA if SHIPPED_CORPORA.is_file() or not shipped.is_file() else shipped


def read_corpora(path: Path) -> dict[str, Corpus]:
    """The corpora in the file `path`, by name. ValueError or FileNotFoundError, in one line, if it is no such file."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"${CORPORA_VARIABLE}: no such file: {path}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise ValueError(f"{path} is not a JSON object of entries such as {_entry_of('name')}")
    corpora = {}
    for name, entry in entries.items():
        files = entry.get("files") if isinstance(entry, dict) else None
        if (
            not isinstance(files, list)
            or not files
            or entry.keys() - {"files", "text_key"}
            or not all(isinstance(value, str) for value in [*files, entry.get("text_key", "")])
        ):
            raise ValueError(f"{path}: the entry {reprlib.repr(name)} is not of the form {_entry_of('name')}")
        corpora[name] = tuple(files), entry.get("text_key")
    return corpora


def _entry_of(name: str) -> str:
    return f'{json.dumps(name)}: {{"files": ["PATH"], "text_key": "text"}}'


def files_of(path: str, flag: str) -> list[str]:
    """The files that `path`, given with `flag`, stands for: the file itself, or the files of JSON and text in the
    folder, sorted by name. Hidden files and subfolders are left out. FileNotFoundError or ValueError names the flag."""
    found = [path]
    if path != BUILTIN and Path(path).is_dir():
        found = list(map(str, documents_in(Path(path))))
        if not found:
            raise FileNotFoundError(f"{flag}: {path}: there is no file of JSON lines or text in this folder")
    for file in found:
        check_exists(file, flag)
    return found


def documents_in(folder: Path) -> list[Path]:
    """The files of JSON lines or text in a folder, sorted by name. A hidden file is left out: it may be unfinished."""
    suffixes = (*JSON_SUFFIXES, TEXT_SUFFIX)
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and not file.name.startswith(".") and uncompressed(file.name).endswith(suffixes)
    )


def uncompressed(name: str) -> str:
    """A file's name without the suffix of its compression."""
    return name.removesuffix(".gz").removesuffix(".zst")


def check_exists(path: str, flag: str) -> None:
    """FileNotFoundError or ValueError if `path`, given with `flag`, is not a file."""
    if path == BUILTIN:
        return
    if not Path(path).exists():
        raise FileNotFoundError(f"{flag}: no such file: {path}")
    if not Path(path).is_file():
        raise ValueError(f"{flag}: {path} is not a file: name the files in it")
    if not os.access(path, os.R_OK):
        raise ValueError(f"{flag}: {path} may not be read by this user")


def is_json(path: str) -> bool:
    """Whether a file's name says that it holds JSON."""
    return Path(uncompressed(path)).suffix.lower() in JSON_SUFFIXES


# --- their content, decompressed


def compression_of(path: str | Path) -> str | None:
    """`gzip`, `zstd`, or None for a file that is neither, by its first bytes."""
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic == ZSTD or (magic[1:] == ZSTD_SKIPPABLE and magic[0] >> 4 == 5):
        return "zstd"
    return "gzip" if magic[:2] == GZIP else None


@contextlib.contextmanager
def open_bytes(path: str | Path) -> Iterator[BinaryIO]:
    """The content of a file, decompressed if it is compressed, of several members or frames too. ValueError, which
    names the file, if reading in the block shows that it is truncated or damaged."""
    try:
        with _open(path) as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _open(path: str | Path) -> BinaryIO:
    kind = compression_of(path)
    if kind == "gzip":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if kind == "zstd":
        return io.BufferedReader(_Joined(_zstd_blocks(path)), BLOCK)
    return open(path, "rb", buffering=BLOCK)


def _zstd_blocks(path: str | Path) -> Iterator[bytes]:
    """The zstandard package's own reader takes a truncated file for one that has ended."""
    try:
        import zstandard
    except ImportError:
        raise ValueError(
            f"{path} is compressed by zstd, which needs the package zstandard: pip install "
            "zstandard, or decompress it first"
        ) from None
    new_frame = zstandard.ZstdDecompressor().decompressobj
    frame, begun = new_frame(), False  # begun: whether it has been given bytes
    with open(path, "rb") as file:
        while packed := file.read(BLOCK // 4):
            while packed:
                try:
                    unpacked = frame.decompress(packed)
                except zstandard.ZstdError as error:
                    raise EOFError(str(error)) from None
                packed, begun = b"", True
                if frame.eof:
                    packed, frame, begun = frame.unused_data, new_frame(), False
                yield unpacked
    if begun:
        raise EOFError("it ends within a zstd frame")


class _Joined(io.RawIOBase):
    """A file whose content comes in blocks."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._left = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        while not self._left and (block := next(self._blocks, None)) is not None:
            self._left = memoryview(block)
        part, self._left = self._left[: len(view)], self._left[len(view) :]
        view[: len(part)] = part
        return len(part)


# --- their documents


class _Lines:
    """Counts the lines of a file, names the first bad ones, and refuses the file if they are too many."""

    def __init__(self, path: str, log: Log, max_bad_fraction: float) -> None:
        self.path, self.log, self.max_bad_fraction = path, log, max_bad_fraction
        self.good = self.empty = self.bad = 0
        self.first_bad = ""

    def skip(self, number: int, error: Exception) -> None:
        """Count line `number`, which `error` makes unusable. ValueError if the first HOPELESS_LINES all are."""
        reason = reason_of(error)
        self.bad += 1
        self.first_bad = self.first_bad or f"{self.path}:{number}: {reason}"
        if self.bad <= SHOWN_BAD_LINES:
            self.log(f"{self.path}:{number}: skipped: {reason}")
        if self.bad == HOPELESS_LINES and not self.good:
            self.check()  # rather now than after hours

    def check(self) -> None:
        """After the last line: ValueError if too many lines are bad or none holds text, else a line to the log."""
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

    JSON is recognised by the file's name: one object a line, or one array of objects. Any other file is one document,
    byte for byte but for lines that are not UTF-8. ValueError names the file and line if more than `max_bad_fraction`
    of the lines are unusable, and the file if it holds no text at all.
    """
    if path == BUILTIN:
        yield from builtin_documents()
        return
    lines = _Lines(path, log, max_bad_fraction)
    with open_bytes(path) as file:
        if is_json(path):
            yield from _json_documents(file, text_key, lines)
        else:
            parts = []
            for number, line in enumerate(file, 1):
                try:
                    parts.append(line.decode("utf-8"))
                except UnicodeDecodeError as error:
                    lines.skip(number, error)
            lines.good = len(parts)
            lines.check()
            yield "".join(parts)


def _json_documents(file: BinaryIO, text_key: str | None, lines: _Lines) -> Iterator[str]:
    for number, line in enumerate(objects(file, lines.path), 1):
        if isinstance(line, bytes) and not line.strip():
            continue
        try:
            item = json_object(line)
            if text_key is None:
                text_key = _default_key(item)
                if text_key is None:
                    raise ValueError(f"neither {' nor '.join(DEFAULT_KEYS)} is a field of it, {_fields(item)}")
                lines.log(f"{lines.path}: the text is the field {text_key!r} (--text-key)")
            text = text_of(item, text_key)
        except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            lines.skip(number, error)
            continue
        if text:
            lines.good += 1
            yield text
        else:
            lines.empty += 1
    lines.check()


def default_key(path: str) -> str | None:
    """The field that `documents` reads if no text key is given. None if the file is not JSON, or if `documents` would
    refuse it. Reads the file up to the first object that has such a field."""
    if not is_json(path):
        return None
    with open_bytes(path) as file:
        items = (line for line in objects(file, path) if not isinstance(line, bytes) or line.strip())
        for line in itertools.islice(items, HOPELESS_LINES):
            with contextlib.suppress(ValueError, RecursionError):
                if key := _default_key(json_object(line)):
                    return key
    return None


def _default_key(item: dict[str, Any]) -> str | None:
    return next((key for key in DEFAULT_KEYS if key in item), None)


def objects(content: Iterable[bytes], path: str) -> Iterator[Any]:
    """The items of a file that is one JSON array; of any other file its lines, as bytes. ValueError if an array is
    damaged."""
    begun, content = False, iter(content)
    for line in content:
        if not begun:
            line = line.removeprefix(BOM)
            if line.lstrip()[:1] == b"[":
                try:
                    yield from json.loads((line + b"".join(content)).decode("utf-8"))
                    return
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path} begins as a JSON array but is none: {error}") from None
            begun = bool(line.strip())
        yield line


def json_object(line: Any) -> dict[str, Any]:
    """The object that a line of bytes holds, or `line` itself if it is an object. ValueError or RecursionError for
    anything else."""
    item = json.loads(line.decode("utf-8")) if isinstance(line, bytes) else line
    if not isinstance(item, dict):
        raise ValueError("not an object")
    return item


def text_of(item: dict[str, Any], key: str) -> str:
    """The text in the field `key`. ValueError says what is there instead."""
    if key not in item:
        raise ValueError(f"no field {key!r}, {_fields(item)}")
    text = item[key]
    if not isinstance(text, str):
        raise ValueError(f"the field {key!r} is not a string")
    utf8(text)
    return text


def _fields(item: dict[str, Any]) -> str:
    return "which has " + (", ".join(repr(key) for key in list(item)[:10]) or "no fields")


def reason_of(error: Exception) -> str:
    """Why a line is unusable, in words, after what `json_object` or `text_of` raised."""
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def utf8(text: str) -> bytes:
    """`text` in UTF-8. ValueError for a lone surrogate, which UTF-8 cannot hold."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text with a lone surrogate {text[error.start]!r} at character {error.start} is not Unicode"
        ) from None
