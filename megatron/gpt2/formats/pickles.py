"""Reading what torch.save wrote, zip or legacy stream, without executing anything.

torch.load(weights_only=True) would do for honest files. Others it does not bound: with torch 2.13 a stream of 100 bytes
gets a bytearray of a gigabyte, tuples nested deeply as a dictionary's key end the process, a legacy file's storages are
allocated before they are looked for, compressed records are inflated; and a legacy file is read as a whole.
"""

import io
import mmap
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.gpt2.config import require
from megatron.gpt2.formats.pickle_machine import Machine, Opaque

__all__ = ["Opaque", "load_pickle"]

ZIP = b"PK\x03\x04"
MAX_DIRECTORY_BYTES = 2 << 20  # of a zip file: 20,000 records
MAGIC = 0x1950A86A20F9469CFC6C  # what a legacy stream starts with, then 1001


def load_pickle(path: str | Path, start: int = 0, length: int | None = None) -> Any:
    """The object in `path`, or in `length` bytes of it from `start` on. Tensors are views of the file: copy them before
    you change them.

    ValueError, one line, for a file that is damaged, that torch.save did not write, or that names something unknown.
    """
    try:
        skip = start % mmap.ALLOCATIONGRANULARITY
        with open(path, "rb") as stream:
            # A private mapping: torch warns about memory that it could not write to.
            mapped = mmap.mmap(
                stream.fileno(), 0 if length is None else skip + length, access=mmap.ACCESS_COPY, offset=start - skip
            )
        data = memoryview(mapped)[skip:]
        return _load_zip(data) if bytes(data[:4]) == ZIP else _load_legacy(data)
    except (ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: {error}") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, struct.error) as error:
        raise ValueError(
            f"{path}: damaged, or not written by torch.save ({type(error).__name__}: {str(error)[:80]!r})"
        ) from error


class _Directory(io.RawIOBase):
    """zipfile reads the list of a file's records at once; one that is too long would take it minutes."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def seekable(self) -> bool:
        """zipfile asks."""
        return True

    def tell(self) -> int:
        """The next byte."""
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a byte."""
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: len(self.data)}[whence]
        if self.at < 0:
            raise OSError("a place before the file's begin")
        return self.at

    def read(self, size: int | None = -1, /) -> bytes:
        """The next `size` bytes, or all."""
        if size is not None and size > MAX_DIRECTORY_BYTES:
            raise ValueError(f"its list of records is longer than {MAX_DIRECTORY_BYTES:,} bytes")
        found = bytes(self.data[self.at : None if size is None or size < 0 else self.at + size])
        self.at += len(found)
        return found


def _load_zip(data: memoryview) -> Any:
    records: dict[str, tuple[int, int]] = {}
    with _Directory(data) as stream, zipfile.ZipFile(stream) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise ValueError(f"the record {info.filename[:80]!r} is compressed or encrypted")
            if not set(info.filename.split("/")).isdisjoint(("", "..")) or info.filename in records:
                raise ValueError(f"the record {info.filename[:80]!r} occurs twice or leads out of its folder")
            header = data[info.header_offset : info.header_offset + 30]
            start = info.header_offset + 30 + sum(struct.unpack("<26x2H", header))
            if header[:4] != ZIP or info.file_size != info.compress_size or start + info.file_size > len(data):
                raise ValueError(f"the record {info.filename[:80]!r} is not where the list of records says")
            records[info.filename] = start, info.file_size
    require(sum(size for _, size in records.values()) <= len(data), "its records overlap")
    root = next((name.removesuffix("data.pkl") for name in records if re.fullmatch(r"[^/]+/data\.pkl", name)), None)
    if root is None:
        raise ValueError("a zip file that torch.save did not write: it has no data.pkl")
    if root + "byteorder" in records:
        start, size = records[root + "byteorder"]
        if bytes(data[start : start + min(size, 8)]) != b"little":
            raise ValueError("written on a big-endian machine, which is not supported")

    def find(dtype: torch.dtype, key: str, numel: int) -> int:
        start, size = records[f"{root}data/{key}"]
        if size != numel * dtype.itemsize:
            raise ValueError(f"storage {key[:20]!r} has {size:,} bytes instead of {numel} elements of {dtype}")
        return start

    start, size = records[root + "data.pkl"]
    return Machine(data, start, start + size, find).run()[0]


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

    def pickle(at: int, find: Callable[[torch.dtype, str, int], int] = note) -> tuple[Any, int]:
        return Machine(data, at, len(data), find).run()

    magic, at = pickle(0) if bytes(data[:1]) == b"\x80" else (None, 0)
    require(type(magic) is int and magic == MAGIC, "not written by torch.save")
    version, at = pickle(at)
    system, at = pickle(at)
    if type(version) is not int or version != 1001 or system["little_endian"] is not True:
        raise ValueError("a legacy stream of an unknown version or a big-endian machine")
    begin = at
    _, at = pickle(begin)
    keys, at = pickle(at)
    for key in keys:
        dtype, numel = sizes.pop(key if type(key) is str else "")
        if data[at : at + 8] != numel.to_bytes(8, "little"):
            raise ValueError(f"storage {key[:20]!r} of {numel} elements is not where it should be")
        starts[key], at = at + 8, at + 8 + numel * dtype.itemsize
    require(not sizes and at <= len(data), "ends before its last storage")
    return pickle(begin, lambda dtype, key, numel: starts[key])[0]
