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

import contextlib
import hashlib
import os
import shutil
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from data_utils.files import INDEX_VERSION, flush_to_disk

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}.items()
}

BUFFERED = 1 << 18  # tokens between two writes


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype Megatron would choose: u16 where ids fit, with some room, else i32."""
    return DTYPES[8] if vocab_size < 65_500 else DTYPES[4]


class _PairWriter:
    """A pair that is being written. `finish` of its subclasses completes it; `abandon` removes it."""

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self._bin: BinaryIO = open(f"{prefix}.bin", "wb")  # noqa: SIM115  closed by `_finish` or `abandon`

    def abandon(self) -> None:
        """Close and remove what was written."""
        self._bin.close()
        for suffix in (".bin", ".idx"):
            Path(self.prefix + suffix).unlink(missing_ok=True)

    def _finish(self, dtype: np.dtype, blocks: Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]) -> None:
        """Write `.idx` and put both files on the disk. A block: lengths of sequences, ends of documents in sequences of
        this block. `blocks` is asked three times, so that the index of a billion documents is never in memory at once.
        """
        sizes = [(len(lengths), len(ends)) for lengths, ends in blocks()]
        code = next(code for code, known in DTYPES.items() if known == dtype)
        with open(f"{self.prefix}.idx", "wb") as index:
            index.write(HEADER.pack(MAGIC, INDEX_VERSION, code, sum(s for s, _ in sizes), sum(d for _, d in sizes) + 1))
            for lengths, _ in blocks():
                index.write(lengths.astype("<i4").data)
            start = 0
            for lengths, _ in blocks():
                stops = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
                index.write((start + np.concatenate([[0], stops])[: len(lengths)]).astype("<i8").data)
                start += int(stops[-1]) if len(stops) else 0
            index.write(bytes(8))
            before = 0
            for lengths, ends in blocks():
                index.write((before + ends).astype("<i8").data)
                before += len(lengths)
            flush_to_disk(index)
        flush_to_disk(self._bin)
        self._bin.close()


class IndexedDatasetBuilder(_PairWriter):
    """Writes a pair: `add` tokens, `end_document`, then `finish`, after which both files are complete and on the disk.

    `sha256` hashes `.bin`, and is complete once it is finished.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        super().__init__(prefix)
        self._dtype = np.dtype(dtype)
        self._buffer = np.empty(BUFFERED, dtype=self._dtype)
        self._filled = 0
        self._lengths = array("i")
        self._open_length = 0
        self.num_tokens = 0
        self.sha256 = hashlib.sha256()

    def __len__(self) -> int:
        """Documents."""
        return len(self._lengths)

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append to the open document. The ids have to fit the dtype."""
        count = len(tokens)
        end = self._filled + count
        if end > BUFFERED:
            self._flush()
            end = count
            if count > BUFFERED:
                self._write(np.asarray(tokens).astype(self._dtype))
                self._open_length += count
                return
        self._buffer[self._filled : end] = tokens
        self._filled = end
        self._open_length += count

    def end_document(self, eod: int | None = None) -> None:
        """End the open document, which is one sequence, with `eod` as its last token where one is given. ValueError
        where it has 2^31 tokens or more."""
        if eod is not None:  # by hand: `add` would take half a microsecond longer
            if self._filled == BUFFERED:
                self._flush()
            self._buffer[self._filled] = eod
            self._filled += 1
            self._open_length += 1
        if self._open_length >= 2**31:
            raise ValueError("a document of 2^31 tokens or more does not fit the .idx format: cut the file into parts")
        self._lengths.append(self._open_length)
        self.num_tokens += self._open_length
        self._open_length = 0

    def finish(self) -> None:
        """Write the index and put both files on the disk."""
        assert self._open_length == 0, "the last document was not ended"
        self._flush()
        lengths = np.frombuffer(self._lengths, dtype=np.intc)
        self._finish(self._dtype, lambda: [(lengths, np.arange(1, len(lengths) + 1))])

    def _flush(self) -> None:
        self._write(self._buffer[: self._filled])
        self._filled = 0

    def _write(self, tokens: np.ndarray) -> None:
        self._bin.write(tokens.data)
        self.sha256.update(tokens.data)


class PairMerger(_PairWriter):
    """Joins pairs of one dtype in the order of `append`. After `finish` both files are complete and on the disk."""

    def __init__(self, prefix: str | Path) -> None:
        super().__init__(prefix)
        self._sources: list[str | Path] = []
        self._dtype: np.dtype | None = None

    def append(self, source: str | Path) -> None:
        """Copy the tokens of the pair `source`. ValueError where its dtype is not that of the first pair, or where it
        is damaged."""
        dtype = read_index(source).dtype
        self._dtype = self._dtype or dtype
        if dtype != self._dtype:
            raise ValueError(f"{source} holds {dtype}, but {self._sources[0]} {self._dtype}: they can't be one file")
        self._sources.append(source)
        with open(f"{source}.bin", "rb") as file:
            with contextlib.suppress(AttributeError, OSError):  # not of this system, or not between these files
                while os.copy_file_range(file.fileno(), self._bin.fileno(), 1 << 30):
                    pass
            shutil.copyfileobj(file, self._bin, 1 << 18)  # the rest, as a rule nothing
            self._bin.flush()

    def finish(self) -> None:
        """Write the index of all that was appended and put both files on the disk."""

        def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for source in self._sources:
                index = read_index(source)
                yield index.lengths, index.firsts[1:]

        assert self._dtype is not None, "nothing was appended"
        self._finish(self._dtype, blocks)


class IndexedDataset:
    """Reads a pair through a memory map. Every entry of the index is checked when it is opened.

    `tokens` is the content of `.bin`, an array that the system reads page by page; `document_starts`, int64 [documents
    + 1], counts in tokens, from 0 to `len(tokens)`.
    """

    def __init__(self, prefix: str | Path) -> None:
        index = read_index(prefix)
        self.dtype = index.dtype
        self.document_starts = index.starts[index.firsts]
        # A plain array over the map: slices of np.memmap itself cost several times more.
        self.tokens: np.ndarray = (
            np.zeros(0, self.dtype)
            if index.starts[-1] == 0
            else np.asarray(np.memmap(f"{prefix}.bin", dtype=self.dtype, mode="r")).view(np.ndarray)
        )
        if len(self.tokens) != index.starts[-1]:
            raise ValueError(f"{prefix}.bin changed while it was opened")

    def __len__(self) -> int:
        """Documents."""
        return len(self.document_starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """The tokens of one document."""
        return self.tokens[self.document_starts[index] : self.document_starts[index + 1]]


class Index(NamedTuple):
    """The content of `.idx`: dtype of the tokens; lengths, int32 [S]; starts, int64 [S + 1], in tokens; firsts, int64
    [D]."""

    dtype: np.dtype
    lengths: np.ndarray
    starts: np.ndarray
    firsts: np.ndarray


def read_index(prefix: str | Path) -> Index:
    """The index of the pair at `prefix`. FileNotFoundError where a file is missing. ValueError says what is wrong with
    the index."""

    def check(holds: bool, reason: str) -> None:
        if not holds:
            raise ValueError(f"{name} is damaged: {reason}")

    for suffix in (".idx", ".bin"):
        if not Path(f"{prefix}{suffix}").is_file():
            raise FileNotFoundError(f"no such file: {prefix}{suffix}")
    name, bin_size = f"{prefix}.idx", os.path.getsize(f"{prefix}.bin")
    size = os.path.getsize(name)
    with open(name, "rb") as file:
        head = file.read(HEADER.size)
        check(len(head) == HEADER.size, "it is shorter than its header")
        magic, version, code, sequences, documents = HEADER.unpack(head)
        check(magic == MAGIC, "it does not begin as an index does")
        check(version == INDEX_VERSION, f"version {version}, not {INDEX_VERSION}")
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
    check(
        documents > 0 and int(firsts[0]) == 0 and int(firsts[-1]) == sequences and bool((np.diff(firsts) >= 0).all()),
        f"its documents do not run from 0 to {sequences}",
    )
    return Index(DTYPES[code], lengths, starts, firsts)
