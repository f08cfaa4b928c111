"""Documents out of files of loose JSON and plain text, compressed or not, the names that stand for such files, and the
built-in corpus. `detokenizers` turns the texts of word-level benchmarks back into ordinary text.

The names of files say which of a folder hold documents, and of what form. Bad lines are skipped, counted and named.

`--train-data wikipedia` reads the files that an entry of a JSON file lists:

    {"wikipedia": {"files": ["data/wikipedia/wikidump_lines.json"], "text_key": "text"}}

The file is $MEGATRON_CORPORA, else data/corpora.json in the current folder, else the one of this checkout. A path in it
is relative to the current folder, as a path on the command line is; `text_key` may be left out.

The built-in corpus, `--train-data builtin`, is the prose of Python's standard library about itself: the docstrings of
its modules, and the language topics of `pydoc_data`, about 1 MB of English. No module is imported, because imports have
side effects: a regular expression finds the docstrings in the source. Comments are left out, since they say less in
whole sentences: after as many steps the model is at 1.74 bits per byte with them and at 1.56 without. The text
differs a little between versions of Python: results name its hash.
"""

import ast
import contextlib
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import reprlib
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from data_utils.command_line import how_to_call

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


def documents_in(folder: Path) -> list[Path]:
    """The files of JSON lines or text in a folder, sorted by name. Subfolders are left out, and so is a hidden file,
    which may be unfinished."""
    suffixes = (*JSON_SUFFIXES, TEXT_SUFFIX)
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and not file.name.startswith(".") and uncompressed(file.name).endswith(suffixes)
    )


def files_of(names: Iterable[str], flag: str, in_folder: Callable[[Path], Sequence[Path]] = documents_in) -> list[str]:
    """The files that `names`, given with `flag`, stand for: a file, those that match a glob pattern, or those of a
    folder, as `in_folder` finds them. FileNotFoundError or ValueError names the flag."""
    found: list[str] = []
    for name in names:
        files = [name]
        if name != BUILTIN and Path(name).is_dir():
            files = list(map(str, in_folder(Path(name))))
            if not files:
                raise FileNotFoundError(f"{flag}: {name}: there is no file of JSON lines or text in this folder")
        elif name != BUILTIN and not Path(name).exists():
            files = sorted(filter(os.path.isfile, glob.glob(name, recursive=True))) or files
        for file in files:
            check_exists(file, flag)
        found += files
    return found


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
        return io.BufferedReader(_ZstdFile(path), BLOCK)
    return open(path, "rb", buffering=BLOCK)


class _ZstdFile(io.RawIOBase):
    """The content of a zstd file, of several frames too. EOFError if it is damaged or ends within a frame. The reader of
    the package zstandard takes a truncated file for one that has ended."""

    def __init__(self, path: str | Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise ValueError(
                f"{path} is compressed by zstd, which needs the package zstandard: pip install "
                "zstandard, or decompress it first"
            ) from None
        self._error, self._new_frame = zstandard.ZstdError, zstandard.ZstdDecompressor().decompressobj
        self._file = open(path, "rb")  # noqa: SIM115  closed by `close`
        self._frame: Any = None  # the one that has begun
        self._packed, self._unpacked = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            self._packed = self._packed or self._file.read(BLOCK // 4)
            if not self._packed and self._frame:
                raise EOFError("it ends within a zstd frame")
            if not self._packed:
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._unpacked = memoryview(self._frame.decompress(self._packed))
            except self._error as error:
                raise EOFError(str(error)) from None
            self._packed = self._frame.unused_data
            self._frame = None if self._frame.eof else self._frame
        size = min(len(buffer), len(self._unpacked))
        buffer[:size], self._unpacked = self._unpacked[:size], self._unpacked[size:]
        return size


# --- their documents


def documents(path: str, text_key: str | None, log: Log, max_bad_fraction: float = MOST_BAD_LINES) -> Iterator[str]:
    """The documents of one file in its order, none of them empty; `builtin` names the built-in corpus.

    JSON is recognised by the file's name: one object a line, or one array of objects. Any other file is one document,
    byte for byte but for lines that are not UTF-8. ValueError names the file and line if more than `max_bad_fraction`
    of the lines are unusable, and the file if it holds no text at all.
    """
    if path == BUILTIN:
        yield from builtin_documents()
        return
    as_json, key = is_json(path), text_key if is_json(path) else "text"
    good = empty = bad = 0
    first_bad = ""
    with open_bytes(path) as file:
        for number, record in enumerate(objects(file, path), 1) if as_json else plain_text(file, "text"):
            if isinstance(record, bytes) and not record.strip():
                continue
            try:
                item = json_object(record)
                if key is None:
                    key = _default_key(item)
                    if key is None:
                        raise ValueError(f"neither {' nor '.join(DEFAULT_KEYS)} is a field of it, {_fields(item)}")
                    log(f"{path}: the text is the field {key!r} (--text-key)")
                text = text_of(item, key)
            except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
                bad += 1
                first_bad = first_bad or f"{path}:{number}: {reason_of(error)}"
                if bad <= SHOWN_BAD_LINES:
                    log(f"{path}:{number}: skipped: {reason_of(error)}")
                if bad == HOPELESS_LINES and not good:
                    break  # rather now than after hours
                continue
            if text:
                good += 1 if as_json else number - bad
                yield text
            else:
                empty += 1
    lines = good + empty + bad
    if bad > max_bad_fraction * lines:
        advice = "name the field that holds the text with --text-key, or fix the file"
        raise ValueError(
            f"{first_bad}; {bad} of {lines} lines are unusable, more than --max-bad-fraction {max_bad_fraction:g}: "
            + (advice if as_json else "convert the file to UTF-8")
        )
    if not good:
        raise ValueError(f"{path} holds no text")
    if bad or empty:
        log(f"{path}: of {lines} lines {bad} bad and {empty} empty ones are skipped")


def plain_text(file: Iterable[bytes], key: str) -> Iterator[tuple[int, Any]]:
    """A file of text as one object with the field `key`, and before it each line that is not UTF-8, as bytes; both with
    the number of their (last) line."""
    parts, number = [], 0
    for number, line in enumerate(file, 1):
        try:
            parts.append(line.decode("utf-8"))
        except UnicodeDecodeError:
            yield number, line
    yield number, {key: "".join(parts)}


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


# --- the built-in corpus

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Every string and comment of a source, so that none begins inside another. Kept are long strings with which a line
# begins: docstrings, and texts for users.
TEXTS = re.compile(r'''(?xms)
    (?: \#[^\n]* | ^[ \t]*[rRuU]?(?: """(?P<double>[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*)"""
                        | \'\'\'(?P<single>[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*)\'\'\' )
      | """[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""
      | \'\'\'[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*\'\'\'
      | "[^"\\\n]*(?:\\.[^"\\\n]*)*" | '[^'\\\n]*(?:\\.[^'\\\n]*)*' )''')

LEAST_WORDS = 12
PLAIN_SHARE = 0.85  # of a paragraph's words

# A blank line ends a paragraph; so does the beginning of a list's next item.
BORDER = re.compile(r"\n[ \t]*\n\s*|\n(?=[ \t]*(?:[-*+•]|\(?\d+[.)])[ \t])")
BULLET = re.compile(r"^(?:[-*+•]|\(?\d+[.)])[ \t]+")
MARKS = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        # :role:`name`, ``literal``, `text <link>`_
        (r"(?::[a-zA-Z:+-]+:)?`+~?([^`]+?)(?:\s+<[^`>]*>)?`+_{0,2}", r"\1"),
        (r"(?<![\w*])(\*\*?)([^\s*](?:[^*]*[^\s*])?)\1(?![\w*])", r"\2"),  # *emphasis*, **strong**
        (r"::(?=\s|$)", ":"),  # before a literal block
    )
)
BEGINS = re.compile(r"""["'“‘(]?[A-Z]""")
ENDS = re.compile(r"""[.!?:]["'”’)]*$""")
FOREIGN = re.compile(r"[\\|{}<>=~^$@#`*+]|--|\.\.|X{3}")  # code, tables, grammar, remarks marked with XXX
PLAIN_WORD = re.compile(r"""["'“‘(\[]*[A-Za-z]+(?:['’-][A-Za-z]+)*["'”’)\]]*[.,;:!?]*["'”’)\]]*$""")


@functools.lru_cache(maxsize=1)  # it takes a second, and is read once for its hash and once for its tokens
def builtin_documents() -> tuple[str, ...]:
    """The documents: one per module and one per topic, a docstring or a topic on each line. Their order depends on the
    hashes of their names, which mixes related modules: any part of the corpus is a fair sample of it. ValueError where
    the source of the standard library is missing."""
    found = dict(_sources())
    if not found:
        raise ValueError(
            f"the built-in corpus needs the source of Python's standard library, which is not in "
            f"{sysconfig.get_path('stdlib')}: name files with --train-data"
        )
    names = sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest())
    documents = ("".join(f"{line}\n" for text in found[name] if (line := " ".join(prose(text)))) for name in names)
    return tuple(filter(None, documents))


def _sources() -> Iterator[tuple[str, list[str]]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
            continue
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        if relative.as_posix() == "pydoc_data/topics.py":
            # The values of the one dictionary of literals there.
            for topics in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict)):
                yield from ((f"topic {name}", [str(text)]) for name, text in ast.literal_eval(topics).items())
        else:
            yield relative.as_posix(), list(texts_of(source))


def texts_of(source: str) -> Iterator[str]:
    """The docstrings of a module, in their order."""
    return (match[match.lastgroup] for match in TEXTS.finditer(source) if match.lastgroup)


def prose(text: str) -> Iterator[str]:
    """The paragraphs of `text` that are prose, each as one line. Such a paragraph has at least LEAST_WORDS words,
    begins with a capital letter and ends with a final sign; PLAIN_SHARE of its words are letters and plain punctuation.
    """
    for paragraph in BORDER.split(text):
        if paragraph.count(" ") + paragraph.count("\n") < LEAST_WORDS - 1:
            continue  # the quick way out of most
        words = BULLET.sub("", " ".join(paragraph.split()))
        for pattern, plain in MARKS:
            words = pattern.sub(plain, words)
        if is_prose(words):
            yield words


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph, given as one line, reads as English."""
    if not BEGINS.match(paragraph) or not ENDS.search(paragraph) or FOREIGN.search(paragraph):
        return False
    words = paragraph.split(" ")
    plain = sum(PLAIN_WORD.match(word) is not None for word in words)
    return len(words) >= LEAST_WORDS and plain >= PLAIN_SHARE * len(words)
