"""Reading the manifest and its tables. Everything in them is checked before it is used.
megatron/gpt2/checkpoint/manifest.py describes their format."""

import bisect
import contextlib
import gc
import hashlib
import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data_utils.files import CHECKPOINT_VERSION, OLDEST_CHECKPOINT_VERSION, check_seal, one_line, parse_json
from megatron.gpt2.checkpoint.boxes import check_cover, check_inside, extent
from megatron.gpt2.checkpoint.files import DTYPES, FILE_NAME, tensor_name
from megatron.gpt2.checkpoint.manifest import MANIFEST, table_path
from mpu.partition import Box

MAX_BYTES = 16 << 20  # of the manifest, and of each table: a thousand times what a small run needs
# No path of this form is absolute or has a "..".
_TABLE_NAME = re.compile(r"boxes/rank_\d{5,7}\.jsonl", re.ASCII)


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # global


@dataclass(frozen=True)
class FileInfo:
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
    """What the manifest says of a table: size, sha256 in hexadecimal, and counts."""

    bytes: int
    sha256: str
    files: int
    tensors: int  # of how many tensors it holds a part


class TablePart(NamedTuple):
    """The part of a tensor that a table holds: `entries` of them, in the rows from `top` to before `bottom`."""

    table: int
    top: int
    bottom: int
    entries: int


class Manifest(NamedTuple):
    """A manifest, read. `held` and `tables` are those of version 2. In a manifest of version 1, which holds its files
    itself, `held` is empty and `inside` is their table."""

    digest: str
    iteration: int
    facts: dict[str, Any]
    tensors: dict[str, TensorInfo]
    held: dict[str, list[TablePart]]
    tables: dict[str, TableInfo]
    inside: Table | None


@contextlib.contextmanager
def errors_named(where: Path) -> Iterator[None]:
    """Turns an error about the file `where` into a ValueError, in one line that names the file."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{where}: names no {one_line(error)}, or an unknown one") from error
    except RecursionError as error:
        raise ValueError(f"{where}: nested too deeply") from error
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{where}: {one_line(error)}") from error


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Python's garbage collector is off inside: it would walk through the growing objects again and again, for two
    thirds of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def parse_manifest(data: bytes) -> Manifest:
    """The manifest in the bytes of its file. ValueError, KeyError, TypeError, AttributeError or RecursionError, for
    `errors_named`, where it is damaged, of a version that this program does not read, or contradicts itself."""
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
    held: dict[str, list[TablePart]] = {}
    tables: dict[str, TableInfo] = {}
    inside = None
    if version > 1:
        held, tables = _held(manifest, tensors)
    else:
        inside = parse_files(manifest["files"], tensors)
        tables = {MANIFEST: TableInfo(len(data), "", len(inside.files), len(inside.parts))}
        for name, info in tensors.items():
            check_cover(name, info.shape, [part.box for part in inside.parts.get(name, [])])
    return Manifest(digest, iteration, dict(manifest["facts"]), tensors, held, tables, inside)


def _held(manifest: Any, tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, list[TablePart]], dict[str, TableInfo]]:
    """By tensor what holds it, checked to be as many entries as it has; and the tables."""
    paths = dict(manifest["tables"])
    lists = []
    for entries in manifest["held"]:
        held = [TablePart(*_naturals(entry, 4)) for entry in entries]
        if any(a.table >= b.table for a, b in zip(held, held[1:], strict=False)) or (
            held and held[-1].table >= len(paths)
        ):
            raise ValueError(f"{reprlib.repr(entries)} are no tables of it in their order")
        lists.append(held)
    found, users = {}, [0] * len(lists)
    for name, info in tensors.items():
        (place,) = _naturals([manifest["tensors"][name]["held"]])
        if place >= len(lists):
            raise ValueError(f"{name}: no list {place} says what holds it")
        found[name] = lists[place]
        users[place] += 1
        if (entries := sum(part.entries for part in lists[place])) != math.prod(info.shape):
            raise ValueError(f"{name}: its boxes hold {entries} entries of {math.prod(info.shape)}")
    counts = [0] * len(paths)
    for held, count in zip(lists, users, strict=True):
        for part in held:
            counts[part.table] += count
    tables = {}
    for (path, info), count in zip(paths.items(), counts, strict=True):
        if not _TABLE_NAME.fullmatch(path):
            raise ValueError(f"names the file {path!r}, which is not of the form {table_path(0)}")
        size, files = _naturals([info["bytes"], info["files"]])
        if size > MAX_BYTES:
            raise ValueError(f"{path} has {size:,} bytes, and at most {MAX_BYTES:,} are read")
        tables[path] = TableInfo(size, info["sha256"], files, count)
    return found, tables


def parse_table(data: bytes, number: int, info: TableInfo, manifest: Manifest) -> Table:
    """The table `number` of `manifest`, in the bytes of its file. ValueError unless it has the sha256 and the content
    that the manifest says in `info`."""
    if hashlib.sha256(data).hexdigest() != info.sha256:
        raise ValueError(f"damaged: its sha256 is not the one in {MANIFEST}")
    table = parse_files(parse_json(data.partition(b"\n")[2]), manifest.tensors)
    if (len(table.files), len(table.parts)) != (info.files, info.tensors):
        raise ValueError(
            f"lists {len(table.files)} files and {len(table.parts)} tensors: {MANIFEST} says {info.files} "
            f"and {info.tensors}"
        )
    for name, parts in table.parts.items():
        held = manifest.held[name]
        at = bisect.bisect_left(held, (number,))
        if at == len(held) or held[at] != (number, *extent([part.box for part in parts])):
            raise ValueError(f"its part of {name} is not the one that {MANIFEST} says")
    return table


def parse_files(files: Any, tensors: Mapping[str, TensorInfo]) -> Table:
    """The second line of a table, or the files of a manifest of version 1. ValueError where a path, a box or a size is
    impossible."""
    table = Table({}, {})
    for file, info in files.items():
        if not FILE_NAME.fullmatch(file):
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


def check_sizes(folder: Path, files: Mapping[str, FileInfo]) -> None:
    """Raise ValueError unless `files` are there, of the right sizes."""
    for file, info in files.items():
        check_size(folder / file, info.bytes)


def check_size(path: Path, expected: int) -> None:
    """Raise ValueError unless the file `path` is there and has `expected` bytes."""
    with errors_named(path):
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
