"""JSON objects whose last entry, "sha256", is the hash of their own bytes before it: so that damage shows.

Two layouts are on disk. The manifests of token files and of their shards are indented, and the hash covers all before
the comma of its entry. A checkpoint's manifest has a line for each entry, and the hash covers all up to its own value.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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
    entries: dict[str, Any] = json.loads(text)
    del entries["sha256"]
    return entries


def sealed_lines(entries: Mapping[str, Any]) -> bytes:
    """`entries`, a line each, sealed."""
    return sealed_body(("{" + "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in entries.items())
                 + '"sha256": "').encode())


def sealed_body(body: bytes) -> bytes:
    """`body`, which ends with the opening quote of the hash, completed."""
    return body + hashlib.sha256(body).hexdigest().encode() + END


def check_seal(data: bytes) -> str:
    """The hash at the end of what `sealed_lines` made. ValueError where the bytes before it have another."""
    body = data[:-len(sealed_body(b""))]
    if sealed_body(body) != data:
        raise ValueError("damaged: it does not end in the sha256 of its own bytes")
    return data[len(body):len(data) - len(END)].decode()
