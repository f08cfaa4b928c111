"""A checkpoint's manifest and tables as one dictionary, of either version of the format: to be changed and sealed."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from data_utils.files import sealed_lines
from megatron.gpt2.checkpoint.boxes import extent
from megatron.gpt2.checkpoint.manifest import MANIFEST, table_path, tensor_name
from mpu import Box

Contents = dict[str, Any]


def contents(folder: Path) -> Contents:
    """As a manifest of version 1 has it: "files" with their boxes, whichever table lists them."""
    found: Contents = json.loads((folder / MANIFEST).read_bytes())
    del found["sha256"]
    if "tables" in found:
        del found["held"]
        for info in found["tensors"].values():
            del info["held"]
        found["files"] = {
            file: info
            for table in found.pop("tables")
            for file, info in json.loads((folder / table).read_bytes().partition(b"\n")[2]).items()
        }
    return found


def reseal(folder: Path, changed: Contents) -> None:
    """Write `changed` with right hashes: into the manifest where the folder is of version 1, else the files into one
    table, of which the manifest says what fits its boxes, as far as they can be understood."""
    if not (folder / "boxes").exists():
        (folder / MANIFEST).write_bytes(sealed_lines(changed))
        return
    shutil.rmtree(folder / "boxes")
    (folder / "boxes").mkdir()
    changed = copy.deepcopy(changed)
    files = changed.pop("files", None)
    table = b"{}\n" + json.dumps(files).encode()
    (folder / table_path(0)).write_bytes(table)
    boxes: dict[str, list[Box]] = {}
    with contextlib.suppress(Exception):
        for info in files.values():
            for key, box in info["boxes"].items():
                boxes.setdefault(tensor_name(key), []).append(Box(tuple(box["offset"]), tuple(box["shape"])))
    held = []
    with contextlib.suppress(Exception):
        for place, (name, info) in enumerate(changed["tensors"].items()):
            held.append([[0, 0, 8, 48]])
            with contextlib.suppress(Exception):
                held[-1] = [[0, *extent(boxes[name])]]
            info["held"] = place
    tables = {
        table_path(0): {
            "bytes": len(table),
            "sha256": hashlib.sha256(table).hexdigest(),
            "files": len(files) if isinstance(files, dict) else 0,
        }
    }
    (folder / MANIFEST).write_bytes(sealed_lines({**changed, "held": held, "tables": tables}))


def make_version_1(folder: Path) -> None:
    found = contents(folder)
    shutil.rmtree(folder / "boxes")
    reseal(folder, {**found, "version": 1})
