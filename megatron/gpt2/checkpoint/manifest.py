"""The JSON of an iteration's folder: the manifest, and of each rank that wrote a table of its files and boxes.

manifest.json is one JSON object:

    version     of this format: data_utils/files/__init__.py
    iteration   as in the folder's name
    facts       whatever the writer says about the run
    tensors     {tensor: {"dtype", "shape", "held"}}, shapes being global and without padding; held: a place in `held`
    held        lists of [table, first row, one past the last row, entries]: of a tensor, the tables that hold a part of
                it, as places in `tables`, and what each holds. Masters and moments, cut alike, share a list
    tables      {path: {"bytes", "sha256", "files"}}; files: how many it lists
    sha256      of every byte of the manifest before it

boxes/rank_00000.jsonl, the table of the rank, has two lines, each a JSON object:

    {"files": how many, "tensors": {tensor: [dtype, shape, first row, one past the last row, entries]}}
    {path: {"bytes", "sha256", "boxes": {key: {"offset", "shape"}}}}

So the manifest seals the tables, and they seal the files. A commit reads the first lines alone, a load the second lines
of the tables that hold some of the rows that it wants.
In version 1 the second lines of all ranks stood in the manifest, as `files`.

A key is the tensor's name; a file that holds several boxes of one tensor appends "#1", "#2", ... The bytes of a
file's own header follow from its table, so that a reader compares headers and parses none: one with a duplicate
key, of a wrong size, or from another iteration or rank cannot pass.
"""

import json
from collections.abc import Mapping
from typing import Any

from data_utils.files import CHECKPOINT_VERSION, sealed_lines
from megatron.gpt2.checkpoint.boxes import extent
from megatron.gpt2.checkpoint.files import tensor_name
from mpu.partition import Box

MANIFEST = "manifest.json"


def table_path(rank: int) -> str:
    """The path of a rank's table in the iteration's folder."""
    return f"boxes/rank_{rank:05d}.jsonl"


def table_bytes(files: Mapping[str, Any], tensors: Mapping[str, Any]) -> bytes:
    """The table of a rank that wrote `files`, which hold parts of `tensors`."""
    parts: dict[str, list[Box]] = {}
    for info in files.values():
        for key, box in info["boxes"].items():
            parts.setdefault(tensor_name(key), []).append(Box(tuple(box["offset"]), tuple(box["shape"])))
    first = {
        "files": len(files),
        "tensors": {
            name: [tensors[name]["dtype"], tensors[name]["shape"], *extent(boxes)] for name, boxes in parts.items()
        },
    }
    return f"{json.dumps(first)}\n{json.dumps(files)}\n".encode()


class Contents:
    """The manifest's part about tensors and tables, made of the first line of each table. Ranks are added in order."""

    def __init__(self) -> None:
        self._tables: dict[str, Any] = {}
        self._tensors: dict[str, Any] = {}
        self._held: dict[str, list[tuple[int, ...]]] = {}

    def add(self, rank: int, first: Mapping[str, Any], size: int, sha256: str) -> None:
        """Add the table of `rank`, which has `size` bytes and begins with the line `first`."""
        for name, (dtype, shape, *found) in first["tensors"].items():
            info = {"dtype": dtype, "shape": shape}
            known = self._tensors.setdefault(name, info)
            assert known == info, (name, known, info)
            self._held.setdefault(name, []).append((len(self._tables), *found))
        self._tables[table_path(rank)] = {"bytes": size, "sha256": sha256, "files": first["files"]}

    def manifest_bytes(self, iteration: int, facts: Mapping[str, Any]) -> bytes:
        """The manifest, sealed. facts: whatever the writer says about the run, in JSON's types."""
        places: dict[tuple[tuple[int, ...], ...], int] = {}
        tensors = {
            name: {**info, "held": places.setdefault(tuple(self._held[name]), len(places))}
            for name, info in self._tensors.items()
        }
        return sealed_lines(
            {
                "version": CHECKPOINT_VERSION,
                "iteration": iteration,
                "facts": facts,
                "tensors": tensors,
                "held": list(places),
                "tables": self._tables,
            }
        )
