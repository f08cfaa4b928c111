"""Reading what torch.save wrote, zip or legacy stream, without executing anything; tensors are views of the file.

torch.load(weights_only=True) would do for honest files. It does not bound others: with torch 2.13 a stream of 100 bytes
gets a bytearray of a gigabyte, tuples nested deeply as a dictionary's key end the process, a legacy file's storages are
allocated before they are looked for, compressed records are inflated; and a legacy file is read as a whole.
"""

import math
import mmap
import re
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils.files.inert_pickle import Inert, read_pickle
from megatron.gpt2.config import require
from megatron.gpt2.formats.foreign import errors_named

ZIP = b"PK\x03\x04"
MAX_DIRECTORY_BYTES = 2 << 20  # of a zip file: 20,000 records
MAGIC = 0x1950A86A20F9469CFC6C  # what a legacy stream starts with, then 1001
BUDGET = 1_250_000  # twice that of a 72-layer model with Adam's state; under half a second
STORAGES = {
    f"{module}.{kind}Storage": dtype
    for module in ("torch", "torch.cuda")
    for kind, dtype in {
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
    }.items()
}
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
            if not set(name.split("/")).isdisjoint(("", "..")) or name in records:
                raise ValueError(f"the record {name[:80]!r} occurs twice or leads out of its folder")
            header = data[info.header_offset : info.header_offset + 30]
            start = info.header_offset + 30 + sum(struct.unpack("<26x2H", header))
            if header[:4] != ZIP or size != info.compress_size or start + size > len(data):
                raise ValueError(f"the record {name[:80]!r} is not where the list of records says")
            records[name] = start, size
    require(sum(size for _, size in records.values()) <= len(data), "its records overlap")
    root = next((name.removesuffix("data.pkl") for name in records if re.fullmatch(r"[^/]+/data\.pkl", name)), None)
    if root is None:
        raise ValueError("a zip file that torch.save did not write: it has no data.pkl")
    start, size = records.get(f"{root}byteorder", (0, 0))
    if size and bytes(data[start : start + min(size, 8)]) != b"little":
        raise ValueError("written on a big-endian machine, which is not supported")

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
