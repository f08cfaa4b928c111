"""Folders of torch.distributed.checkpoint (DCP), read without executing anything and a box at a time.

A file of the folder is one small file of torch.save after the other, each a box of a tensor or an object; `.metadata`
says where each lies. A folder that is read here needs no process group.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.gpt2.checkpoint import boxes
from megatron.gpt2.checkpoint.source import Source, TensorInfo
from megatron.gpt2.config import require
from megatron.gpt2.formats.dcp_metadata import METADATA, Place, read_metadata
from megatron.gpt2.formats.foreign import LazyTensor
from megatron.gpt2.formats.pickles import load_pickle
from mpu.partition import Box


class DcpFolder(Source):
    """A folder of DCP, opened. tensors: by the names of its writer. objects: where each lies.

    ValueError, one line, where a file is missing or short, or where the boxes of a tensor do not make it up.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        found = read_metadata(path / METADATA)
        self.tensors = {name: info for name, (info, _) in found.tensors.items()}
        self.objects = found.objects
        self._boxes = {name: held for name, (_, held) in found.tensors.items()}
        for name, (info, held) in found.tensors.items():
            check_cover(f"{path / METADATA}: {name[:120]}", info.shape, [box for box, _ in held])
        self._check_files(place for held in self._boxes.values() for _, place in held)

    def _check_files(self, places: Iterable[Place]) -> None:
        """ValueError unless the files are there, and long enough for what lies in them."""
        ends, held = Counter[str](), Counter[str]()
        for place in (*places, *self.objects.values()):
            ends[place.file] = max(ends[place.file], place.start + place.length)
            held[place.file] += place.length
        for file, end in ends.items():
            where = self.path / file
            require(where.is_file(), f"{where}: missing; {METADATA} says what lies in it")
            size = where.stat().st_size
            require(
                max(end, held[file]) <= size,
                f"{where}: has {size:,} bytes, and {METADATA} tells of {max(end, held[file]):,}",
            )

    def read_into(self, out: Tensor, name: str, offset: tuple[int, ...]) -> None:
        """Fill `out`, of any dtype and device, with the box of `name` that is at `offset` and has its shape."""
        wanted, dtype = Box(offset, tuple(out.shape)), self.tensors[name].dtype
        for box, place in self._boxes[name]:
            if (part := boxes.common(box, wanted)).numel:
                held = load_pickle(self.path / place.file, place.start, place.length)
                if not isinstance(held, Tensor) or held.dtype != dtype or tuple(held.shape) != box.shape:
                    raise ValueError(
                        f"{self.path / place.file}: byte {place.start:,} begins no part of {name[:120]} "
                        f"of shape {box.shape} and {dtype}"
                    )
                out[boxes.within(part, wanted).slices()] = held[boxes.within(part, box).slices()]

    def object(self, name: str) -> Any:
        """The object `name`, as torch.save wrote it."""
        place = self.objects[name]
        return load_pickle(self.path / place.file, place.start, place.length)

    def lazy(self, name: str, row: int | None = None) -> LazyTensor:
        """The tensor `name`, or its `row` without that dimension."""
        info = self.tensors[name]
        if row is None:
            return LazyTensor(info, lambda: self.read(name))
        shape = info.shape[1:]
        return LazyTensor(
            TensorInfo(info.dtype, shape), lambda: self.read(name, (row,) + (0,) * len(shape), (1, *shape))[0]
        )


def check_cover(name: str, shape: tuple[int, ...], parts: Sequence[Box], budget: list[int] | None = None) -> None:
    """Raise ValueError unless `parts` make up a tensor of `shape`, each entry once.

    Of more than two dimensions the first is cut wherever a part begins or ends, and each slab is checked by itself.
    budget: how many more parts may be looked at. A writer's parts are looked at some times each.
    """
    if len(shape) <= 2:
        boxes.check_cover(name, shape, parts if math.prod(shape) else ())
        return
    for part in parts:
        boxes.check_inside(name, shape, part)
    budget = [8 * len(parts) + 1000] if budget is None else budget
    starts: dict[int, list[Box]] = {}
    for part in parts:
        starts.setdefault(part.offset[0], []).append(part)
    cuts = sorted({0, shape[0], *starts, *(part.offset[0] + part.shape[0] for part in parts)})
    here: list[Box] = []
    for start in cuts[:-1] if math.prod(shape) else ():
        here = [part for part in here if part.offset[0] + part.shape[0] > start] + starts.get(start, [])
        budget[0] -= len(here)
        require(budget[0] >= 0, f"{name}: its boxes form no grid")
        check_cover(name, shape[1:], [Box(part.offset[1:], part.shape[1:]) for part in here], budget)
