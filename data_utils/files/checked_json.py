"""JSON that shows damage: sealed objects, and a parser that refuses a key that occurs twice.

Python's parser would take the last value of such a key in silence. The last entry of a sealed object, "sha256", is the
hash of its own bytes before it. Two layouts are on disk. The manifests of token files and of their shards are indented,
and the hash covers all before the comma of its entry. A checkpoint's manifest has a line for each entry, and the hash
covers all up to its own value.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_utils.files.atomic import replace_text

SEAL = ',\n "sha256": "'  # of the indented layout
END = b'"}\n'  # of the other


def write_sealed(path: Path, entries: Mapping[str, Any]) -> None:
    """Replace `path`, atomically, by `entries` in the indented layout."""
    text = json.dumps(entries, indent=1, ensure_ascii=False).removesuffix("\n}")
    replace_text(path, f'{text}{SEAL}{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n')


def read_sealed(path: Path) -> dict[str, Any] | None:
    """What `write_sealed` wrote; None where there is no file. ValueError where it is not as it was written."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        text = ""
    body, seal, end = text.rpartition(SEAL)
    if not seal or end != hashlib.sha256(body.encode()).hexdigest() + '"\n}\n':
        raise ValueError(f"{path} is damaged, or was not written by these tools")
    with errors_of(path):
        entries = parse_object(text.encode())
        json.dumps(entries, ensure_ascii=False).encode()  # "\\ud800" is JSON, and no text that could be printed
    del entries["sha256"]
    return entries


def sealed_lines(entries: Mapping[str, Any]) -> bytes:
    """`entries`, a line each, sealed."""
    return sealed_body(
        (
            "{"
            + "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in entries.items())
            + '"sha256": "'
        ).encode()
    )


def sealed_body(body: bytes) -> bytes:
    """`body`, which ends with the opening quote of the hash, completed."""
    return body + hashlib.sha256(body).hexdigest().encode() + END


def check_seal(data: bytes) -> str:
    """The hash at the end of what `sealed_lines` made. ValueError where the bytes before it have another."""
    body = data[: -len(sealed_body(b""))]
    if sealed_body(body) != data:
        raise ValueError("damaged: it does not end in the sha256 of its own bytes")
    return data[len(body) : len(data) - len(END)].decode()


def parse_json(data: bytes | str) -> Any:
    """The value that `data` holds. ValueError where it is no JSON or where an object has a key twice; RecursionError
    where it is nested too deeply."""
    return json.loads(data, object_pairs_hook=_unique)


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object that `data` holds. ValueError, one line, for anything else."""
    try:
        value = parse_json(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"holds no JSON as it should: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("holds no JSON object")
    return value


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object in the file `path`, of at most `max_bytes` bytes. ValueError, which names the file, for anything
    else."""
    with errors_of(path):
        if path.stat().st_size > max_bytes:
            raise ValueError(f"larger than {max_bytes:,} bytes")
        return parse_object(path.read_bytes())


@contextlib.contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Turns what goes wrong inside with the content of the file `path` into a ValueError, one line that names it."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path}: has no {one_line(error)}") from error
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{path}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """An error's text, in one line and cut to a length that can be read: a name in a file can be anything."""
    return " ".join(str(error)[:300].split())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made
