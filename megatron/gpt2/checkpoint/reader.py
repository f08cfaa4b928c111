"""Reading a checkpoint: nothing is believed before it is checked, and boxes are cut out of boxes.

`Checkpoint.read` intersects the box that is asked for with those that were saved, so that one function serves resume,
merging, splitting and resharding, of weights and of optimizer state.
"""

from __future__ import annotations

import bisect
import gc
import hashlib
import json
import math
import mmap
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.files import (
    CHUNK,
    DTYPES,
    FILE_NAME,
    MANIFEST,
    VERSION,
    file_header,
    in_threads,
    manifest_tail,
    tensor_name,
)
from mpu.partition import Box

MAPPED = 16 << 20  # of a file that is hashed, at once
POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which Python has no name for
MAX_MANIFEST_BYTES = 16 << 20  # a thousand times what a small run needs


@dataclass(frozen=True)
class TensorInfo:
    dtype: torch.dtype
    shape: tuple[int, ...]  # global


@dataclass(frozen=True)
class FileInfo:
    bytes: int
    sha256: str
    boxes: dict[str, Box]


def hash_file(path: Path) -> str:
    """The sha256 of a file, in hexadecimal. OSError where the disk does not give it."""
    sha = hashlib.sha256()
    with open(path, "rb", buffering=0) as stream:
        for part in _parts(stream):
            sha.update(part)
    return sha.hexdigest()


def _parts(stream: FileIO) -> Iterator[memoryview]:
    """The bytes of a file, mapped where the system can: copied into a buffer they take a core a fifth longer to hash.

    Pages are asked for before they are touched, since one that the disk does not give would end the process then.
    """
    try:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(POPULATE_READ, 0, min(MAPPED, len(mapped)))
    except (OSError, ValueError):  # an older system, a filesystem without maps, an empty file
        buffer = memoryview(bytearray(CHUNK))
        while size := stream.readinto(buffer):
            yield buffer[:size]
        return
    with mapped, memoryview(mapped) as view:
        for start in range(0, len(view), MAPPED):
            mapped.madvise(POPULATE_READ, start, min(MAPPED, len(view) - start))
            with view[start:start + MAPPED] as part:
                yield part


class NamedTensors:
    """Tensors by name, read whole or a box at a time; `read_into`, of what is derived, fills a box."""

    path: Path
    tensors: dict[str, TensorInfo]

    def names(self) -> list[str]:
        return list(self.tensors)

    def global_shape(self, name: str) -> tuple[int, ...]:
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
    """One iteration, opened for reading: its manifest is read and checked, its files have the right sizes.

    Their bytes are checked by `verify`. ValueError, in one line, for anything that is not right. It is a `Source` of
    megatron/gpt2/formats/source.py, the native one.
    """

    format: ClassVar[str] = "native"
    left_out: ClassVar[tuple[str, ...]] = ()
    path: Path
    iteration: int
    facts: dict[str, Any]
    digest: str  # sha256 of the manifest
    tensors: dict[str, TensorInfo]
    files: dict[str, FileInfo]

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._maps: dict[str, tuple[mmap.mmap, dict[str, int]]] = {}
        where = self.path / MANIFEST
        try:
            if not where.is_file():
                raise ValueError("missing, so this is no checkpoint or an incomplete one")
            if where.stat().st_size > MAX_MANIFEST_BYTES:
                raise ValueError(f"larger than {MAX_MANIFEST_BYTES:,} bytes")
            collects = gc.isenabled()
            gc.disable()  # it would go through all that is being made again and again: two thirds of the time
            try:
                self._parse(where.read_bytes())
            finally:
                if collects:
                    gc.enable()
            for file, info in self.files.items():
                where = self.path / file
                if not where.is_file():
                    raise ValueError("missing")
                if (found := where.stat().st_size) != info.bytes:
                    raise ValueError(f"has {found:,} bytes instead of {info.bytes:,}")
        except KeyError as error:
            raise ValueError(f"{where}: names no {_line(error)}, or an unknown one") from error
        except RecursionError as error:
            raise ValueError(f"{where}: nested too deeply") from error
        except (ValueError, TypeError, AttributeError, OSError) as error:
            raise ValueError(f"{where}: {_line(error)}") from error

    def _parse(self, data: bytes) -> None:
        tail = len(manifest_tail(b""))
        if manifest_tail(data[:-tail]) != data[-tail:]:
            raise ValueError("damaged: it does not end in the sha256 of its own bytes")
        self.digest = data[-tail:][:64].decode()
        manifest = json.loads(data, object_pairs_hook=_unique)
        if _naturals([manifest["version"]]) != (VERSION,):
            raise ValueError(f"format version {manifest['version']}, and this program reads {VERSION}")
        (self.iteration,) = _naturals([manifest["iteration"]])
        if not self.path.name.startswith(f"iter_{self.iteration:07d}"):
            raise ValueError(f"belongs to iteration {self.iteration}")
        self.facts = dict(manifest["facts"])
        self.tensors = {name: TensorInfo(DTYPES[info["dtype"]], _naturals(info["shape"]))
                        for name, info in manifest["tensors"].items()}
        self.files = {}
        self._boxes: dict[str, list[tuple[Box, str, str]]] = {name: [] for name in self.tensors}
        for file, info in manifest["files"].items():
            if not FILE_NAME.fullmatch(file):
                raise ValueError(f"names the file {file!r}, which is not of the form mp_rank_00/name.safetensors")
            boxes = {key: Box(_naturals(box["offset"]), _naturals(box["shape"])) for key, box in info["boxes"].items()}
            (size_on_disk,) = _naturals([info["bytes"]])
            self.files[file] = FileInfo(size_on_disk, info["sha256"], boxes)
            size = 0
            for key, box in boxes.items():
                self._boxes[tensor_name(key)].append((box, file, key))
                size += box.numel * self.tensors[tensor_name(key)].dtype.itemsize
            if size > size_on_disk:
                raise ValueError(f"the boxes of {file} do not fit into its {size_on_disk} bytes")
        for name, info in self.tensors.items():
            check_cover(name, info.shape, [box for box, _, _ in self._boxes[name]])

    def verify(self, files: Iterable[str] | None = None) -> str | None:
        """The first of `files` (default: all) whose bytes are not those that were written, or None."""
        def damaged(file: str) -> str | None:
            try:
                return None if hash_file(self.path / file) == self.files[file].sha256 else file
            except OSError:
                return file

        return next(filter(None, in_threads(damaged, self.files if files is None else files)), None)

    def read_into(self, out: Tensor, name: str, offset: tuple[int, ...]) -> None:
        info, target, filled = self.tensors[name], Box(offset, tuple(out.shape)), 0
        if _intersect(target, Box((0,) * len(info.shape), info.shape)) != target and target.numel:
            raise ValueError(f"{self.path}: {name} has shape {info.shape}, which does not contain {target}")
        for box, file, key in self._boxes[name]:
            part = _intersect(box, target)
            if part.numel:
                out[_inside(part, target)].copy_(self._view(file, key)[_inside(part, box)])
                filled += part.numel
        assert filled == out.numel(), "boxes were checked to cover the tensor"

    def _view(self, file: str, key: str) -> Tensor:
        """The saved box itself, mapped from the file."""
        boxes = self.files[file].boxes
        if file not in self._maps:
            header, starts, size = file_header(file, self.iteration, boxes, {
                tensor_name(other): self.tensors[tensor_name(other)].dtype for other in boxes})
            with open(self.path / file, "rb") as stream:
                # A private mapping: torch warns about memory that it could not write to.
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            if len(mapped) != size or mapped[:len(header)] != header:
                raise ValueError(f"{self.path / file}: its header is not the one that {MANIFEST} describes")
            self._maps[file] = mapped, starts
        mapped, starts = self._maps[file]
        return torch.frombuffer(mapped, dtype=self.tensors[tensor_name(key)].dtype, count=boxes[key].numel,
                                offset=starts[key]).view(boxes[key].shape)


def check_cover(name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Raise ValueError unless `boxes` make up a tensor of `shape`, of at most two dimensions, each entry once.

    A sweep over the rows, for a few boxes or a hundred thousand: where the entries add up and no two boxes overlap,
    there is no gap.
    """
    events = []
    for box in boxes:
        if not box.numel or len(box.shape) != len(shape) or len(box.offset) != len(shape) or any(
                start + size > whole for start, size, whole in zip(box.offset, box.shape, shape, strict=True)):
            raise ValueError(f"{name}: {box} is empty or outside of the shape {shape}")
        (top, left), (height, width) = (*box.offset, 0, 0)[:2], (*box.shape, 1, 1)[:2]
        events += [(top, True, left, left + width), (top + height, False, left, left + width)]
    if (held := sum(box.numel for box in boxes)) != math.prod(shape):
        raise ValueError(f"{name}: its boxes hold {held} entries of {math.prod(shape)}")
    columns: list[tuple[int, int]] = []  # of the boxes that the present row crosses, from left to right
    for row, begins, left, right in sorted(events):  # where one box ends and another begins, the end comes first
        at = bisect.bisect_left(columns, (left, right))
        if not begins:
            del columns[at]
        elif (at and columns[at - 1][1] > left) or (at < len(columns) and columns[at][0] < right):
            raise ValueError(f"{name}: two of its boxes overlap in row {row}, columns {left} to {right}")
        else:
            columns.insert(at, (left, right))


def _intersect(a: Box, b: Box) -> Box:
    """The common part, of size 0 along a dimension where there is none."""
    starts = tuple(map(max, a.offset, b.offset))
    ends = (min(i + m, j + n) for i, m, j, n in zip(a.offset, a.shape, b.offset, b.shape, strict=True))
    return Box(starts, tuple(max(end - start, 0) for start, end in zip(starts, ends, strict=True)))


def _inside(part: Box, outer: Box) -> tuple[slice, ...]:
    """Where `part` lies within a tensor that holds `outer` alone."""
    return Box(tuple(p - o for p, o in zip(part.offset, outer.offset, strict=True)), part.shape).slices()


def _naturals(values: Any) -> tuple[int, ...]:
    """No more than two, as no tensor here has more dimensions: the product of many takes minutes."""
    if not isinstance(values, list) or len(values) > 2 or not all(type(v) is int and v >= 0 for v in values):
        raise ValueError(f"{reprlib.repr(values)} should be a list of at most two whole numbers")
    return tuple(values)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made


def _line(error: Exception) -> str:
    """What it says, in one line of a length to read: names in a manifest can be anything."""
    return " ".join(str(error)[:300].split())
