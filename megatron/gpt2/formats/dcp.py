"""Folders of torch.distributed.checkpoint (DCP), read without executing anything and a box at a time, and written.

A file of the folder is one small file of torch.save after the other, each a box of a tensor or an object. `.metadata`
says where each lies. It is a pickle of protocol 4 or 5 and longer than those of torch.save: 71 instructions for a box.
For every name it gives the dtype, the shape and the boxes of a tensor, or says that the name is an object's. For every
box and object it gives the file, the first byte and the number of bytes, under a key that is an object itself.

Neither reading nor writing needs a process group. torch's own reader of `.metadata` is Python's unpickler.
"""

import io
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_utils.files.inert_pickle import Inert, read_pickle
from megatron.gpt2.checkpoint.reader import without_garbage_collection
from megatron.gpt2.checkpoint.source import Source, TensorInfo, check_cover, common, within
from megatron.gpt2.config import require
from megatron.gpt2.formats.foreign import LazyTensor, errors_named
from megatron.gpt2.formats.torch_files import DTYPES, load_pickle
from mpu.partition import Box

METADATA = ".metadata"
MAX_METADATA_BYTES = 16 << 20
MODULE = "torch.distributed.checkpoint.metadata."
# What genuine files name: torch's classes, and those that Megatron Core saves beside them.
NAMES = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\.(Metadata|(Tensor|Bytes|Chunk)StorageMetadata|TensorProperties"
    r"|MetadataIndex|StorageMeta|_MEM_FORMAT_ENCODING)|torch\.distributed\.checkpoint\.filesystem\.(_StorageInfo"
    r"|_StoragePrefix)|torch\.distributed\.checkpoint\.planner\.(SavePlan|WriteItem|WriteItemType|TensorWriteData)"
    r"|megatron\.core\.dist_checkpointing\.strategies\.torch\.MCore(Metadata|SavePlan)"
    r"|torch\.(Size|device|serialization\._get_layout)|pathlib\.(_local\.)?PosixPath|collections\.OrderedDict",
    re.ASCII,
)
FILE = re.compile(r"\w[\w.-]*", re.ASCII)  # no way out of the folder


class Place(NamedTuple):
    """Where a small file of torch.save lies within a file of the folder."""

    file: str
    start: int
    length: int


Parts = list[tuple[Box, Place]]


class DcpFolder(Source):
    """A folder of DCP, opened. tensors: by the names of its writer. objects: where each lies.

    ValueError, one line, if a file is missing or short, or if the boxes of a tensor do not make it up.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors, self._parts, self.objects = read_metadata(path / METADATA)
        ends, held = Counter[str](), Counter[str]()
        for place in (*(place for parts in self._parts.values() for _, place in parts), *self.objects.values()):
            ends[place.file] = max(ends[place.file], place.start + place.length)
            held[place.file] += place.length
        for file, end in ends.items():
            where = path / file
            require(where.is_file(), f"{where}: missing; {METADATA} says what lies in it")
            size, said = where.stat().st_size, max(end, held[file])
            require(said <= size, f"{where}: has {size:,} bytes, and {METADATA} tells of {said:,}")
        with errors_named(path / METADATA):
            for name, info in self.tensors.items():  # after the sizes, which take less time to compare
                check_cover(name[:120], info.shape, [box for box, _ in self._parts[name]])

    def read_into(self, out: Tensor, name: str, offset: tuple[int, ...]) -> None:
        """Fill `out`, of any dtype and device, with the box of `name` that is at `offset` and has its shape."""
        wanted, dtype = Box(offset, tuple(out.shape)), self.tensors[name].dtype
        for box, place in self._parts[name]:
            if (part := common(box, wanted)).numel:
                held = self._load(place)
                if not isinstance(held, Tensor) or held.dtype != dtype or tuple(held.shape) != box.shape:
                    raise ValueError(
                        f"{self.path / place.file}: byte {place.start:,} begins no part of {name[:120]} "
                        f"of shape {box.shape} and {dtype}"
                    )
                out[within(part, wanted).slices()] = held[within(part, box).slices()]

    def _load(self, place: Place) -> Any:
        return load_pickle(self.path / place.file, place.start, place.length)

    def object(self, name: str) -> Any:
        """The object `name`, as torch.save wrote it."""
        return self._load(self.objects[name])

    def lazy(self, name: str, row: int | None = None) -> LazyTensor:
        """The tensor `name`, or its `row` without that dimension."""
        dtype, shape = self.tensors[name].dtype, self.tensors[name].shape
        if row is None:
            return LazyTensor(self.tensors[name], lambda: self.read(name))
        one = (row,) + (0,) * (len(shape) - 1), (1, *shape[1:])
        return LazyTensor(TensorInfo(dtype, shape[1:]), lambda: self.read(name, *one)[0])


def read_metadata(path: Path) -> tuple[dict[str, TensorInfo], dict[str, Parts], dict[str, Place]]:
    """What `path`, the file `.metadata`, says: tensors and their parts by name, and where the objects lie. ValueError,
    one line, for one that is damaged or names something unknown."""
    with errors_named(path):
        with open(path, "rb") as stream:
            data = stream.read(MAX_METADATA_BYTES + 1)
        require(len(data) <= MAX_METADATA_BYTES, f"is larger than {MAX_METADATA_BYTES:,} bytes")
        with without_garbage_collection():  # a third of the time
            top = read_pickle(data, names=NAMES, values=DTYPES)[0].attributes()
            return _tensors_and_objects(top["state_dict_metadata"], _places(top["storage_data"]))


def _places(held: Mapping[Inert, Inert]) -> dict[tuple[str, Any], Place]:
    """Where each box and each object lies, by name and offset; an object's is None."""
    places = {}
    for index, info in held.items():
        key, said = index.attributes(), info.attributes()
        require(
            index.name == f"{MODULE}MetadataIndex" and info.name.endswith("._StorageInfo"),
            "says of no file where it lies",
        )
        require(
            "transform_descriptors" not in said,
            "its files are compressed, or changed by another extension of torch's writer, which is not supported",
        )
        place = Place(said["relative_path"], *_naturals((said["offset"], said["length"])))
        if type(place.file) is not str or not FILE.fullmatch(place.file):
            raise ValueError(f"names the file {str(place.file)[:80]!r}, which is none of its folder")
        offset = key.get("offset")
        places[_text(key["fqn"]), None if offset is None else _size(offset)] = place
    require(len(places) == len(held), "names a box twice")
    return places


def _tensors_and_objects(
    held: Mapping[Any, Inert], places: Mapping[tuple[str, Any], Place]
) -> tuple[dict[str, TensorInfo], dict[str, Parts], dict[str, Place]]:
    infos, parts, objects = {}, {}, {}
    for name, entry in held.items():
        if entry.name == f"{MODULE}BytesStorageMetadata":
            objects[_text(name)] = places[name, None]
            continue
        require(entry.name == f"{MODULE}TensorStorageMetadata", "holds what is neither tensor nor object")
        said = entry.attributes()
        info = TensorInfo(said["properties"].state[0], _size(said["size"]))
        require(isinstance(info.dtype, torch.dtype), f"{_text(name)[:120]} is of an unknown type")
        found = [Box(_size(box["offsets"]), _size(box["sizes"])) for box in map(Inert.attributes, said["chunks"])]
        infos[_text(name)], parts[name] = info, [(box, places[name, box.offset]) for box in found if box.numel]
    return infos, parts, objects


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > 1000:
        raise ValueError("a name is no string")
    return value


def _size(value: Any) -> tuple[int, ...]:
    """A torch.Size."""
    require(value.name == "torch.Size" and len(value.args) == 1, "a shape is none")
    return _naturals(value.args[0])


def _naturals(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > 8 or any(type(n) is not int or not 0 <= n < 1 << 48 for n in values):
        raise ValueError("a shape or a place is none of whole numbers")
    return values


def save_folder(folder: Path, state: Mapping[str, Any]) -> None:
    """`state`, whole tensors and objects by name, in the existing folder `folder`, by torch's own writer. An io.BytesIO
    holds the bytes that torch.save made of an object."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.checkpoint.state_dict_saver import save

    class Planner(DefaultSavePlanner):
        """The default one takes an io.BytesIO for an object."""

        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            return object if isinstance(object, io.BytesIO) else super().transform_object(write_item, object)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        save(
            dict(state),
            storage_writer=FileSystemWriter(folder),
            planner=Planner(flatten_state_dict=False),
            no_dist=True,
        )
