"""JSON in which no key occurs twice: Python's parser would take the last value of such a key in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
    try:
        if path.stat().st_size > max_bytes:
            raise ValueError(f"larger than {max_bytes:,} bytes")
        return parse_object(path.read_bytes())
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made
