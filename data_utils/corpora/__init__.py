"""Read documents from JSON lines and plain text, compressed or not, and from named corpora. Make the built-in corpus.

The suffix of a file's name decides its format. Bad lines are skipped, counted and reported. `detokenizers` converts the
texts of word-level benchmarks back to ordinary text.

`--train-data wikipedia` reads the files that a JSON file lists under "wikipedia":

    {"wikipedia": {"files": ["data/wikipedia/wikidump_lines.json"], "text_key": "text"}}

The JSON file is $MEGATRON_CORPORA if it is set, otherwise data/corpora.json in the current folder or in this checkout.
Paths in the JSON file are relative to the current folder, as on the command line. `text_key` is optional.
"""

import contextlib
import glob
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

from data_utils.command_line import Log, how_to_call, missing_package
from data_utils.corpora.builtin import builtin_documents
from data_utils.files import MAX_CONFIG_BYTES, read_json_object

BUILTIN = "builtin"
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
TEXT_SUFFIX = ".txt"
COMPRESSED_SUFFIXES = (".gz", ".zst")
MANIFESTS = "manifests"  # Steps of tools/openwebtext/ write manifests into a folder of this name in the output.
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# A frame without data, which pzstd writes, has a byte from 0x50 to 0x5f and then these bytes.
ZSTD_SKIPPABLE = b"\x2a\x4d\x18"
BUFFER_BYTES = 1 << 18
BOM = b"\xef\xbb\xbf"

DEFAULT_KEYS = ("text", "sentence")
MAX_BAD_FRACTION = 0.001
MAX_LOGGED_BAD_LINES = 5
MAX_LEADING_BAD_LINES = 1000  # number of bad lines at the beginning for which a file is refused

SHIPPED_CORPORA = Path("data", "corpora.json")
CORPORA_VARIABLE = "MEGATRON_CORPORA"

Corpus = tuple[tuple[str, ...], str | None]  # the files, and the key of the text field


# --- find files


def find_corpora(flags: Mapping[str, Sequence[str]], text_key: str | None) -> tuple[list[tuple[str, ...]], str | None]:
    """Replace names of corpora by their files. Return the files of each flag, in order, and the text key: `text_key`
    if it is given, otherwise the key of the corpora.

    flags: the words of each flag. A word with "/" or "." is always a path, not the name of a corpus.

    Raises FileNotFoundError, which shows the entry to write, if a corpus or its file is missing. Raises ValueError if
    two corpora have different text keys.
    """
    listed = _corpora_file()
    corpora = read_corpora(listed) if listed.is_file() or CORPORA_VARIABLE in os.environ else {}
    found, keys = [], {}
    for flag, names in flags.items():
        files: list[str] = []
        for name in names:
            paths: tuple[str, ...] = (name,)
            if name in corpora:
                paths, keys[name] = corpora[name]
            missing = [path for path in paths if path != BUILTIN and not Path(path).exists()]
            if missing and not {"/", "."} & set(name):
                raise FileNotFoundError(
                    f"{flag} {name}: no such file: {missing[0]}; to define a corpus of this name, write "
                    f"{_entry_of(name)} into {listed}"
                )
            files += paths
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
    if CORPORA_VARIABLE in os.environ:
        return Path(os.environ[CORPORA_VARIABLE])
    shipped = Path(__file__).resolve().parents[2] / SHIPPED_CORPORA
    return SHIPPED_CORPORA if SHIPPED_CORPORA.is_file() or not shipped.is_file() else shipped


def read_corpora(path: Path) -> dict[str, Corpus]:
    """Read the corpora in the file `path`, by name. Raises FileNotFoundError or ValueError if the file is
    missing or malformed."""
    check_exists(str(path), f"${CORPORA_VARIABLE}")
    corpora: dict[str, Any] = {}
    for name, entry in read_json_object(path, MAX_CONFIG_BYTES).items():
        match entry:
            case {"files": [_, *_] as files, **more} if more.keys() <= {"text_key"} and all(
                isinstance(value, str) for value in [*files, *more.values()]
            ):
                corpora[name] = tuple(files), more.get("text_key")
            case _:
                raise ValueError(f"{path}: the entry {reprlib.repr(name)} is not of the form {_entry_of('name')}")
    return corpora


def _entry_of(name: str) -> str:
    return f'{json.dumps(name)}: {{"files": ["PATH"], "text_key": "text"}}'


def list_documents(folder: Path) -> list[Path]:
    """List the files of JSON or text in a folder, sorted by name, without subfolders and without hidden files, which
    may be unfinished."""
    suffixes = (*JSON_SUFFIXES, TEXT_SUFFIX)
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and not file.name.startswith(".") and uncompressed(file.name).endswith(suffixes)
    )


def expand_paths(
    names: Iterable[str], flag: str, in_folder: Callable[[Path], Sequence[Path]] = list_documents
) -> list[str]:
    """Expand paths of files, glob patterns and folders to files. An error names `flag`.

    in_folder: a function that lists the files of a folder.
    """
    found: list[str] = []
    for name in names:
        files = [name]
        if name != BUILTIN and Path(name).is_dir():
            files = list(map(str, in_folder(Path(name))))
            if not files:
                raise FileNotFoundError(f"{flag}: {name}: this folder has no file of JSON lines or text")
        elif name != BUILTIN and not Path(name).exists():
            files = sorted(filter(os.path.isfile, glob.glob(name, recursive=True))) or files
        for file in files:
            check_exists(file, flag)
        found += files
    return found


def uncompressed(name: str) -> str:
    """Remove the suffix of a compression from a file's name."""
    return name.removesuffix(".gz").removesuffix(".zst")


def check_exists(path: str, flag: str) -> None:
    """Raise FileNotFoundError or ValueError, which names `flag`, if `path` is not a file."""
    if path == BUILTIN:
        return
    if not Path(path).exists():
        raise FileNotFoundError(f"{flag}: no such file: {path}")
    if not Path(path).is_file():
        raise ValueError(f"{flag}: {path} is not a file: name the files in it")


def is_json(path: str) -> bool:
    """Return True if a file's name has a suffix of JSON."""
    return Path(uncompressed(path)).suffix.lower() in JSON_SUFFIXES


# --- decompress files


def detect_compression(path: str | Path) -> str | None:
    """Return the compression of a file, by its first bytes: "gzip", "zstd" or None."""
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic == ZSTD or (magic[1:] == ZSTD_SKIPPABLE and magic[0] >> 4 == 5):
        return "zstd"
    return "gzip" if magic[:2] == GZIP else None


@contextlib.contextmanager
def open_bytes(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for binary reading, and decompress it if needed. The file may have several gzip members or zstd
    frames. If the block reads damaged data, a ValueError names the file."""
    kind = detect_compression(path)
    try:
        with (
            _zstd(path)
            if kind == "zstd"
            else gzip.open(path)
            if kind
            else open(path, "rb", buffering=BUFFER_BYTES) as file
        ):
            yield cast(BinaryIO, file)
    except (OSError, EOFError, zlib.error) as error:
        # An error with an errno is a failure of the operating system, not damaged content.
        if isinstance(error, OSError) and error.errno:
            raise
        raise ValueError(f"{path} is damaged: {error}") from None


def _zstd(path: str | Path) -> io.BufferedReader:
    try:
        import pyarrow
    except ImportError:
        raise missing_package(f"{path} is compressed by zstd, which", "pyarrow", "data") from None
    return io.BufferedReader(pyarrow.CompressedInputStream(str(path), "zstd"), BUFFER_BYTES)


# --- read documents


def read_documents(
    path: str, text_key: str | None, log: Log, max_bad_fraction: float = MAX_BAD_FRACTION
) -> Iterator[str]:
    """Yield the documents of a file that are not empty, in order. The path `builtin` means the built-in corpus.

    A file with a suffix of JSON has an object per line, or is one array of objects. Any other file is one document,
    byte for byte, without the lines that are not UTF-8. Raises ValueError, which names the file and line, if more than
    `max_bad_fraction` of the lines are unusable, or if the file has no text.
    """
    if path == BUILTIN:
        yield from builtin_documents()
        return
    as_json, key = is_json(path), DEFAULT_KEYS[0]
    if as_json:
        key = text_key or default_key(path) or key
    if as_json and text_key is None:
        log(f"{path}: the text is the field {key!r} (--text-key)")
    good = empty = bad = 0
    first_bad = ""
    with open_bytes(path) as file:
        for number, record in enumerate(read_items(file, path), 1) if as_json else read_plain_text(file, key):
            if isinstance(record, bytes) and not record.strip():
                continue
            try:
                text = get_text(json_object(record), key)
            except ValueError as error:
                bad += 1
                first_bad = first_bad or f"{path}:{number}: {error}"
                if bad <= MAX_LOGGED_BAD_LINES:
                    log(f"{path}:{number}: skipped: {error}")
                if bad == MAX_LEADING_BAD_LINES and not good:
                    break  # An early error saves hours of reading.
                continue
            if text:
                good += 1 if as_json else number - bad
                yield text
            else:
                empty += 1
    lines = good + empty + bad
    advice = "name the field that holds the text with --text-key, or fix the file"
    check_bad_lines(bad, lines, max_bad_fraction, first_bad, advice if as_json else "convert the file to UTF-8")
    if not good:
        raise ValueError(f"{path} holds no text")
    if bad or empty:
        log(f"{path}: of {lines} lines {bad} bad and {empty} empty ones are skipped")


def check_bad_lines(bad: int, lines: int, max_bad_fraction: float, first_bad: str, advice: str) -> None:
    """Raise ValueError if more than `max_bad_fraction` of `lines` are unusable. `first_bad` describes the first
    unusable line."""
    if bad > max_bad_fraction * lines:
        raise ValueError(
            f"{first_bad}; {bad:,} of {lines:,} lines are unusable, more than --max-bad-fraction "
            f"{max_bad_fraction:g}: {advice}"
        )


def read_plain_text(file: Iterable[bytes], key: str) -> Iterator[tuple[int, Any]]:
    """Yield (line number, line) for each line that is not UTF-8, as bytes. Then yield (number of the last line, {key:
    text}) with the text of all other lines."""
    parts, number = list[str](), 0
    for number, line in enumerate(file, 1):
        try:
            parts.append(line.decode("utf-8" if parts else "utf-8-sig"))
        except UnicodeDecodeError:
            yield number, line
    yield number, {key: "".join(parts)}


def default_key(path: str) -> str | None:
    """Return the field that `read_documents` reads by default: the first of DEFAULT_KEYS in the first object that has
    one. Return None if the file is not JSON, or if `read_documents` would refuse the file."""
    if not is_json(path):
        return None
    with open_bytes(path) as file:
        items = (line for line in read_items(file, path) if not isinstance(line, bytes) or line.strip())
        for line in itertools.islice(items, MAX_LEADING_BAD_LINES):
            with contextlib.suppress(ValueError):
                item = json_object(line)
                if key := next((key for key in DEFAULT_KEYS if key in item), None):
                    return key
    return None


def read_items(content: Iterable[bytes], path: str) -> Iterator[Any]:
    """Yield the items of a JSON array, or the lines of any other file, as bytes. Raises ValueError if an array is
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
                    raise ValueError(f"{path} begins like a JSON array but is not one: {error}") from None
            begun = bool(line.strip())
        yield line


def json_object(line: Any) -> dict[str, Any]:
    """Parse a line of bytes as a JSON object, or return `line` if it is an object. Raises ValueError if the JSON value
    is not an object."""
    try:
        item = json.loads(line.decode("utf-8-sig")) if isinstance(line, bytes) else line
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(item, dict):
        raise ValueError("not an object")
    return item


def get_text(item: dict[str, Any], key: str) -> str:
    """Return the text in the field `key`. Raises ValueError if the field is missing or is not text."""
    if key not in item:
        raise ValueError(f"no field {key!r}, which has {', '.join(map(repr, list(item)[:10])) or 'no fields'}")
    text = item[key]
    if not isinstance(text, str):
        raise ValueError(f"the field {key!r} is not a string")
    utf8(text)
    return text


def utf8(text: str) -> bytes:
    """Encode `text` in UTF-8. Raises ValueError for a lone surrogate, which UTF-8 cannot encode."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text with a lone surrogate {text[error.start]!r} at character {error.start} is not Unicode"
        ) from None
