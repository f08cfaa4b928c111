"""What stands in an iteration's folder: files of tensors, a table of each rank, and the manifest. Everything that is
read is checked before it is used.

A saved tensor is one or more boxes: offset and shape within the global tensor. manifest.json is one JSON object:

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

So the manifest seals the tables, and they seal the files. A commit reads only the first lines, a load the second lines
of the tables that hold some of the rows that it wants.
In version 1 the second lines of all ranks stood in the manifest, as `files`.

A key is the tensor's name; a file that holds several boxes of one tensor appends "#1", "#2", ... The bytes of a
file's own header follow from its table, so that a reader compares headers and parses none: one with a duplicate
key, of a wrong size, or from another iteration or rank cannot pass.
"""

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data_utils.files import (
    CHECKPOINT_VERSION,
    OLDEST_CHECKPOINT_VERSION,
    check_seal,
    errors_of,
    parse_json,
    safetensors_header,
    sealed_lines,
)
from megatron.gpt2.checkpoint.boxes import check_cover, check_inside, extent
from megatron.gpt2.checkpoint.source import TensorInfo
from mpu.partition import Box

MANIFEST = "manifest.json"
MAX_BYTES = 16 << 20  # of the manifest, and of each table: a thousand times what a small run needs
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
# No path of these forms is absolute or has a "..".
_FILE_NAME = re.compile(r"mp_rank_\d{2,5}(_\d{3})?/[a-z]\w*\.safetensors", re.ASCII)
_TABLE_NAME = re.compile(r"boxes/rank_\d{5,7}\.jsonl", re.ASCII)


class FileInfo(NamedTuple):
    """A file as its table lists it: size, sha256 in hexadecimal, and its boxes by key."""

    bytes: int
    sha256: str
    boxes: dict[str, Box]


class Part(NamedTuple):
    """A box of a tensor, and the file and key under which it is saved."""

    box: Box
    file: str
    key: str


class Table(NamedTuple):
    """A rank's table, read."""

    files: dict[str, FileInfo]
    parts: dict[str, list[Part]]  # by tensor


class TableInfo(NamedTuple):
    """What the manifest says of a table: size, sha256 in hexadecimal, and how many files it lists."""

    bytes: int
    sha256: str
    files: int


class Manifest(NamedTuple):
    """A manifest, read. held: of each tensor, by table, the first row, one past the last, and the entries. inside: the
    only table of version 1."""

    digest: str
    iteration: int
    facts: dict[str, Any]
    tensors: dict[str, TensorInfo]
    held: dict[str, dict[int, tuple[int, ...]]]
    tables: dict[str, TableInfo]
    inside: Table | None


def table_path(rank: int) -> str:
    """The path of a rank's table in the iteration's folder."""
    return f"boxes/rank_{rank:05d}.jsonl"


def tensor_name(key: str) -> str:
    """The tensor for which a key of a file stands: `x` of `x` and of `x#2`."""
    return key.partition("#")[0]


def file_header(
    file: str, iteration: int, boxes: Mapping[str, tuple[torch.dtype, Box]]
) -> tuple[bytes, dict[str, int], int]:
    """The safetensors header of `file`, which holds `boxes`; the byte at which each key's values start, in the order of
    the file; the file's size. Wide dtypes come first, so that every tensor is aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "file": file, "iteration": str(iteration)}}
    starts: dict[str, int] = {}
    end = 0
    for key in sorted(boxes, key=lambda key: (-boxes[key][0].itemsize, key)):
        dtype, box = boxes[key]
        starts[key], end = end, end + box.numel * dtype.itemsize
        entries[key] = {"dtype": DTYPE_CODES[dtype], "shape": box.shape, "data_offsets": [starts[key], end]}
    header = safetensors_header(entries)
    return header, {key: len(header) + start for key, start in starts.items()}, len(header) + end


def summary(table: bytes) -> tuple[dict[str, Any], int, str]:
    """What a commit needs of a table: its first line, its size and its sha256."""
    return json.loads(table.partition(b"\n")[0]), len(table), hashlib.sha256(table).hexdigest()


def manifest_bytes(
    iteration: int, facts: Mapping[str, Any], tables: Iterable[tuple[Mapping[str, Any], int, str]]
) -> bytes:
    """The manifest, sealed. facts: whatever the writer says about the run, in JSON's types. tables: the `summary` of
    each rank's table, by rank."""
    tensors: dict[str, Any] = {}
    held: dict[str, list[tuple[int, ...]]] = {}
    listed: dict[str, Any] = {}
    for rank, (first, size, sha256) in enumerate(tables):
        for name, (dtype, shape, *found) in first["tensors"].items():
            info = {"dtype": dtype, "shape": shape}
            assert tensors.setdefault(name, info) == info, (name, tensors[name], info)
            held.setdefault(name, []).append((rank, *found))
        listed[table_path(rank)] = {"bytes": size, "sha256": sha256, "files": first["files"]}
    places: dict[tuple[tuple[int, ...], ...], int] = {}
    for name, info in tensors.items():
        info["held"] = places.setdefault(tuple(held[name]), len(places))
    return sealed_lines(
        {
            "version": CHECKPOINT_VERSION,
            "iteration": iteration,
            "facts": facts,
            "tensors": tensors,
            "held": list(places),
            "tables": listed,
        }
    )


def parse_manifest(data: bytes) -> Manifest:
    """The manifest in the bytes of its file. ValueError, KeyError, TypeError, AttributeError or RecursionError, for
    `errors_of`, if it is damaged, of a version that this program does not read, or contradicts itself."""
    digest = check_seal(data)
    manifest = parse_json(data)
    (version,) = _naturals([manifest["version"]])
    if version > CHECKPOINT_VERSION:
        raise ValueError(
            f"format version {version} is newer than {CHECKPOINT_VERSION}, the newest that this "
            "program reads: update the program"
        )
    if version < OLDEST_CHECKPOINT_VERSION:
        raise ValueError(f"format version {version} never was")
    (iteration,) = _naturals([manifest["iteration"]])
    tensors = {
        name: TensorInfo(DTYPES[info["dtype"]], _naturals(info["shape"])) for name, info in manifest["tensors"].items()
    }
    held: dict[str, dict[int, tuple[int, ...]]] = {}
    tables: dict[str, TableInfo] = {}
    inside = None
    if version == 1:
        inside = parse_files(manifest["files"], tensors)
        tables[MANIFEST] = TableInfo(len(data), "", len(inside.files))
        for name, info in tensors.items():
            boxes = [part.box for part in inside.parts.get(name, ())]
            check_cover(name, info.shape, boxes)
            held[name] = {0: extent(boxes)} if boxes else {}
    else:
        for path, info in manifest["tables"].items():
            size, files = _naturals([info["bytes"], info["files"]])
            if not _TABLE_NAME.fullmatch(path):
                raise ValueError(f"names the file {path!r}, which is not of the form {table_path(0)}")
            if size > MAX_BYTES:
                raise ValueError(f"{path} has {size:,} bytes, and at most {MAX_BYTES:,} are read")
            tables[path] = TableInfo(size, info["sha256"], files)
        lists = [_held(entries, len(tables)) for entries in manifest["held"]]
        entries_of = [sum(entries for _, _, entries in by_table.values()) for by_table in lists]
        for name, info in tensors.items():
            (place,) = _naturals([manifest["tensors"][name]["held"]])
            if place >= len(lists):
                raise ValueError(f"{name}: no list {place} says what holds it")
            if entries_of[place] != math.prod(info.shape):
                raise ValueError(f"{name}: its boxes hold {entries_of[place]} entries of {math.prod(info.shape)}")
            held[name] = lists[place]
    return Manifest(digest, iteration, dict(manifest["facts"]), tensors, held, tables, inside)


def _held(entries: Any, tables: int) -> dict[int, tuple[int, ...]]:
    """A list of `held`, by table."""
    found = [(table, (top, bottom, count)) for table, top, bottom, count in (_naturals(entry, 4) for entry in entries)]
    numbers = [table for table, _ in found]
    if numbers != sorted(set(numbers)) or numbers and numbers[-1] >= tables:
        raise ValueError(f"{reprlib.repr(entries)} are no tables of it in their order")
    return dict(found)


def parse_table(data: bytes, number: int, info: TableInfo, manifest: Manifest) -> Table:
    """The table `number` of `manifest`, in the bytes of its file. ValueError unless it has the sha256 and the content
    that the manifest says."""
    if hashlib.sha256(data).hexdigest() != info.sha256:
        raise ValueError(f"damaged: its sha256 is not the one in {MANIFEST}")
    table = parse_files(parse_json(data.partition(b"\n")[2]), manifest.tensors)
    if len(table.files) != info.files:
        raise ValueError(f"lists {len(table.files)} files: {MANIFEST} says {info.files}")
    for name, parts in table.parts.items():
        if manifest.held[name].get(number) != extent([part.box for part in parts]):
            raise ValueError(f"its part of {name} is not the one that {MANIFEST} says")
    return table


def parse_files(files: Any, tensors: Mapping[str, TensorInfo]) -> Table:
    """The second line of a table, or the files of a manifest of version 1. ValueError if a path, a box or a size is
    impossible."""
    table = Table({}, {})
    for file, info in files.items():
        if not _FILE_NAME.fullmatch(file):
            raise ValueError(f"names the file {file!r}, which is not of the form mp_rank_00/name.safetensors")
        boxes = {key: Box(_naturals(box["offset"]), _naturals(box["shape"])) for key, box in info["boxes"].items()}
        (size_on_disk,) = _naturals([info["bytes"]])
        table.files[file] = FileInfo(size_on_disk, info["sha256"], boxes)
        size = 0
        for key, box in boxes.items():
            name = tensor_name(key)
            check_inside(name, tensors[name].shape, box)
            table.parts.setdefault(name, []).append(Part(box, file, key))
            size += box.numel * tensors[name].dtype.itemsize
        if size > size_on_disk:
            raise ValueError(f"the boxes of {file} do not fit into its {size_on_disk} bytes")
    return table


def check_size(path: Path, expected: int) -> None:
    """Raise ValueError unless the file `path` is there and has `expected` bytes."""
    with errors_of(path):
        if not path.is_file():  # a pipe would keep us waiting
            raise ValueError("missing")
        if (found := path.stat().st_size) != expected:
            raise ValueError(f"has {found:,} bytes instead of {expected:,}")


def _naturals(values: Any, at_most: int = 2) -> tuple[int, ...]:
    """The whole numbers of a list. At most two by default, as no tensor here has more dimensions: the product of many
    numbers takes minutes."""
    if not isinstance(values, list) or len(values) > at_most or not all(type(v) is int and v >= 0 for v in values):
        raise ValueError(f"{reprlib.repr(values)} should be a list of at most {at_most} whole numbers")
    return tuple(values)
