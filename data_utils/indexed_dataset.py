"""Megatron's indexed dataset: `PREFIX.bin` holds tokens back to back, `PREFIX.idx` says where sequences begin.

`.idx`, little-endian, S sequences and D - 1 documents:

    0   9 bytes  MMIDIDX\\0\\0
    9   u64      version, 1
    17  u8       code of the token's dtype
    18  u64      S
    26  u64      D
    34  i32[S]   length of each sequence in tokens
        i64[S]   where each begins in `.bin`, in bytes
        i64[D]   number of the first sequence of each document, and S at the end
        i8[S]    modes, optional; not read
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}.items()}


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype Megatron would choose: u16 where ids fit, with some room, else i32."""
    return DTYPES[8] if vocab_size < 65_500 else DTYPES[4]


class IndexedDatasetBuilder:
    """Writes a pair. `add` tokens, `end_document`, then `finish`; both files are complete and on disk only then."""

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self._prefix = str(prefix)
        self._dtype = np.dtype(dtype)
        self._bin: BinaryIO = open(f"{prefix}.bin", "wb")  # noqa: SIM115  closed by `finish` or `abandon`
        self._lengths: list[int] = []
        self._open_length = 0

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append to the open document. The ids have to fit the dtype."""
        tokens = np.asarray(tokens)
        self._bin.write(tokens.astype(self._dtype, copy=False).tobytes())
        self._open_length += len(tokens)

    def end_document(self) -> None:
        """One sequence is one document."""
        if self._open_length >= 2**31:
            raise ValueError("a document of 2^31 tokens or more does not fit the .idx format: cut the file into parts")
        self._lengths.append(self._open_length)
        self._open_length = 0

    def finish(self) -> None:
        assert self._open_length == 0, "the last document was not ended"
        lengths = np.asarray(self._lengths, dtype="<i4")
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self._dtype.itemsize
        code = next(code for code, dtype in DTYPES.items() if dtype == self._dtype)
        with open(f"{self._prefix}.idx", "wb") as index:
            index.write(HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1))
            for array in (lengths, pointers, np.arange(len(lengths) + 1, dtype="<i8")):
                index.write(array.tobytes())
            _to_disk(index)
        _to_disk(self._bin)
        self._bin.close()

    def abandon(self) -> None:
        """Close and remove what was written."""
        self._bin.close()
        for suffix in (".bin", ".idx"):
            Path(self._prefix + suffix).unlink(missing_ok=True)


class IndexedDataset:
    """Reads a pair through a memory map, every entry of the index checked when it is opened.

    `tokens` is all of `.bin`, an array that the system pages in; `document_starts`, int64 [documents + 1], counts in
    tokens from 0 to `len(tokens)`.
    """

    def __init__(self, prefix: str | Path) -> None:
        for suffix in (".idx", ".bin"):
            if not Path(f"{prefix}{suffix}").is_file():
                raise FileNotFoundError(f"no such file: {prefix}{suffix}")
        self.dtype, starts = _read_index(f"{prefix}.idx", os.path.getsize(f"{prefix}.bin"))
        self.document_starts = starts
        # A plain array over the map: slices of np.memmap itself cost several times more.
        self.tokens: np.ndarray = np.zeros(0, self.dtype) if starts[-1] == 0 else \
            np.asarray(np.memmap(f"{prefix}.bin", dtype=self.dtype, mode="r")).view(np.ndarray)
        if len(self.tokens) != starts[-1]:
            raise ValueError(f"{prefix}.bin changed while it was opened")

    def __len__(self) -> int:
        """Documents."""
        return len(self.document_starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """The tokens of one document."""
        return self.tokens[self.document_starts[index]:self.document_starts[index + 1]]


def _read_index(name: str, bin_size: int) -> tuple[np.dtype, np.ndarray]:
    """The dtype and the documents' starts in tokens. ValueError names what is wrong with the file."""
    def check(holds: bool, reason: str) -> None:
        if not holds:
            raise ValueError(f"{name} is damaged: {reason}")

    size = os.path.getsize(name)
    with open(name, "rb") as file:
        head = file.read(HEADER.size)
        check(len(head) == HEADER.size, "it is shorter than its header")
        magic, version, code, sequences, documents = HEADER.unpack(head)
        check(magic == MAGIC, "it does not begin as an index does")
        check(version == 1, f"version {version}, not 1")
        check(code in DTYPES and DTYPES[code].kind in "iu", f"dtype code {code} is not one of tokens")
        # In Python's integers, before anything of these sizes is allocated.
        plain = HEADER.size + 12 * sequences + 8 * documents
        check(size in (plain, plain + sequences), f"{size} bytes, not the {plain} of {sequences} sequences")
        lengths = np.frombuffer(file.read(4 * sequences), dtype="<i4")
        pointers = np.frombuffer(file.read(8 * sequences), dtype="<i8")
        firsts = np.frombuffer(file.read(8 * documents), dtype="<i8")
    width = DTYPES[code].itemsize
    starts = np.zeros(sequences + 1, dtype=np.int64)
    check(sequences == 0 or int(lengths.min()) >= 0, "a negative length")
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    check(bool(np.array_equal(pointers, starts[:-1] * width)), "its pointers are not the sums of its lengths")
    check(int(starts[-1]) * width == bin_size, f"{int(starts[-1]) * width} bytes of tokens, but .bin has {bin_size}")
    check(documents > 0 and int(firsts[0]) == 0 and int(firsts[-1]) == sequences and bool((np.diff(firsts) >= 0).all()),
          f"its documents do not run from 0 to {sequences}")
    return DTYPES[code], starts[firsts]


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
