"""Our own format, and how it is read: nothing is used before it is checked, and boxes are cut out of boxes.

manifest.json, in an iteration's folder, is one JSON object:

    version     of this format: data_utils/files/__init__.py
    iteration   as in the folder's name
    facts       what the writer says about the run
    tensors     {tensor: {"dtype", "shape", "held"}}, shapes being global and without padding; held: an index of `held`
    held        lists of [table, first row, one past the last row, entries]: the tables that hold a part of a tensor, as
                indices of `tables`, and what each holds. Masters and moments, cut alike, share a list
    tables      {path: {"bytes", "sha256", "files"}}; files: how many it lists
    sha256      of every byte of the manifest before it

boxes/rank_00000.jsonl, the table of the rank, has two lines, each a JSON object:

    {"files": how many, "tensors": {tensor: [dtype, shape, first row, one past the last row, entries]}}
    {path: {"bytes", "sha256", "boxes": {key: {"offset", "shape"}}}}

So the manifest seals the tables, and they seal the files. A commit reads only the first lines, a load the second lines
of the tables that hold some of the rows that it wants. In version 1 the manifest held the second lines of all ranks, as
`files`; it is read as its own only table.

A key is the tensor's name; a file that holds several boxes of one tensor appends "#1", "#2", ... The bytes of a
file's own header follow from its table, so that a reader compares headers and parses none: one with a duplicate
key, of a wrong size, or from another iteration or rank cannot pass.
"""

import contextlib
import gc
import hashlib
import math
import re
import reprlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from data_utils.files import (
    CHECKPOINT_VERSION,
    OLDEST_CHECKPOINT_VERSION,
    check_seal,
    errors_of,
    hash_file,
    parse_json,
    safetensors_header,
)
from megatron.gpt2.checkpoint.source import Source, TensorInfo, check_cover, check_inside, common, within
from mpu.partition import Box

MANIFEST = "manifest.json"
MAX_BYTES = 16 << 20  # of the manifest, and of each table: a thousand times what a small run needs
THREADS = 4
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
# No path of this form is absolute or has a "..".
_FILE_NAME = re.compile(r"mp_rank_\d{2,5}(_\d{3})?/[a-z]\w*\.safetensors", re.ASCII)
T = TypeVar("T")
R = TypeVar("R")


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
    """A rank's table, read: the files that it lists, and the parts of each tensor in them."""

    files: dict[str, FileInfo]
    parts: dict[str, list[Part]]


class TableInfo(NamedTuple):
    """What the manifest says of a table: size, and sha256 in hexadecimal."""

    bytes: int
    sha256: str


def table_path(rank: int) -> str:
    """The path of a rank's table in the iteration's folder."""
    return f"boxes/rank_{rank:05d}.jsonl"


def tensor_name(key: str) -> str:
    """The tensor for which a key of a file stands: `x` of `x` and of `x#2`."""
    return key.partition("#")[0]


def in_threads(work: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> list[R]:
    """`work` of each item, by several threads at once: hashing and copying both release Python's interpreter lock. The
    first error, in the order of the items, is raised after all threads have ended."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


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


def rows(box: Box) -> tuple[int, int]:
    """The first row, and one past the last; a number without dimensions is one row."""
    return (box.offset[0], box.offset[0] + box.shape[0]) if box.shape else (0, 1)


def extent(parts: Sequence[Part]) -> tuple[int, int, int]:
    """The first row, one past the last, and the entries of parts of a tensor."""
    tops, bottoms = zip(*(rows(part.box) for part in parts), strict=True)
    return min(tops), max(bottoms), sum(part.box.numel for part in parts)


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


def parse_files(files: Any, tensors: Mapping[str, TensorInfo]) -> Table:
    """The second line of a table, or the files of a manifest of version 1. ValueError, KeyError, TypeError or
    AttributeError, for `errors_of`, if a path, a box or a size is impossible."""
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


class Checkpoint(Source):
    """One iteration of our own format, opened for reading. digest: sha256 of the manifest. tables: by path.

    Its manifest is read and checked. A table is read, and checked against the manifest, when a part of a tensor is
    wanted that it holds. `damage` checks the sizes and bytes of the files. ValueError, in one line, for anything that
    is not right.
    """

    format = "native"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._read: dict[int, Table] = {}
        self._infos: dict[str, FileInfo] = {}  # of the files of all tables in `_read`
        self._maps: dict[str, tuple[Any, dict[str, int]]] = {}
        self._reading = threading.Lock()
        where = self.path / MANIFEST
        with errors_of(where), without_garbage_collection():
            if not where.is_file():
                raise ValueError("missing, so this is no checkpoint or an incomplete one")
            if where.stat().st_size > MAX_BYTES:
                raise ValueError(f"larger than {MAX_BYTES:,} bytes")
            self._parse(where.read_bytes())
            if not self.path.name.startswith(f"iter_{self.iteration:07d}"):
                raise ValueError(f"belongs to iteration {self.iteration}")

    def _parse(self, data: bytes) -> None:
        """Take over the manifest, unless it is damaged, of a version that this program does not read, or contradicts
        itself."""
        self.digest = check_seal(data)
        manifest = parse_json(data)
        version, self.iteration = _naturals([manifest["version"], manifest["iteration"]])
        if version > CHECKPOINT_VERSION:
            raise ValueError(
                f"format version {version} is newer than {CHECKPOINT_VERSION}, the newest that this "
                "program reads: update the program"
            )
        if version < OLDEST_CHECKPOINT_VERSION:
            raise ValueError(f"format version {version} never was")
        self.facts = dict(manifest["facts"])
        self.tensors = {
            name: TensorInfo(DTYPES[info["dtype"]], _naturals(info["shape"]))
            for name, info in manifest["tensors"].items()
        }
        self.tables: dict[str, TableInfo] = {}
        # By tensor, and the number of a table: the first row, one past the last, and the entries that it holds.
        self._held: dict[str, dict[int, tuple[int, int, int]]] = {}
        if version == 1:
            self.tables[MANIFEST] = TableInfo(len(data), self.digest)
            self._add(0, parse_files(manifest["files"], self.tensors))
            self._held = {name: {0: extent(parts)} for name, parts in self._read[0].parts.items()}
        else:
            for number, (path, info) in enumerate(manifest["tables"].items()):
                (size,) = _naturals([info["bytes"]])
                if path != table_path(number):
                    raise ValueError(f"names the file {path!r} instead of {table_path(number)}")
                if size > MAX_BYTES:
                    raise ValueError(f"{path} has {size:,} bytes, and at most {MAX_BYTES:,} are read")
                self.tables[path] = TableInfo(size, info["sha256"])
            lists = [_held(entries, len(self.tables)) for entries in manifest["held"]]
            for name, info in manifest["tensors"].items():
                (place,) = _naturals([info["held"]])
                if place >= len(lists):
                    raise ValueError(f"{name}: no list {place} says what holds it")
                self._held[name] = lists[place]
        entries = {id(held): sum(count for _, _, count in held.values()) for held in self._held.values()}
        for name, tensor in self.tensors.items():
            found = entries[id(self._held[name])] if name in self._held else 0
            if found != math.prod(tensor.shape):
                raise ValueError(f"{name}: its boxes hold {found} entries of {math.prod(tensor.shape)}")

    def _add(self, number: int, table: Table) -> None:
        if twice := self._infos.keys() & table.files.keys():
            raise ValueError(f"lists {min(twice)}, which another table lists too")
        self._infos |= table.files
        self._read[number] = table

    def _table(self, number: int) -> Table:
        """A table, which is read when it is first wanted."""
        with self._reading:
            if number not in self._read:
                path, info = list(self.tables.items())[number]
                check_size(self.path / path, info.bytes)
                with errors_of(self.path / path), without_garbage_collection():
                    data = (self.path / path).read_bytes()
                    if hashlib.sha256(data).hexdigest() != info.sha256:
                        raise ValueError(f"damaged: its sha256 is not the one in {MANIFEST}")
                    table = parse_files(parse_json(data.partition(b"\n")[2]), self.tensors)
                    for name, parts in table.parts.items():
                        if self._held[name].get(number) != extent(parts):
                            raise ValueError(f"its part of {name} is not the one that {MANIFEST} says")
                    self._add(number, table)
        return self._read[number]

    @property
    def files(self) -> dict[str, FileInfo]:
        """All files of all tables, by path. Reads every table."""
        return {file: info for number in range(len(self.tables)) for file, info in self._table(number).files.items()}

    def damage(self, rank: int = 0, world_size: int = 1, *, hashed: bool = True) -> str:
        """The first fault, in one line, of this rank's share of the tables and files; "" if there is none.

        A table has to be as the manifest says. A file has to be there and have the right size, and with `hashed` the
        right bytes. The shares of ranks 0 to `world_size` - 1 together are all tables and files.
        """

        def check(file_and_table: tuple[str, str]) -> None:
            file, table = file_and_table
            check_size(self.path / file, self._infos[file].bytes)
            with errors_of(self.path / file):
                if hashed and hash_file(self.path / file) != self._infos[file].sha256:
                    raise ValueError(f"damaged: its sha256 is not the one in {table}")

        share: list[tuple[str, str]] = []
        paths = list(self.tables)
        tables = max(len(paths), 1)
        try:
            # Each rank has whole tables. If there are more ranks, some of them share the files of one table.
            for number in range(rank % tables, len(paths), world_size):
                sharing = max(len(range(number, world_size, tables)), 1)
                files = list(self._table(number).files)[rank // tables :: sharing]
                share += [(file, paths[number]) for file in files]
            in_threads(check, share)
        except ValueError as error:
            return str(error)
        return ""

    def verify(self) -> str:
        """The first fault, in one line, of any file or of the boxes of any tensor; "" if there is none. Reads every
        byte."""
        try:
            for name, info in self.tensors.items():
                self._parts_in(name, Box((0,) * len(info.shape), info.shape))
        except ValueError as error:
            return str(error)
        return self.damage()

    def read_into(self, out: Tensor, name: str, offset: tuple[int, ...]) -> None:
        """As `Source.read_into`, out of the saved boxes that meet the one that is asked for. One function so serves
        resume, merging, splitting and resharding, of weights and of optimizer state."""
        target = Box(offset, tuple(out.shape))
        for part, shared in self._parts_in(name, target):
            out[within(shared, target).slices()].copy_(self._view(part)[within(shared, part.box).slices()])

    def _parts_in(self, name: str, target: Box) -> list[tuple[Part, Box]]:
        """The saved boxes that meet `target`, a box of `name`, each with the common part. ValueError unless these parts
        make up `target`, each entry once."""
        shape = self.tensors[name].shape
        if common(target, Box((0,) * len(shape), shape)) != target and target.numel:
            raise ValueError(f"{self.path}: {name} has shape {shape}, which does not contain {target}")
        first, last = rows(target)
        parts = [
            (part, shared)
            for number, (top, bottom, _) in self._held[name].items()
            if top < last and first < bottom
            for part in self._table(number).parts.get(name, ())
            if (shared := common(part.box, target)).numel
        ]
        with errors_of(self.path / MANIFEST):
            check_cover(name, target.shape, [within(shared, target) for _, shared in parts])
        return parts

    def _view(self, part: Part) -> Tensor:
        """The saved box itself, mapped from the file."""
        if part.file not in self._maps:
            where, info = self.path / part.file, self._infos[part.file]
            boxes = {key: (self.tensors[tensor_name(key)].dtype, box) for key, box in info.boxes.items()}
            header, starts, size = file_header(part.file, self.iteration, boxes)
            check_size(where, info.bytes)
            with errors_of(where):
                # Changes would be private: torch warns about memory that it could not write to.
                mapped = np.memmap(where, np.uint8, "c")
                if len(mapped) != size or mapped[: len(header)].tobytes() != header:
                    raise ValueError("its header is not the one that its boxes have")
            self._maps[part.file] = mapped, starts
        mapped, starts = self._maps[part.file]
        dtype = self.tensors[tensor_name(part.key)].dtype
        return torch.frombuffer(mapped, dtype=dtype, count=part.box.numel, offset=starts[part.key]).view(part.box.shape)


def _held(entries: Any, tables: int) -> dict[int, tuple[int, int, int]]:
    """A list of `held`, by table."""
    held = {table: (top, bottom, count) for table, top, bottom, count in (_naturals(entry, 4) for entry in entries)}
    if any(table >= tables for table in held):
        raise ValueError(f"{reprlib.repr(entries)} names a table of {tables}")
    return held
