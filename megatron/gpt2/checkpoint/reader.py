"""The native checkpoint format and its reader. The reader checks all data before their use, and reads any slice of a
tensor from the saved slices.

manifest.json, in an iteration's folder, is one JSON object:

    version     the version of this format, `CHECKPOINT_VERSION`
    iteration   the same number as in the folder's name
    metadata    about the run
    tensors     {tensor: {"dtype", "shape": global, without padding, "table_ranges": an index of `table_ranges`}}
    table_ranges
                lists of [table, first row, one past the last row, elements]. Each list names the tables with slices of
                a tensor, by their index in `tables`. Tensors that are split equally, such as moments, share a list
    tables      {path: {"bytes", "sha256", "files": the number of files that the table lists}}
    sha256      the hash of all bytes of the manifest before this entry

tables/rank_00000.jsonl, the table of a rank, has two lines, each a JSON object:

    {"files": their number, "tensors": {tensor: [dtype, shape, first row, one past the last row, elements]}}
    {path: {"bytes", "sha256", "slices": {key: {"offset", "shape"}}}}

The manifest has the hashes of the tables, and the tables have the hashes of the files. A commit hashes every table and
parses only its first line. A load parses the second lines of tables with needed rows, and of the tables that this rank
checks (`find_damage`).

Older versions are read, too. Version 2 differs in names: `facts` for metadata, `held` for table_ranges, "boxes" for
slices and for the folder of the tables. In version 1, the manifest itself has the second lines of all ranks as `files`,
and the reader treats this manifest as the only table.

The key of a slice is the tensor's name. If a file has several slices of a tensor, the next keys end in "#1", "#2" and
so on. The reader never parses a safetensors header. Instead, the reader computes the header of each file from the table
and compares the bytes. The reader therefore refuses a duplicate key, a wrong size, and a file of a different iteration
or rank.
"""

import contextlib
import gc
import hashlib
import math
import re
import reprlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_utils.command_line import require
from data_utils.files import (
    hash_file,
    in_threads,
    parse_json,
    read_file,
    safetensors_header,
    verify_checksum,
    wrap_errors,
)
from megatron.gpt2.checkpoint.interface import (
    BaseCheckpoint,
    TensorInfo,
    check_coverage,
    check_inside,
    intersection,
    relative_slice,
)
from megatron.gpt2.config.sections import with_new_names
from mpu.partition import TensorSlice

# The docstring of data_utils/files has a table of all formats and their versions.
CHECKPOINT_VERSION = 3
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20  # the largest size of a manifest or a table: 1,000 times the size in a small run
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
SAFETENSORS_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}
# a relative path that does not lead out of the folder
_FILE_NAME = re.compile(r"mp_rank_\d{2,5}(_\d{3})?/[a-z]\w*\.safetensors", re.ASCII)


class FileInfo(NamedTuple):
    """An entry of a table: the file's size, its sha256 in hexadecimal, and its slices by key."""

    bytes: int
    sha256: str
    slices: dict[str, TensorSlice]


class SavedShard(NamedTuple):
    """A saved slice of a tensor: its key in a file, the file's path, and the file's entry in the table."""

    tensor_slice: TensorSlice
    key: str
    file: str
    info: FileInfo


class RankTable(NamedTuple):
    """The parsed table of a rank: files by path, and saved shards by tensor name."""

    files: dict[str, FileInfo]
    shards: dict[str, list[SavedShard]]


class TableInfo(NamedTuple):
    """The entry of a table in the manifest: its size, and its sha256 in hexadecimal."""

    bytes: int
    sha256: str


def table_path(rank: int) -> str:
    """Return the path of a rank's table, relative to the folder of the iteration."""
    return f"tables/rank_{rank:05d}.jsonl"


def tensor_name(key: str) -> str:
    """Return the name of the tensor that a key belongs to: `x` for the keys `x` and `x#2`."""
    return key.partition("#")[0]


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector inside the block. The collector would scan the growing objects again and
    again, and take two thirds of the parsing time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def row_range(tensor_slice: TensorSlice) -> tuple[int, int]:
    """Return the first row of a slice, and the row after its last one. A scalar has one row."""
    return (tensor_slice.offset[0], tensor_slice.offset[0] + tensor_slice.shape[0]) if tensor_slice.shape else (0, 1)


def extent(shards: Sequence[SavedShard]) -> tuple[int, int, int]:
    """Return for `shards` of a tensor the first row, the row after the last one, and the number of elements."""
    tops, bottoms = zip(*(row_range(shard.tensor_slice) for shard in shards), strict=True)
    return min(tops), max(bottoms), sum(shard.tensor_slice.numel for shard in shards)


def file_header(
    file: str, iteration: int, slices: Mapping[str, tuple[torch.dtype, TensorSlice]]
) -> tuple[bytes, dict[str, int], int]:
    """Return the safetensors header of `file` with `slices`, the first byte of each key's values in file order, and the
    file's size. Tensors of wide dtypes are first in the file, so that every tensor is aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "file": file, "iteration": str(iteration)}}
    starts: dict[str, int] = {}
    end = 0
    for key in sorted(slices, key=lambda key: (-slices[key][0].itemsize, key)):
        dtype, tensor_slice = slices[key]
        starts[key], end = end, end + tensor_slice.numel * dtype.itemsize
        entries[key] = {
            "dtype": SAFETENSORS_CODES[dtype],
            "shape": tensor_slice.shape,
            "data_offsets": [starts[key], end],
        }
    header = safetensors_header(entries)
    return header, {key: len(header) + start for key, start in starts.items()}, len(header) + end


def parse_table(files: Any, tensors: Mapping[str, TensorInfo]) -> RankTable:
    """Parse the files and slices of a rank: the second line of a table, or the entry `files` in a manifest of version
    1. Raises ValueError, KeyError, TypeError or AttributeError, which `wrap_errors` converts, if a path, a slice or a
    size is not possible."""
    table = RankTable({}, {})
    for file, info in files.items():
        if not _FILE_NAME.fullmatch(file):
            raise ValueError(f"names the file {file!r}, which is not of the form mp_rank_00/name.safetensors")
        slices = {
            key: TensorSlice(_integers(saved["offset"]), _integers(saved["shape"]))
            for key, saved in info["slices"].items()
        }
        (size_on_disk,) = _integers([info["bytes"]])
        table.files[file] = entry = FileInfo(size_on_disk, info["sha256"], slices)
        size = 0
        for key, tensor_slice in slices.items():
            name = tensor_name(key)
            check_inside(name, tensors[name].shape, tensor_slice)
            table.shards.setdefault(name, []).append(SavedShard(tensor_slice, key, file, entry))
            size += tensor_slice.numel * tensors[name].dtype.itemsize
        require(size <= size_on_disk, f"the slices of {file} do not fit into its {size_on_disk} bytes")
    return table


def check_file_size(path: Path, expected: int) -> None:
    """Raise ValueError unless the file `path` exists and has `expected` bytes."""
    with wrap_errors(path):
        require(path.is_file(), "missing")  # Opening a pipe would wait for a writer.
        size = path.stat().st_size
        require(size == expected, f"has {size:,} bytes instead of {expected:,}")


def _integers(values: Any, at_most: int = 2) -> tuple[int, ...]:
    """Return the list `values` of non-negative integers as a tuple. Our tensors have at most 2 dimensions. Longer lists
    are refused, because their product could take minutes."""
    if not isinstance(values, list) or len(values) > at_most or not all(type(v) is int and v >= 0 for v in values):
        raise ValueError(f"{reprlib.repr(values)} should be a list of at most {at_most} whole numbers")
    return tuple(values)


class NativeCheckpoint(BaseCheckpoint):
    """A checkpoint in the native format, opened for reading.

    manifest_sha256: the hash of the manifest's bytes.
    tables: `TableInfo` by path.

    The constructor reads and checks the manifest. A table is read, and checked against the manifest, when a read needs
    one of its shards. `find_damage` checks the sizes and hashes of the files. All errors are ValueErrors in one line.
    """

    format = "native"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._parsed: dict[int, RankTable] = {}
        self._mapped: dict[str, tuple[Any, dict[str, int]]] = {}
        self._lock = threading.Lock()
        manifest = self.path / MANIFEST
        with wrap_errors(manifest), without_garbage_collection():
            require(manifest.is_file(), "missing: the folder is not a checkpoint, or an incomplete one")
            self._parse(read_file(manifest, MAX_MANIFEST_BYTES))
            is_named = self.path.name.startswith(f"iter_{self.iteration:07d}")
            require(is_named, f"belongs to iteration {self.iteration}")

    def _parse(self, data: bytes) -> None:
        """Set the attributes from the bytes of the manifest. Raises ValueError if the manifest is damaged, contradicts
        itself or has a version that this program does not read."""
        self.manifest_sha256 = verify_checksum(data)
        manifest = parse_json(data)
        version, self.iteration = _integers([manifest["version"], manifest["iteration"]])
        require(
            version <= CHECKPOINT_VERSION,
            f"format version {version} is newer than {CHECKPOINT_VERSION}, the newest that this program reads: update "
            "the program",
        )
        is_old = version < CHECKPOINT_VERSION
        self._rename: Callable[[Any], Any] = with_new_names if is_old else lambda values: values
        manifest = self._rename(manifest)
        self.metadata = dict(manifest["metadata"])
        self.tensors = {
            name: TensorInfo(SAFETENSORS_DTYPES[info["dtype"]], _integers(info["shape"]))
            for name, info in manifest["tensors"].items()
        }
        self.tables: dict[str, TableInfo] = {}
        # {tensor: {table: (first row, row after the last one, number of elements in the table)}}
        self._table_ranges: dict[str, dict[int, tuple[int, int, int]]] = {}
        if version == 1:
            self.tables[MANIFEST] = TableInfo(len(data), self.manifest_sha256)
            self._parsed[0] = parse_table(manifest["files"], self.tensors)
            self._table_ranges = {name: {0: extent(shards)} for name, shards in self._parsed[0].shards.items()}
        else:
            for number, (path, info) in enumerate(manifest["tables"].items()):
                (size,) = _integers([info["bytes"]])
                expected = f"boxes/rank_{number:05d}.jsonl" if is_old else table_path(number)
                require(path == expected, f"names the file {path!r} instead of {expected}")
                require(size <= MAX_MANIFEST_BYTES, f"{path} has {size:,} bytes, more than {MAX_MANIFEST_BYTES:,}")
                self.tables[path] = TableInfo(size, info["sha256"])
            lists = [_parse_table_ranges(entries, len(self.tables)) for entries in manifest["table_ranges"]]
            for name, info in manifest["tensors"].items():
                (index,) = _integers([info["table_ranges"]])
                require(index < len(lists), f"{name}: `table_ranges` has no entry {index}")
                self._table_ranges[name] = lists[index]
        # Many tensors share a list of thousands of tables, so each list is summed only once.
        entries = {id(ranges): sum(count for _, _, count in ranges.values()) for ranges in self._table_ranges.values()}
        for name, tensor in self.tensors.items():
            saved, numel = entries.get(id(self._table_ranges.get(name)), 0), math.prod(tensor.shape)
            require(saved == numel, f"{name}: its slices hold {saved} entries of {numel}")

    def _table(self, number: int) -> RankTable:
        """Return a table. The first call for a table reads its file."""
        with self._lock:
            if number not in self._parsed:
                path, info = list(self.tables.items())[number]
                check_file_size(self.path / path, info.bytes)
                with wrap_errors(self.path / path), without_garbage_collection():
                    data = (self.path / path).read_bytes()
                    is_same = hashlib.sha256(data).hexdigest() == info.sha256
                    require(is_same, f"damaged: its sha256 differs from {MANIFEST}")
                    table = parse_table(self._rename(parse_json(data.partition(b"\n")[2])), self.tensors)
                    for name, shards in table.shards.items():
                        is_same = self._table_ranges[name].get(number) == extent(shards)
                        require(is_same, f"its rows of {name} differ from {MANIFEST}")
                    self._parsed[number] = table
        return self._parsed[number]

    @property
    def files(self) -> dict[str, FileInfo]:
        """The files of all tables, by path. Reads every table."""
        return {file: info for number in range(len(self.tables)) for file, info in self._table(number).files.items()}

    def find_damage(self, rank: int = 0, world_size: int = 1, *, check_hashes: bool = True) -> str:
        """Check this rank's share of the tables and files. Return the first error, in one line, or "" if there is none.

        Tables must match the manifest. Files must exist with the right size and, with `check_hashes`, the right hash.
        Ranks 0 to `world_size` - 1 together check all tables and files.
        """

        def check(of_file: tuple[str, FileInfo, str]) -> None:
            file, info, table = of_file
            check_file_size(self.path / file, info.bytes)
            with wrap_errors(self.path / file):
                is_same = not check_hashes or hash_file(self.path / file) == info.sha256
                require(is_same, f"damaged: its sha256 differs from {table}")

        share: list[tuple[str, FileInfo, str]] = []
        paths = list(self.tables)
        tables = max(len(paths), 1)
        try:
            # Each rank checks whole tables. If there are more ranks than tables, several ranks share the files of a
            # table.
            for number in range(rank % tables, len(paths), world_size):
                sharing = max(len(range(number, world_size, tables)), 1)
                files = list(self._table(number).files.items())[rank // tables :: sharing]
                share += [(*file, paths[number]) for file in files]
            in_threads(check, share)
        except ValueError as error:
            return str(error)
        return ""

    def verify(self) -> str:
        """Check every byte of all files, and that slices cover each tensor. Return the first error, in one line, or ""
        if there is none."""
        try:
            for name, info in self.tensors.items():
                self.saved_slices(name, TensorSlice((0,) * len(info.shape), info.shape))
        except ValueError as error:
            return str(error)
        return self.find_damage()

    def saved_slices(self, name: str, target: TensorSlice) -> list[tuple[TensorSlice, Callable[[], Tensor]]]:
        """Return the saved slices of `name` that overlap `target`. Raises ValueError unless these slices cover each
        entry of `target` exactly once."""
        first_row, end_row = row_range(target)
        shards = [
            shard
            for number, (top, bottom, _) in self._table_ranges[name].items()
            if top < end_row and first_row < bottom
            for shard in self._table(number).shards.get(name, ())
            if intersection(shard.tensor_slice, target).numel
        ]
        with wrap_errors(self.path / MANIFEST):
            shared = [relative_slice(intersection(shard.tensor_slice, target), target) for shard in shards]
            check_coverage(name, target.shape, shared)
        return [(shard.tensor_slice, partial(self._map_shard, shard)) for shard in shards]

    def _map_shard(self, shard: SavedShard) -> Tensor:
        """Return the values of a saved shard, memory-mapped from its file."""
        if shard.file not in self._mapped:
            file = self.path / shard.file
            slices = {
                key: (self.tensors[tensor_name(key)].dtype, tensor_slice)
                for key, tensor_slice in shard.info.slices.items()
            }
            header, starts, size = file_header(shard.file, self.iteration, slices)
            check_file_size(file, shard.info.bytes)
            with wrap_errors(file):
                # "c" makes a private, writable mapping, because torch warns about read-only memory.
                mapped = np.memmap(file, np.uint8, "c")
                is_same = len(mapped) == size and mapped[: len(header)].tobytes() == header
                require(is_same, "its header does not match the slices that its table lists")
            self._mapped[shard.file] = mapped, starts
        mapped, starts = self._mapped[shard.file]
        dtype = self.tensors[tensor_name(shard.key)].dtype
        return torch.frombuffer(mapped, dtype=dtype, count=shard.tensor_slice.numel, offset=starts[shard.key]).view(
            shard.tensor_slice.shape
        )


def _parse_table_ranges(entries: Any, tables: int) -> dict[int, tuple[int, int, int]]:
    """Parse a list of the manifest's `table_ranges`. Return the first row, one past the last row, and the number of
    elements of each table."""
    ranges = {table: (top, bottom, count) for table, top, bottom, count in (_integers(entry, 4) for entry in entries)}
    is_known = all(table < tables for table in ranges)
    require(is_known, f"{reprlib.repr(entries)} names a table that is not one of the {tables}")
    return ranges
