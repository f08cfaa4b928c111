"""Read files of torch.save and torch.distributed.checkpoint (DCP) without executing code. Tensors are views of the
file.

torch.load(weights_only=True) reads valid files of torch.save, but does not limit the cost of crafted files. With torch
2.13, a stream of 100 bytes can allocate a bytearray of a gigabyte, and deeply nested tuples as a dictionary's key crash
the process. Storages of a legacy file are allocated before torch checks that they exist, and compressed records are
inflated. torch also reads a legacy file as a whole.

A file of a DCP folder is a sequence of small torch.save files, each with a slice of a tensor or with an object. The
file `.metadata` is a pickle of protocol 4 or 5. `.metadata` has the dtype, the shape and the slices of every tensor,
and the file, the first byte and the number of bytes of every slice and object. `.metadata` needs 71 pickle instructions
for a slice, more than files of torch.save. torch itself reads `.metadata` with Python's unpickler. Neither reading nor
writing needs a process group.
"""

import math
import mmap
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_utils.command_line import require
from data_utils.files import read_file
from data_utils.files.restricted_pickle import PickledObject, read_pickle
from megatron.gpt2.checkpoint.interface import BaseCheckpoint, Shape, TensorInfo, check_coverage
from megatron.gpt2.checkpoint.reader import without_garbage_collection
from megatron.gpt2.formats.foreign_checkpoint import (
    Entries,
    LazyTensor,
    file_errors,
)
from mpu.partition import TensorSlice

MAX_DIRECTORY_BYTES = 2 << 20  # the largest directory of a zip file; 20,000 records need less
ZIP = b"PK\x03\x04"
MAGIC = 0x1950A86A20F9469CFC6C  # A legacy stream starts with this number, then with version 1001.
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
# The number of pickle instructions is limited. A 72-layer model with Adam's state needs half of this number.
BUDGET = 1_250_000
STORAGES = {
    f"{module}.{kind}Storage": dtype for module in ("torch", "torch.cuda") for kind, dtype in STORAGE_DTYPES.items()
}
TORCH_DTYPES = {str(dtype): dtype for dtype in STORAGES.values()}
# the names that files of real programs contain. The reader builds tensors and ordered dictionaries, reads the
# attributes of loss scalers and arguments, and ignores other objects.
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
FILE = re.compile(r"\w[\w.-]*", re.ASCII)  # a name that does not lead out of the folder
MAX_METADATA_BYTES = 16 << 20
# the names of torch's and Megatron Core's classes that `.metadata` of real programs contains.
ALLOWED_DCP_NAMES = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\.(Metadata|(Tensor|Bytes|Chunk)StorageMetadata|TensorProperties"
    r"|MetadataIndex|StorageMeta|_MEM_FORMAT_ENCODING)|torch\.distributed\.checkpoint\.filesystem\.(_StorageInfo"
    r"|_StoragePrefix)|torch\.distributed\.checkpoint\.planner\.(SavePlan|WriteItem|WriteItemType|TensorWriteData)"
    r"|megatron\.core\.dist_checkpointing\.strategies\.torch\.MCore(Metadata|SavePlan)"
    r"|torch\.(Size|device|serialization\._get_layout)|pathlib\.(_local\.)?PosixPath|collections\.OrderedDict",
    re.ASCII,
)
# A function of this type returns a storage's first byte in the file, from its dtype, key and number of elements.
FindStorage = Callable[[torch.dtype, str, int], int]
Storage = tuple[torch.dtype, int, int]  # (dtype, first byte in the file, number of elements)


class _BoundedMmap(mmap.mmap):
    """A memory map that limits the size of a read, because zipfile needs minutes for a very long list of records."""

    def read(self, size: int | None = None, /) -> bytes:
        left = len(self) - self.tell()
        if (left if size is None or size < 0 else min(size, left)) > MAX_DIRECTORY_BYTES:
            raise ValueError(f"its list of records is longer than {MAX_DIRECTORY_BYTES:,} bytes")
        return super().read(size)


def load_torch_file(path: str | Path, start: int = 0, length: int | None = None) -> Any:
    """Load the object in `path`, or in `length` bytes of `path` from byte `start`. Tensors are views of the file.

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
            is_plain = info.compress_type == zipfile.ZIP_STORED and size == info.compress_size
            require(is_plain, f"the record {name[:80]!r} is compressed or encrypted")
            header = data[info.header_offset : info.header_offset + 30]
            start = info.header_offset + 30 + sum(struct.unpack("<26x2H", header))
            is_found = header[:4] == ZIP and start + size <= len(data) and name not in records
            require(is_found, f"the record {name[:80]!r} occurs twice, or not at its position in the list of records")
            records[name] = start, size
    require(sum(size for _, size in records.values()) <= len(data), "its records overlap")
    root = next((name.removesuffix("data.pkl") for name in records if name.endswith("/data.pkl")), "")
    require(bool(root), "a zip file that torch.save did not write: it has no data.pkl")
    start, size = records.get(f"{root}byteorder", (0, 0))
    is_little = not size or bytes(data[start : start + min(size, 8)]) == b"little"
    require(is_little, "written on a big-endian machine, which is not supported")

    def find(dtype: torch.dtype, key: str, numel: int) -> int:
        start, size = records[f"{root}data/{key}"]
        is_whole = size == numel * dtype.itemsize
        require(is_whole, f"storage {key[:20]!r} has {size:,} bytes instead of {numel} elements of {dtype}")
        return start

    start, size = records[f"{root}data.pkl"]
    return _read(data, start, start + size, find)[0]


def _load_legacy(data: memoryview) -> Any:
    """Load a legacy file: magic number, version, system, object, keys of storages, then the storages with their
    lengths.

    The object precedes the storages, so the object is read a second time when the positions of the storages are known.
    """
    sizes: dict[str, tuple[torch.dtype, int]] = {}
    starts: dict[str, int] = {}

    def note(dtype: torch.dtype, key: str, numel: int) -> int:
        fits = sizes.setdefault(key, (dtype, numel)) == (dtype, numel) and numel * dtype.itemsize <= len(data)
        require(fits, f"storage {key[:20]!r} of {numel} elements does not fit into the file")
        return 0

    read = partial(_read, data, end=len(data), find=note)
    magic, position = read(0)
    require(magic == MAGIC, "not written by torch.save")
    version, position = read(position)
    system, begin = read(position)
    is_known = version == 1001 and system["little_endian"] is True
    require(is_known, "a legacy stream of an unknown version or a big-endian machine")
    _, position = read(begin)
    keys, position = read(position)
    for key in keys:
        dtype, numel = sizes.pop(key if type(key) is str else "")
        is_there = data[position : position + 8] == numel.to_bytes(8, "little")
        require(is_there, f"storage {key[:20]!r} of {numel} elements is not at its position")
        starts[key], position = position + 8, position + 8 + numel * dtype.itemsize
    require(not sizes and position <= len(data), "ends before its last storage")
    return _read(data, begin, len(data), lambda dtype, key, numel: starts[key])[0]


def _read(data: memoryview, position: int, end: int, find: FindStorage) -> tuple[Any, int]:
    """Return the object of the pickle at byte `position`, and the first byte after the pickle."""

    def storage(identity: Any) -> Storage:
        kind, of, key, _, numel, *view = identity
        is_known = kind == "storage" and type(key) is str and type(numel) is int and numel >= 0 and view in ([], [None])
        require(is_known, "damaged: a storage of an unknown form")
        dtype = STORAGES[of.name]
        return dtype, find(dtype, key, numel), numel

    return read_pickle(
        data,
        position,
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


def _tensor(data: memoryview, storage: Storage, offset: int, shape: Shape, stride: Shape) -> Tensor:
    """Return a tensor that is a view of the file and has at most as many elements as its storage."""
    dtype, start, storage_size = storage
    is_known = len(shape) <= 8 and all(type(n) is int and 0 <= n <= len(data) for n in (offset, *shape, *stride))
    require(is_known, "damaged: a tensor of an unknown form")
    if not (numel := math.prod(shape)):
        return torch.empty(shape, dtype=dtype)
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    fits = last < storage_size and numel <= storage_size
    require(fits, f"a tensor of shape {shape} does not fit into its storage of {storage_size} elements")
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
    objects: the regions of other objects by their names.

    Raises ValueError, in one line, if a file is missing or too short, or if slices do not cover their tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors, self._parts, self.objects = read_dcp_metadata(path / DCP_METADATA)
        files: dict[str, list[FileRegion]] = {}
        for region in (*(region for parts in self._parts.values() for _, region in parts), *self.objects.values()):
            files.setdefault(region.file, []).append(region)
        for file, regions in files.items():
            file_path = path / file
            require(file_path.is_file(), f"{file_path}: missing; {DCP_METADATA} lists it")
            ends = (region.start + region.length for region in regions)
            listed, size = max(*ends, sum(region.length for region in regions)), file_path.stat().st_size
            require(listed <= size, f"{file_path}: has {size:,} bytes, but {DCP_METADATA} lists {listed:,}")
        with file_errors(path / DCP_METADATA):
            for name, info in self.tensors.items():  # The file sizes are checked first, which is faster.
                check_coverage(name[:120], info.shape, [tensor_slice for tensor_slice, _ in self._parts[name]])

    def saved_slices(self, name: str, target: TensorSlice) -> Iterator[tuple[TensorSlice, Callable[[], Tensor]]]:
        """Yield all saved slices of `name`."""
        for tensor_slice, region in self._parts[name]:
            yield tensor_slice, partial(self._load_part, name, tensor_slice, region)

    def _load_part(self, name: str, tensor_slice: TensorSlice, region: FileRegion) -> Tensor:
        part, info = self._load(region), TensorInfo(self.tensors[name].dtype, tensor_slice.shape)
        if not isinstance(part, Tensor) or TensorInfo(part.dtype, tuple(part.shape)) != info:
            raise ValueError(
                f"{self.path / region.file}: byte {region.start:,} does not start a part of {name[:120]} of shape "
                f"{info.shape} and {info.dtype}"
            )
        return part

    def _load(self, region: FileRegion) -> Any:
        return load_torch_file(self.path / region.file, region.start, region.length)

    def object(self, name: str) -> Any:
        return self._load(self.objects[name])

    def lazy_row(self, name: str, row: int) -> LazyTensor:
        """Return the slice at index `row` of the first dimension of the tensor `name`."""
        dtype, (_, *shape) = self.tensors[name]
        part = (row, *(0 for _ in shape)), (1, *shape)
        return LazyTensor(TensorInfo(dtype, tuple(shape)), lambda: self.read(name, *part)[0])


def read_dcp_metadata(path: Path) -> tuple[dict[str, TensorInfo], dict[str, SavedSlices], dict[str, FileRegion]]:
    """Read the file `.metadata`. Return tensors, slices with their regions, and regions of objects, all by name.
    Raises ValueError, in one line, if the file is damaged or names an unknown class."""
    infos: dict[str, TensorInfo] = {}
    parts: dict[str, SavedSlices] = {}
    objects: dict[str, FileRegion] = {}
    with file_errors(path), without_garbage_collection():  # Garbage collection would take a third of the time.
        data = read_file(path, MAX_METADATA_BYTES)
        top = read_pickle(data, names=ALLOWED_DCP_NAMES, values=TORCH_DTYPES)[0].attributes()
        regions = _regions(top["storage_data"])
        for name, entry in top["state_dict_metadata"].items():
            if entry.name == "torch.distributed.checkpoint.metadata.BytesStorageMetadata":
                objects[name] = regions[name, None]
                continue
            values = entry.attributes()
            infos[name] = TensorInfo(values["properties"].state[0], _sizes(*values["size"].args))
            found = [
                TensorSlice(_sizes(*chunk["offsets"].args), _sizes(*chunk["sizes"].args))
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
        is_inside = FILE.fullmatch(region.file) is not None
        require(is_inside, f"names the file {region.file[:80]!r}, which is not one of its folder")
        name, offset = key["fqn"], key.get("offset")
        require(type(name) is str, "a name is not a string")  # The hash of a nested tuple can take years.
        regions[name, offset and _sizes(*offset.args)] = region
    return regions


def _sizes(values: Any) -> Shape:
    """Return the argument of a pickled torch.Size."""
    is_known = type(values) is tuple and len(values) <= 8 and all(type(n) is int and 0 <= n < 1 << 48 for n in values)
    require(is_known, "a shape or an offset has an invalid number")
    return values  # type: ignore[no-any-return]


def save_dcp(folder: Path, state: Entries) -> None:
    """Write `state`, global tensors and objects by name, into the existing folder `folder` with torch's DCP writer."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the missing process group
        planner = DefaultSavePlanner(flatten_state_dict=False)
        save(dict(state), checkpoint_id=folder, planner=planner, no_dist=True)
