"""JSON objects that end in the sha256 of their own bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from data_utils.files.atomic import replace_text

SEAL = ',\n "sha256": "'


def write_sealed(path: Path, facts: dict[str, Any]) -> None:
    """Replace `path` by `facts` as JSON, its own sha256 at the end."""
    text = json.dumps(facts, indent=1, ensure_ascii=False).removesuffix("\n}")
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
    facts: dict[str, Any] = json.loads(text)
    del facts["sha256"]
    return facts
