"""Read files of torch.save and torch.distributed.checkpoint (DCP) without executing code. Tensors are views of the
file.

torch.load(weights_only=True) reads valid files of torch.save, but does not limit the cost of crafted ones. With torch
2.13, a stream of 100 bytes can allocate a bytearray of a gigabyte, and deeply nested tuples as a dictionary's key crash
the process. Storages of a legacy file are allocated before torch checks that they exist, and compressed records are
inflated. torch also reads a legacy file as a whole.

A file of a DCP folder is a sequence of small torch.save files, each with a slice of a tensor or with an object.
The file `.metadata` is a pickle of protocol 4 or 5. For every tensor it has the dtype, the shape and the slices.
For every slice and object it has the file, the first byte and the number of bytes. It needs 71 pickle instructions
for a slice, more than files of torch.save. torch itself reads it with Python's unpickler. Neither reading nor
writing needs a process group.
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

from data_utils.command_line import require
from data_utils.files.restricted_pickle import PickledObject, read_pickle
from megatron.gpt2.checkpoint.interface import BaseCheckpoint, TensorInfo, check_coverage, intersection, relative_slice
from megatron.gpt2.checkpoint.reader import without_garbage_collection
from megatron.gpt2.formats.foreign_checkpoint import LazyTensor, file_errors
from mpu.partition import TensorSlice

ZIP = b"PK\x03\x04"
MAX_DIRECTORY_BYTES = 2 << 20  # the largest directory of a zip file; 20,000 records need less
MAGIC = 0x1950A86A20F9469CFC6C  # A legacy stream starts with this number, then with version 1001.
BUDGET = 1_250_000  # instructions; twice the need of a 72-layer model with Adam's state, less than half a second
STORAGE_DTYPES = {
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
STORAGES = {
    f"{module}.{kind}Storage": dtype for module in ("torch", "torch.cuda") for kind, dtype in STORAGE_DTYPES.items()
}
TORCH_DTYPES = {str(dtype): dtype for dtype in STORAGES.values()}
# Files of real programs contain these names. The reader builds tensors and ordered dictionaries, reads the attributes
# of loss scalers and arguments, and ignores other objects.
ALLOWED_NAMES = re.compile(
    r"collections\.OrderedDict|torch\._utils\._rebuild_(tensor_v2|parameter|parameter_with_state)"
    r"|torch\._tensor\._rebuild_from_type_v2|torch\.(cuda\.)?\w+Storage"
    r"|(fp16\.loss_scaler|megatron|deepspeed)\.[\w.]+"
    r"|numpy\.(_?core\.multiarray\.(_reconstruct|scalar)|ndarray|dtype|dtypes\.\w+DType)"
    r"|_codecs\.encode|_io\.BytesIO|argparse\.Namespace|types\.SimpleNamespace|pathlib\.(Pure)?PosixPath"
    r"|signal\.(Signals|SIG[A-Z0-9]+)|(__builtin__|builtins)\.set"
    r"|torch\.(Size|device|Tensor|nn\.parameter\.Parameter|torch_version\.TorchVersion)",
    re.ASCII,
)
DCP_METADATA = ".metadata"
MAX_METADATA_BYTES = 16 << 20
# `.metadata` of real programs contains these names: torch's classes, and those of Megatron Core.
ALLOWED_DCP_NAMES = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\.(Metadata|(Tensor|Bytes|Chunk)StorageMetadata|TensorProperties"
    r"|MetadataIndex|StorageMeta|_MEM_FORMAT_ENCODING)|torch\.distributed\.checkpoint\.filesystem\.(_StorageInfo"
    r"|_StoragePrefix)|torch\.distributed\.checkpoint\.planner\.(SavePlan|WriteItem|WriteItemType|TensorWriteData)"
    r"|megatron\.core\.dist_checkpointing\.strategies\.torch\.MCore(Metadata|SavePlan)"
    r"|torch\.(Size|device|serialization\._get_layout)|pathlib\.(_local\.)?PosixPath|collections\.OrderedDict",
    re.ASCII,
)
FILE = re.compile(r"\w[\w.-]*", re.ASCII)  # a name that does not lead out of the folder
# (dtype, key, number of elements) -> first byte in the file
FindStorage = Callable[[torch.dtype, str, int], int]
Storage = tuple[torch.dtype, int, int]  # dtype, first byte in the file, number of elements


class _BoundedMmap(mmap.mmap):
    """A memory map that limits the size of a read, because zipfile needs minutes for a very long list of records."""

    def read(self, size: int | None = None, /) -> bytes:
        left = len(self) - self.tell()
        if (left if size is None or size < 0 else min(size, left)) > MAX_DIRECTORY_BYTES:
            raise ValueError(f"its list of records is longer than {MAX_DIRECTORY_BYTES:,} bytes")
        return super().read(size)


def load_torch_file(path: str | Path, start: int = 0, length: int | None = None) -> Any:
    """Load the object in `path`, or in `length` bytes of it from byte `start`. Tensors are views of the file.

    Raises ValueError, in one line, if the file is damaged, was not written by torch.save, or names an unknown class.
    """
    with file_errors(path):
        skip = start % mmap.ALLOCATIONGRANULARITY
        with open(path, "rb") as stream:
            # The mapping is private and writable, because torch warns about read-only memory.
            mapped = _BoundedMmap(
                stream.fileno(), 0 if length is None else skip + length, access=mmap.ACCESS_COPY, offset=start - skip
            )
        data = memoryview(mapped)
        return _load_zip(mapped, data) if data[skip : skip + 4] == ZIP else _load_legacy(data[skip:])


def _load_zip(mapped: _BoundedMmap, data: memoryview) -> Any:
    records: dict[str, tuple[int, int]] = {}
    with zipfile.ZipFile(mapped) as archive:  # type: ignore[call-overload]
        for info in archive.infolist():
            name, size = info.filename, info.file_size
            plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1 and size == info.compress_size
            require(plain, f"the record {name[:80]!r} is compressed or encrypted")
            header = data[info.header_offset : info.header_offset + 30]
            start = info.header_offset + 30 + sum(struct.unpack("<26x2H", header))
            listed = header[:4] == ZIP and start + size <= len(data) and name not in records
            require(listed, f"the record {name[:80]!r} occurs twice, or not at its position in the list of records")
            records[name] = start, size
    require(sum(size for _, size in records.values()) <= len(data), "its records overlap")
    root = next((name.removesuffix("data.pkl") for name in records if name.endswith("/data.pkl")), "")
    require(bool(root), "a zip file that torch.save did not write: it has no data.pkl")
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
    """Load a legacy file: magic number, version, system, object, keys of storages, then the storages with their
    lengths.

    The object precedes the storages, so it is read a second time when their positions are known.
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
            raise ValueError(f"storage {key[:20]!r} of {numel} elements is not at its position")
        starts[key], at = at + 8, at + 8 + numel * dtype.itemsize
    require(not sizes and at <= len(data), "ends before its last storage")
    return _read(data, begin, len(data), lambda dtype, key, numel: starts[key])[0]


def _read(data: memoryview, at: int, end: int, find: FindStorage) -> tuple[Any, int]:
    """Return the object of the pickle at byte `at`, and the first byte after the pickle."""

    def storage(identity: Any) -> Storage:
        kind, of, key, _, numel, *view = identity
        if kind != "storage" or type(key) is not str or type(numel) is not int or numel < 0 or view not in ([], [None]):
            raise ValueError("damaged: a storage of an unknown form")
        dtype = STORAGES[of.name]
        return dtype, find(dtype, key, numel), numel

    return read_pickle(
        data,
        at,
        end,
        names=ALLOWED_NAMES,
        values=TORCH_DTYPES,
        call=partial(_rebuild, data),
        persistent=storage,
        budget=BUDGET,
    )


def _rebuild(data: memoryview, name: str, args: Any) -> Any:
    """Return the object for a call of the class or function `name` with `args`."""
    match name.rpartition(".")[2]:
        case "OrderedDict" if not args:
            return {}
        case "_rebuild_from_type_v2" if args[0].name.startswith("torch._utils."):
            return _rebuild(data, args[0].name, args[2])
        case "_rebuild_parameter" | "_rebuild_parameter_with_state":
            return args[0]
        case "_rebuild_tensor_v2":
            return _tensor(data, *args[:4])
    return PickledObject(name, args)


def _tensor(data: memoryview, storage: Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Return a tensor that is a view of the file and has at most as many elements as its storage."""
    dtype, start, storage_size = storage
    if (
        len(shape) > 8
        or len(stride) != len(shape)
        or any(type(n) is not int or not 0 <= n <= len(data) for n in (offset, *shape, *stride))
    ):
        raise ValueError("damaged: a tensor of an unknown form")
    if not (numel := math.prod(shape)):
        return torch.empty(shape, dtype=dtype)
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if last >= storage_size or numel > storage_size:
        raise ValueError(f"a tensor of shape {shape} does not fit into its storage of {storage_size} elements")
    return torch.frombuffer(
        data, dtype=dtype, count=last + 1 - offset, offset=start + offset * dtype.itemsize
    ).as_strided(shape, stride)


# --- DCP folders


class FileRegion(NamedTuple):
    """The position of a small torch.save file inside a file of a DCP folder."""

    file: str
    start: int
    length: int


SavedSlices = list[tuple[TensorSlice, FileRegion]]


class DcpCheckpoint(BaseCheckpoint):
    """A DCP folder, opened for reading.

    tensors: the tensors by their names in `.metadata`.
    objects: regions by name.

    Raises ValueError, in one line, if a file is missing or too short, or if the slices of a tensor do not cover it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors, self._parts, self.objects = read_dcp_metadata(path / DCP_METADATA)
        files: dict[str, list[FileRegion]] = {}
        for region in (*(region for parts in self._parts.values() for _, region in parts), *self.objects.values()):
            files.setdefault(region.file, []).append(region)
        for file, regions in files.items():
            where = path / file
            require(where.is_file(), f"{where}: missing; {DCP_METADATA} lists it")
            listed = max(
                max(region.start + region.length for region in regions), sum(region.length for region in regions)
            )
            size = where.stat().st_size
            require(listed <= size, f"{where}: has {size:,} bytes, but {DCP_METADATA} lists {listed:,}")
        with file_errors(path / DCP_METADATA):
            for name, info in self.tensors.items():  # after the file sizes, because their check is faster
                check_coverage(name[:120], info.shape, [tensor_slice for tensor_slice, _ in self._parts[name]])

    def read_into(self, out: Tensor, name: str, offset: tuple[int, ...]) -> None:
        wanted, dtype = TensorSlice(offset, tuple(out.shape)), self.tensors[name].dtype
        for tensor_slice, region in self._parts[name]:
            if (part := intersection(tensor_slice, wanted)).numel:
                held = self._load(region)
                if not isinstance(held, Tensor) or held.dtype != dtype or tuple(held.shape) != tensor_slice.shape:
                    raise ValueError(
                        f"{self.path / region.file}: byte {region.start:,} does not start a part of {name[:120]} "
                        f"of shape {tensor_slice.shape} and {dtype}"
                    )
                out[relative_slice(part, wanted).slices()] = held[relative_slice(part, tensor_slice).slices()]

    def _load(self, region: FileRegion) -> Any:
        return load_torch_file(self.path / region.file, region.start, region.length)

    def object(self, name: str) -> Any:
        return self._load(self.objects[name])

    def lazy_tensor(self, name: str, row: int | None = None) -> LazyTensor:
        """Return the tensor `name`, or its slice at index `row` of the first dimension."""
        dtype, shape = self.tensors[name].dtype, self.tensors[name].shape
        if row is None:
            return LazyTensor(self.tensors[name], lambda: self.read(name))
        one = (row,) + (0,) * (len(shape) - 1), (1, *shape[1:])
        return LazyTensor(TensorInfo(dtype, shape[1:]), lambda: self.read(name, *one)[0])


def read_dcp_metadata(path: Path) -> tuple[dict[str, TensorInfo], dict[str, SavedSlices], dict[str, FileRegion]]:
    """Read the file `.metadata`. Return tensors, slices with their regions, and regions of objects, all by name.
    Raises ValueError, in one line, if the file is damaged or names an unknown class."""
    infos: dict[str, TensorInfo] = {}
    parts: dict[str, SavedSlices] = {}
    objects: dict[str, FileRegion] = {}
    with file_errors(path), without_garbage_collection():  # Garbage collection would take a third of the time.
        with open(path, "rb") as stream:
            data = stream.read(MAX_METADATA_BYTES + 1)
        require(len(data) <= MAX_METADATA_BYTES, f"is larger than {MAX_METADATA_BYTES:,} bytes")
        top = read_pickle(data, names=ALLOWED_DCP_NAMES, values=TORCH_DTYPES)[0].attributes()
        regions = _regions(top["storage_data"])
        for name, entry in top["state_dict_metadata"].items():
            if entry.name == "torch.distributed.checkpoint.metadata.BytesStorageMetadata":
                objects[_string(name)] = regions[name, None]
                continue
            values = entry.attributes()
            infos[_string(name)] = TensorInfo(values["properties"].state[0], _torch_size(values["size"]))
            found = [
                TensorSlice(_torch_size(chunk["offsets"]), _torch_size(chunk["sizes"]))
                for chunk in map(PickledObject.attributes, values["chunks"])
            ]
            parts[name] = [
                (tensor_slice, regions[name, tensor_slice.offset]) for tensor_slice in found if tensor_slice.numel
            ]
    return infos, parts, objects


def _regions(entries: Mapping[PickledObject, PickledObject]) -> dict[tuple[str, Any], FileRegion]:
    """Return the regions of slices and objects, by name and offset. The offset of an object is None."""
    regions = {}
    for index, info in entries.items():
        key, values = index.attributes(), info.attributes()
        require(
            "transform_descriptors" not in values,
            "its files are compressed, or changed by another extension of torch's writer, which is not supported",
        )
        region = FileRegion(values["relative_path"], *_sizes((values["offset"], values["length"])))
        if type(region.file) is not str or not FILE.fullmatch(region.file):
            raise ValueError(f"names the file {str(region.file)[:80]!r}, which is not one of its folder")
        offset = key.get("offset")
        regions[_string(key["fqn"]), None if offset is None else _torch_size(offset)] = region
    require(len(regions) == len(entries), "names a slice twice")
    return regions


def _string(value: Any) -> str:
    if type(value) is not str or len(value) > 1000:
        raise ValueError("a name is not a string, or too long")
    return value


def _torch_size(value: Any) -> tuple[int, ...]:
    """Convert a pickled torch.Size to a tuple."""
    require(value.name == "torch.Size" and len(value.args) == 1, "a shape is not a torch.Size")
    return _sizes(value.args[0])


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > 8 or any(type(n) is not int or not 0 <= n < 1 << 48 for n in values):
        raise ValueError("a shape or an offset has an invalid number")
    return values


def save_dcp(folder: Path, state: Mapping[str, Any]) -> None:
    """Write `state`, global tensors and objects by name, into the existing folder `folder` with torch's DCP writer."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the missing process group
        planner = DefaultSavePlanner(flatten_state_dict=False)
        save(dict(state), checkpoint_id=folder, planner=planner, no_dist=True)
