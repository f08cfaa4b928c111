"""Reading a checkpoint: nothing is used before it is checked, and boxes are cut out of boxes.

`Checkpoint.read` intersects the box that is asked for with those that were saved, so that one function serves resume,
merging, splitting and resharding, of weights and of optimizer state.
"""

import bisect
import contextlib
import gc
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from data_utils.files import errors_of, hash_file
from megatron.gpt2.checkpoint.boxes import check_cover, common, rows, within
from megatron.gpt2.checkpoint.manifest import (
    MANIFEST,
    MAX_BYTES,
    FileInfo,
    Part,
    Table,
    check_size,
    file_header,
    parse_manifest,
    parse_table,
    tensor_name,
)
from megatron.gpt2.checkpoint.source import Source
from mpu.partition import Box

THREADS = 4
T = TypeVar("T")
R = TypeVar("R")


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


class Checkpoint(Source):
    """One iteration of our own format, opened for reading. digest: sha256 of the manifest.

    Its manifest is read and checked. A table is read, and checked against the manifest, when a part of a tensor is
    wanted that it holds. `damage` checks the sizes and bytes of the files. ValueError, in one line, for anything that
    is not right.
    """

    format = "native"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._maps: dict[str, tuple[Any, dict[str, int]]] = {}
        self._reading = threading.Lock()
        where = self.path / MANIFEST
        with errors_of(where), without_garbage_collection():
            if not where.is_file():
                raise ValueError("missing, so this is no checkpoint or an incomplete one")
            if where.stat().st_size > MAX_BYTES:
                raise ValueError(f"larger than {MAX_BYTES:,} bytes")
            manifest = parse_manifest(where.read_bytes())
            if not self.path.name.startswith(f"iter_{manifest.iteration:07d}"):
                raise ValueError(f"belongs to iteration {manifest.iteration}")
        self._manifest = manifest
        self.digest, self.iteration = manifest.digest, manifest.iteration
        self.facts, self.tensors = manifest.facts, manifest.tensors
        self._paths = list(manifest.tables)  # of the tables, by their numbers
        self._tables: dict[int, Table] = {0: manifest.inside} if manifest.inside else {}
        self._infos: dict[str, FileInfo] = dict(manifest.inside.files) if manifest.inside else {}

    @property
    def files(self) -> dict[str, FileInfo]:
        """All files of all tables, by path. Reads every table."""
        return {file: info for number in range(len(self._paths)) for file, info in self._table(number).files.items()}

    @property
    def tables_read(self) -> list[str]:
        """The tables that were read so far."""
        return [self._paths[number] for number in self._tables]

    def _table(self, number: int) -> Table:
        with self._reading:
            if number not in self._tables:
                where = self.path / self._paths[number]
                info = self._manifest.tables[self._paths[number]]
                check_size(where, info.bytes)
                with errors_of(where), without_garbage_collection():
                    table = parse_table(where.read_bytes(), number, info, self._manifest)
                    if twice := self._infos.keys() & table.files.keys():
                        raise ValueError(f"lists {min(twice)}, which another table lists too")
                self._infos.update(table.files)
                self._tables[number] = table
        return self._tables[number]

    def damage(self, rank: int = 0, world_size: int = 1, *, hashed: bool = True) -> str:
        """The first fault, in one line, of this rank's share of the tables and files; "" if there is none.

        A table has to be as the manifest says. A file has to be there and have the right size, and with `hashed` the
        right bytes. The shares of ranks 0 to `world_size` - 1 together are all tables and files.
        """
        # File by file, since a few tables may list all that is large. The first place of each table is its own.
        ends = list(itertools.accumulate(1 + info.files for info in self._manifest.tables.values()))
        share = []
        try:
            for place in range(rank, ends[-1] if ends else 0, world_size):
                number = bisect.bisect_right(ends, place)
                if file := ["", *self._table(number).files][place - ends[number]]:
                    check_size(self.path / file, self._infos[file].bytes)
                    share.append((file, number))
        except ValueError as error:
            return str(error)
        return next(filter(None, in_threads(lambda one: self._damaged(*one), share if hashed else ())), "")

    def _damaged(self, file: str, number: int) -> str:
        try:
            if hash_file(self.path / file) == self._infos[file].sha256:
                return ""
        except OSError as error:
            return f"{self.path / file}: cannot be read: {error.strerror}"
        return f"{self.path / file}: damaged: its sha256 is not the one in {self._paths[number]}"

    def verify(self) -> str:
        """The first fault, in one line, of any file or of the boxes of any tensor; "" if there is none. Reads every
        byte."""
        try:
            for name, info in self.tensors.items():
                self._boxes_of(name, Box((0,) * len(info.shape), info.shape))
        except ValueError as error:
            return str(error)
        return self.damage()

    def check_box(self, name: str, box: Box) -> None:
        """As `Source.check_box`. Reads the tables that hold a part of the box."""
        self._boxes_of(name, box)

    def read_into(self, out: Tensor, name: str, offset: tuple[int, ...]) -> None:
        """As `Source.read_into`, out of the saved boxes that meet the one that is asked for."""
        target = Box(offset, tuple(out.shape))
        for part, shared in self._boxes_of(name, target):
            out[within(shared, target).slices()].copy_(self._view(part)[within(shared, part.box).slices()])

    def _boxes_of(self, name: str, target: Box) -> list[tuple[Part, Box]]:
        """The saved boxes that meet `target`, a box of `name`, each with the common part. ValueError unless these parts
        make up `target`, each entry once."""
        shape = self.tensors[name].shape
        if common(target, Box((0,) * len(shape), shape)) != target and target.numel:
            raise ValueError(f"{self.path}: {name} has shape {shape}, which does not contain {target}")
        first, last = rows(target)
        parts = [
            (part, shared)
            for number, (top, bottom, _) in self._manifest.held[name].items()
            if top < last and first < bottom
            for part in self._table(number).parts.get(name, ())
            if (shared := common(part.box, target)).numel
        ]
        with errors_of(self.path / MANIFEST):
            check_cover(name, target.shape, [within(shared, target) for _, shared in parts])
        return parts

    def _view(self, part: Part) -> Tensor:
        """The saved box itself, mapped from the file."""
        dtype = self.tensors[tensor_name(part.key)].dtype
        if part.file not in self._maps:
            where, info = self.path / part.file, self._infos[part.file]
            header, starts, size = file_header(
                part.file,
                self.iteration,
                {key: (self.tensors[tensor_name(key)].dtype, box) for key, box in info.boxes.items()},
            )
            check_size(where, info.bytes)
            with errors_of(where):
                # Changes would be private: torch warns about memory that it could not write to.
                mapped = np.memmap(where, np.uint8, "c")
                if len(mapped) != size or mapped[: len(header)].tobytes() != header:
                    raise ValueError("its header is not the one that its boxes have")
            self._maps[part.file] = mapped, starts
        mapped, starts = self._maps[part.file]
        return torch.frombuffer(mapped, dtype=dtype, count=part.box.numel, offset=starts[part.key]).view(part.box.shape)
