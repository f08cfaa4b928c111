"""What torch.save and torch.distributed.checkpoint (DCP) wrote, read without executing anything; tensors are views of the
file.

torch.load(weights_only=True) would do for honest files of torch.save. It does not bound others: with torch 2.13 a stream
of 100 bytes gets a bytearray of a gigabyte, tuples nested deeply as a dictionary's key end the process, a legacy file's
storages are allocated before they are looked for, compressed records are inflated; and a legacy file is read as a whole.

A file of a DCP folder is one small file of torch.save after the other, each a box of a tensor or an object. `.metadata`
says where each lies. It is a pickle of protocol 4 or 5 and longer than those of torch.save: 71 instructions for a box.
For every name it gives the dtype, the shape and the boxes of a tensor, or says that the name is an object's. For every
box and object it gives the file, the first byte and the number of bytes, under a key that is an object itself. torch's
own reader of it is Python's unpickler. Neither reading nor writing needs a process group.
"""

import math
import mmap
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_utils.files.inert_pickle import Inert, read_pickle
from megatron.gpt2.checkpoint.reader import without_garbage_collection
from megatron.gpt2.checkpoint.source import Source, TensorInfo, check_cover, common, within
from megatron.gpt2.config import require
from megatron.gpt2.formats.foreign import LazyTensor, errors_named
from mpu.partition import Box

ZIP = b"PK\x03\x04"
MAX_DIRECTORY_BYTES = 2 << 20  # of a zip file: 20,000 records
MAGIC = 0x1950A86A20F9469CFC6C  # what a legacy stream starts with, then 1001
BUDGET = 1_250_000  # twice that of a 72-layer model with Adam's state; under half a second
KINDS = {
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Float": torch.float32,
    "Double": torch.float64,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}
STORAGES = {f"{module}.{kind}Storage": dtype for module in ("torch", "torch.cuda") for kind, dtype in KINDS.items()}
DTYPES = {str(dtype): dtype for dtype in STORAGES.values()}
# What genuine files name. Tensors and ordered dictionaries are made; the attributes of loss scalers and arguments are
# read; nothing is read of the others.
NAMES = re.compile(
    r"collections\.OrderedDict|torch\._utils\._rebuild_(tensor_v2|parameter|parameter_with_state)"
    r"|torch\._tensor\._rebuild_from_type_v2|torch\.(cuda\.)?\w+Storage"
    r"|(fp16|megatron\.fp16|megatron\.optimizer|deepspeed\.(pt|runtime\.fp16))\.(loss_scaler|grad_scaler)\.\w+"
    r"|megatron\.(model|core|core\.transformer)\.enums\.\w+|megatron\.core\.rerun_state_machine\.Rerun\w+"
    r"|deepspeed\.runtime\.zero\.config\.ZeroStageEnum"
    r"|numpy\.(_?core\.multiarray\.(_reconstruct|scalar)|ndarray|dtype|dtypes\.\w+DType)"
    r"|_codecs\.encode|_io\.BytesIO|argparse\.Namespace|types\.SimpleNamespace|pathlib\.(Pure)?PosixPath"
    r"|signal\.(Signals|SIG[A-Z0-9]+)|(__builtin__|builtins)\.set"
    r"|torch\.(Size|device|Tensor|nn\.parameter\.Parameter|torch_version\.TorchVersion)",
    re.ASCII,
)
METADATA = ".metadata"
MAX_METADATA_BYTES = 16 << 20
# What genuine files name: torch's classes, and those that Megatron Core saves with them.
METADATA_NAMES = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\.(Metadata|(Tensor|Bytes|Chunk)StorageMetadata|TensorProperties"
    r"|MetadataIndex|StorageMeta|_MEM_FORMAT_ENCODING)|torch\.distributed\.checkpoint\.filesystem\.(_StorageInfo"
    r"|_StoragePrefix)|torch\.distributed\.checkpoint\.planner\.(SavePlan|WriteItem|WriteItemType|TensorWriteData)"
    r"|megatron\.core\.dist_checkpointing\.strategies\.torch\.MCore(Metadata|SavePlan)"
    r"|torch\.(Size|device|serialization\._get_layout)|pathlib\.(_local\.)?PosixPath|collections\.OrderedDict",
    re.ASCII,
)
FILE = re.compile(r"\w[\w.-]*", re.ASCII)  # no way out of the folder
Find = Callable[[torch.dtype, str, int], int]  # where a storage lies, by dtype, key and number of elements
Storage = tuple[torch.dtype, int, int]  # dtype, first byte in the file, number of elements


class _Mapped(mmap.mmap):
    """zipfile reads the list of a file's records at once; one that is too long would take it minutes."""

    def read(self, size: int | None = None, /) -> bytes:
        """The next `size` bytes, or all."""
        left = len(self) - self.tell()
        if (left if size is None or size < 0 else min(size, left)) > MAX_DIRECTORY_BYTES:
            raise ValueError(f"its list of records is longer than {MAX_DIRECTORY_BYTES:,} bytes")
        return super().read(size)


def load_pickle(path: str | Path, start: int = 0, length: int | None = None) -> Any:
    """The object in `path`, or in `length` bytes of it from `start` on. Tensors are views of the file: copy them before
    you change them.

    ValueError, one line, for a file that is damaged, that torch.save did not write, or that names something unknown.
    """
    with errors_named(path):
        skip = start % mmap.ALLOCATIONGRANULARITY
        with open(path, "rb") as stream:
            # A private mapping: torch warns about memory that it could not write to.
            mapped = _Mapped(
                stream.fileno(), 0 if length is None else skip + length, access=mmap.ACCESS_COPY, offset=start - skip
            )
        data = memoryview(mapped)
        return _load_zip(mapped, data) if data[skip : skip + 4] == ZIP else _load_legacy(data[skip:])


def _load_zip(mapped: _Mapped, data: memoryview) -> Any:
    records: dict[str, tuple[int, int]] = {}
    with zipfile.ZipFile(mapped) as archive:  # type: ignore[call-overload]
        for info in archive.infolist():
            name, size = info.filename, info.file_size
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise ValueError(f"the record {name[:80]!r} is compressed or encrypted")
            require(name not in records, f"the record {name[:80]!r} occurs twice")
            header = data[info.header_offset : info.header_offset + 30]
            start = info.header_offset + 30 + sum(struct.unpack("<26x2H", header))
            if header[:4] != ZIP or size != info.compress_size or start + size > len(data):
                raise ValueError(f"the record {name[:80]!r} is not where the list of records says")
            records[name] = start, size
    require(sum(size for _, size in records.values()) <= len(data), "its records overlap")
    roots = [name.removesuffix("data.pkl") for name in records if name.endswith("/data.pkl")]
    require(bool(roots), "a zip file that torch.save did not write: it has no data.pkl")
    root = roots[0]
    start, size = records.get(f"{root}byteorder", (0, 0))
    little = not size or bytes(data[start : start + min(size, 8)]) == b"little"
    require(little, "written on a big-endian machine, which is not supported")

    def find(dtype: torch.dtype, key: str, numel: int) -> int:
        start, size = records[f"{root}data/{key}"]
        if size != numel * dtype.itemsize:
            raise ValueError(f"storage {key[:20]!r} has {size:,} bytes instead of {numel} elements of {dtype}")
        return start

    start, size = records[f"{root}data.pkl"]
    return _read(data, start, start + size, find)[0]


def _load_legacy(data: memoryview) -> Any:
    """Magic number, version, system, object, keys of its storages, and the storages, each with its length before it.

    The object comes before the storages' places are known, so that it is read twice.
    """
    sizes: dict[str, tuple[torch.dtype, int]] = {}
    starts: dict[str, int] = {}

    def note(dtype: torch.dtype, key: str, numel: int) -> int:
        if sizes.setdefault(key, (dtype, numel)) != (dtype, numel) or numel * dtype.itemsize > len(data):
            raise ValueError(f"storage {key[:20]!r} of {numel} elements does not fit into the file")
        return 0

    found, at = [], 0
    require(bytes(data[:1]) == b"\x80", "not written by torch.save")
    for _ in range(5):
        begin, (value, at) = at, _read(data, at, len(data), note)
        found.append((begin, value))
        require(type(found[0][1]) is int and found[0][1] == MAGIC, "not written by torch.save")
    (_, version), (_, system), (begin, _), (_, keys) = found[1:]
    if type(version) is not int or version != 1001 or system["little_endian"] is not True:
        raise ValueError("a legacy stream of an unknown version or a big-endian machine")
    for key in keys:
        dtype, numel = sizes.pop(key if type(key) is str else "")
        if data[at : at + 8] != numel.to_bytes(8, "little"):
            raise ValueError(f"storage {key[:20]!r} of {numel} elements is not where it should be")
        starts[key], at = at + 8, at + 8 + numel * dtype.itemsize
    require(not sizes and at <= len(data), "ends before its last storage")
    return _read(data, begin, len(data), lambda dtype, key, numel: starts[key])[0]


def _read(data: memoryview, at: int, end: int, find: Find) -> tuple[Any, int]:
    """The object of the pickle at byte `at`, and the byte after it."""

    def storage(identity: Any) -> Storage:
        kind, of, key, _, numel, *view = identity
        if kind != "storage" or type(key) is not str or type(numel) is not int or numel < 0 or view not in ([], [None]):
            raise ValueError("damaged: a storage of an unknown form")
        dtype = STORAGES[of.name]
        return dtype, find(dtype, key, numel), numel

    return read_pickle(
        data, at, end, names=NAMES, values=DTYPES, call=partial(_make, data), persistent=storage, budget=BUDGET
    )


def _make(data: memoryview, name: str, args: Any) -> Any:
    """What the call of `name` with `args` stands for."""
    match name.rpartition(".")[2]:
        case "OrderedDict" if not args:
            return {}
        case "_rebuild_from_type_v2" if args[0].name.startswith("torch._utils."):
            return _make(data, args[0].name, args[2])
        case "_rebuild_parameter" | "_rebuild_parameter_with_state":
            return args[0]
        case "_rebuild_tensor_v2":
            return _tensor(data, *args[:4])
    return Inert(name, args)


def _tensor(data: memoryview, storage: Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """A view of the file, of at most as many elements as the storage has."""
    dtype, start, held = storage
    if (
        len(shape) > 8
        or len(stride) != len(shape)
        or any(type(n) is not int or not 0 <= n <= len(data) for n in (offset, *shape, *stride))
    ):
        raise ValueError("damaged: a tensor of an unknown form")
    if not (numel := math.prod(shape)):
        return torch.empty(shape, dtype=dtype)
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if last >= held or numel > held:
        raise ValueError(f"a tensor of shape {shape} does not fit into its storage of {held} elements")
    return torch.frombuffer(
        data, dtype=dtype, count=last + 1 - offset, offset=start + offset * dtype.itemsize
    ).as_strided(shape, stride)


# --- folders of DCP


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
        files: dict[str, list[Place]] = {}
        for place in (*(place for parts in self._parts.values() for _, place in parts), *self.objects.values()):
            files.setdefault(place.file, []).append(place)
        for file, places in files.items():
            where = path / file
            require(where.is_file(), f"{where}: missing; {METADATA} says what lies in it")
            said = max(max(place.start + place.length for place in places), sum(place.length for place in places))
            size = where.stat().st_size
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
    infos: dict[str, TensorInfo] = {}
    parts: dict[str, Parts] = {}
    objects: dict[str, Place] = {}
    with errors_named(path), without_garbage_collection():  # a third of the time
        with open(path, "rb") as stream:
            data = stream.read(MAX_METADATA_BYTES + 1)
        require(len(data) <= MAX_METADATA_BYTES, f"is larger than {MAX_METADATA_BYTES:,} bytes")
        top = read_pickle(data, names=METADATA_NAMES, values=DTYPES)[0].attributes()
        places = _places(top["storage_data"])
        for name, entry in top["state_dict_metadata"].items():
            if entry.name == "torch.distributed.checkpoint.metadata.BytesStorageMetadata":
                objects[_text(name)] = places[name, None]
                continue
            said = entry.attributes()
            infos[_text(name)] = TensorInfo(said["properties"].state[0], _size(said["size"]))
            found = [Box(_size(box["offsets"]), _size(box["sizes"])) for box in map(Inert.attributes, said["chunks"])]
            parts[name] = [(box, places[name, box.offset]) for box in found if box.numel]
    return infos, parts, objects


def _places(held: Mapping[Inert, Inert]) -> dict[tuple[str, Any], Place]:
    """Where each box and each object lies, by name and offset; an object's is None."""
    places = {}
    for index, info in held.items():
        key, said = index.attributes(), info.attributes()
        require(
            "transform_descriptors" not in said,
            "its files are compressed, or changed by another extension of torch's writer, which is not supported",
        )
        place = Place(said["relative_path"], *_naturals((said["offset"], said["length"])))
        if type(place.file) is not str or not FILE.fullmatch(place.file):
            raise ValueError(f"names the file {str(place.file)[:80]!r}, which is not one of its folder")
        offset = key.get("offset")
        places[_text(key["fqn"]), None if offset is None else _size(offset)] = place
    require(len(places) == len(held), "names a box twice")
    return places


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > 1000:
        raise ValueError("a name is not a string")
    return value


def _size(value: Any) -> tuple[int, ...]:
    """A torch.Size."""
    require(value.name == "torch.Size" and len(value.args) == 1, "a shape is not a torch.Size")
    return _naturals(value.args[0])


def _naturals(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > 8 or any(type(n) is not int or not 0 <= n < 1 << 48 for n in values):
        raise ValueError("a shape or a place is not of whole numbers")
    return values


def save_dcp(folder: Path, state: Mapping[str, Any]) -> None:
    """`state`, whole tensors and objects by name, in the existing folder `folder`, by torch's own writer."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        planner = DefaultSavePlanner(flatten_state_dict=False)
        save(dict(state), checkpoint_id=folder, planner=planner, no_dist=True)
