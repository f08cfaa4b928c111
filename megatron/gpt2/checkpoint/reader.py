"""Reading a checkpoint: nothing is believed before it is checked, and boxes are cut out of boxes.

`Checkpoint.read` intersects the box that is asked for with those that were saved, so that one function serves resume,
merging, splitting and resharding, of weights and of optimizer state.
"""

import bisect
import itertools
import mmap
import threading
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from data_utils.files import hash_file
from megatron.gpt2.checkpoint.boxes import check_cover, common, rows, within
from megatron.gpt2.checkpoint.files import file_header, in_threads, tensor_name
from megatron.gpt2.checkpoint.manifest import MANIFEST
from megatron.gpt2.checkpoint.parsing import (
    MAX_BYTES,
    FileInfo,
    Part,
    Table,
    TensorInfo,
    check_size,
    check_sizes,
    errors_named,
    parse_manifest,
    parse_table,
    without_garbage_collection,
)
from mpu.partition import Box


class NamedTensors:
    """Tensors by name, read whole or a box at a time. A subclass says in `read_into` how a box is filled."""

    path: Path
    tensors: dict[str, TensorInfo]

    def names(self) -> list[str]:
        """All names, in the order of the checkpoint."""
        return list(self.tensors)

    def global_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor, without padding."""
        return self.tensors[name].shape

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """The box of `name` at `offset` with `shape` (default: the whole tensor): a new CPU tensor, dtype as saved."""
        if name not in self.tensors:
            raise ValueError(f"{self.path}: holds no tensor {name}")
        info = self.tensors[name]
        out = torch.empty(info.shape if shape is None else shape, dtype=info.dtype)
        self.read_into(out, name, offset or (0,) * len(info.shape))
        return out

    def read_into(self, out: Tensor, name: str, offset: tuple[int, ...]) -> None:
        """Fill `out`, of any dtype and device, with the box of `name` that is at `offset` and has its shape."""
        raise NotImplementedError


class Checkpoint(NamedTensors):
    """One iteration, opened for reading; the native `Source` of megatron/gpt2/checkpoint/source.py.

    Its manifest is read and checked. A table is read, and checked against the manifest, when a part of a tensor is
    wanted that it holds. `damage` checks the sizes and bytes of the files. ValueError, in one line, for anything that
    is not right.
    """

    format: ClassVar[str] = "native"
    left_out: ClassVar[tuple[str, ...]] = ()
    path: Path
    iteration: int
    facts: dict[str, Any]
    digest: str  # sha256 of the manifest
    tensors: dict[str, TensorInfo]

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._maps: dict[str, tuple[mmap.mmap, dict[str, int]]] = {}
        self._reading = threading.Lock()
        where = self.path / MANIFEST
        with errors_named(where), without_garbage_collection():
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
        self._paths = list(manifest.tables)  # where the tables are, by their numbers
        self._tables = {0: manifest.inside} if manifest.inside else {}
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
                with errors_named(where), without_garbage_collection():
                    table = parse_table(where.read_bytes(), number, info, self._manifest)
                    if twice := self._infos.keys() & table.files.keys():
                        raise ValueError(f"lists {min(twice)}, which another table lists too")
                self._infos.update(table.files)
                self._tables[number] = table
        return self._tables[number]

    def damage(self, rank: int = 0, world_size: int = 1, *, hashed: bool = True) -> str:
        """The first fault, in one line, of this rank's share of the tables and files; "" where there is none.

        A table has to be as the manifest says. A file has to be there and have the right size, and with `hashed` the
        right bytes. The shares of ranks 0 to `world_size` - 1 together are all tables and files.
        """
        try:
            for number in range(rank, len(self._paths), world_size):
                check_sizes(self.path, self._table(number).files)
            # File by file, since a few tables may list all that is large.
            ends = list(itertools.accumulate(info.files for info in self._manifest.tables.values()))
            share = []
            for place in range(rank, ends[-1] if ends and hashed else 0, world_size):
                number = bisect.bisect_right(ends, place)
                files = list(self._table(number).files)
                share.append((files[place - ends[number] + len(files)], number))
        except ValueError as error:
            return str(error)
        return next(filter(None, in_threads(lambda place: self._damaged(*place), share)), "")

    def _damaged(self, file: str, number: int) -> str:
        try:
            if hash_file(self.path / file) == self._infos[file].sha256:
                return ""
        except OSError as error:
            return f"{self.path / file}: cannot be read: {error.strerror}"
        return f"{self.path / file}: damaged: its sha256 is not the one in {self._paths[number]}"

    def verify(self) -> str:
        """The first fault, in one line, of any file or of the boxes of any tensor; "" where there is none. Reads every
        byte."""
        try:
            for name, info in self.tensors.items():
                self._boxes_of(name, Box((0,) * len(info.shape), info.shape))
        except ValueError as error:
            return str(error)
        return self.damage()

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """As `NamedTensors.read`. ValueError where the tables do not hold all of the box."""
        if name in self.tensors:  # no memory is taken for what is not there
            info = self.tensors[name]
            self._boxes_of(name, Box(offset or (0,) * len(info.shape), info.shape if shape is None else shape))
        return super().read(name, offset, shape)

    def read_into(self, out: Tensor, name: str, offset: tuple[int, ...]) -> None:
        """As `NamedTensors.read_into`, out of the saved boxes that meet the one that is asked for."""
        target = Box(offset, tuple(out.shape))
        for part, shared in self._boxes_of(name, target):
            out[within(shared, target).slices()].copy_(self._view(part)[within(shared, part.box).slices()])

    def _boxes_of(self, name: str, target: Box) -> list[tuple[Part, Box]]:
        """The saved boxes that meet `target`, a box of `name`, each with the common part. ValueError unless these parts
        make up `target`, each entry once."""
        whole = Box((0,) * len(self.tensors[name].shape), self.tensors[name].shape)
        if common(target, whole) != target and target.numel:
            raise ValueError(f"{self.path}: {name} has shape {whole.shape}, which does not contain {target}")
        top, bottom = rows(target)
        numbers = (
            [held.table for held in self._manifest.held[name] if held.top < bottom and top < held.bottom]
            if self._manifest.inside is None
            else [0]
        )
        parts = [
            (part, shared)
            for number in numbers
            for part in self._table(number).parts.get(name, ())
            if (shared := common(part.box, target)).numel
        ]
        with errors_named(self.path / MANIFEST):
            check_cover(name, target.shape, [within(shared, target) for _, shared in parts])
        return parts

    def _view(self, part: Part) -> Tensor:
        """The saved box itself, mapped from the file."""
        if part.file not in self._maps:
            boxes = self._infos[part.file].boxes
            header, starts, size = file_header(
                part.file,
                self.iteration,
                boxes,
                {tensor_name(key): self.tensors[tensor_name(key)].dtype for key in boxes},
            )
            where = self.path / part.file
            check_size(where, self._infos[part.file].bytes)
            with errors_named(where):
                with open(where, "rb") as stream:
                    # A private mapping: torch warns about memory that it could not write to.
                    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
                if len(mapped) != size or mapped[: len(header)] != header:
                    raise ValueError("its header is not the one that its boxes have")
            self._maps[part.file] = mapped, starts
        mapped, starts = self._maps[part.file]
        return torch.frombuffer(
            mapped, dtype=self.tensors[tensor_name(part.key)].dtype, count=part.box.numel, offset=starts[part.key]
        ).view(part.box.shape)
