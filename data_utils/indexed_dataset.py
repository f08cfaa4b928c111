"""Token files: Megatron's indexed dataset with the manifest of a pair, and the files of nanoGPT and llm.c.

Megatron's `PREFIX.bin` holds tokens back to back, `PREFIX.idx` says where sequences begin. `.idx`, little-endian, S
sequences and D - 1 documents:

    0   9 bytes  MMIDIDX\\0\\0
    9   u64      version, 1
    17  u8       code of the token's dtype
    18  u64      S
    26  u64      D
    34  i32[S]   length of each sequence in tokens
        i64[S]   where each begins in `.bin`, in bytes
        i64[D]   number of the first sequence of each document, and S at the end
        i8[S]    modes, optional; not read

nanoGPT's `.bin`: uint16 tokens and nothing else. llm.c's: 256 int32 (magic 20240520, version 1, number of tokens), then
uint16 tokens. In both only the end-of-document id shows where a document ends.

The manifest says what a .bin/.idx pair was made from, and holds a hash for every byte of it. `PREFIX.json` holds
`inputs` (each file's name, bytes, lines and hashes), `tokenizer`, counts, and of `.bin` and `.idx` the sha256 of
consecutive parts: the parts of a large `.bin` were hashed by many workers, and a damaged one says where. Its last entry
is the sha256 of everything before it.
"""

import contextlib
import hashlib
import os
import shutil
import struct
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from data_utils.files import (
    INDEX_VERSION,
    PAIR_MANIFEST_VERSION,
    Part,
    errors_of,
    flush_to_disk,
    hash_parts,
    read_sealed,
    write_sealed,
)

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}.items()
}
LLM_C_MAGIC = 20240520
LLM_C_HEADER = 1024  # bytes

BUFFERED = 1 << 20  # bytes
SEARCHED_AT_ONCE = 1 << 24


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype Megatron would choose: u16 if ids fit, with some room, else i32."""
    return DTYPES[8] if vocab_size < 65_500 else DTYPES[4]


class IndexedDatasetBuilder:
    """Writes a pair: `add` tokens, `end_document`, or `add_index` for all of another pair; then `finish`, after which
    both files are complete and on the disk. `abandon` removes them instead. As a context manager it does the one or,
    after an error, the other.

    `sha256` hashes the tokens that were added, and is complete once the pair is finished.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self.prefix = str(prefix)
        self._bin: BinaryIO = open(f"{prefix}.bin", "wb", BUFFERED)  # noqa: SIM115  closed by `finish` or `abandon`
        self._dtype = np.dtype(dtype)
        self._open_length = 0  # of the open document
        self._lengths = array("i")  # of the sequences
        self._ends = array("q")  # of the documents, in sequences
        self.num_tokens = 0
        self.sha256 = hashlib.sha256()

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(self.abandon)
            if kind is None:
                self.finish()
                undo.pop_all()

    def __len__(self) -> int:
        """Documents."""
        return len(self._ends)

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append to the open document. The ids have to fit the dtype."""
        data = np.asarray(tokens).astype(self._dtype).data
        self._bin.write(data)
        self.sha256.update(data)
        self._open_length += len(tokens)

    def end_document(self, eod: int | None = None) -> None:
        """End the open document, which is one sequence, with `eod` as its last token if one is given. ValueError if it
        has 2^31 tokens or more."""
        if eod is not None:
            self.add([eod])
        if self._open_length >= 2**31:
            raise ValueError("a document of 2^31 tokens or more does not fit the .idx format: cut the file into parts")
        self._lengths.append(self._open_length)
        self._ends.append(len(self._lengths))
        self.num_tokens += self._open_length
        self._open_length = 0

    def add_index(self, prefix: str | Path) -> None:
        """Append all documents of the pair `prefix`, which has the same dtype. ValueError if it is damaged."""
        assert self._open_length == 0, "the last document was not ended"
        index = read_index(prefix)
        assert index.dtype == self._dtype
        with open(f"{prefix}.bin", "rb") as file:
            shutil.copyfileobj(file, self._bin, BUFFERED)
        self._ends.frombytes((index.firsts[1:] + len(self._lengths)).astype(np.int64).tobytes())
        self._lengths.frombytes(index.lengths.astype(np.intc).tobytes())
        self.num_tokens += int(index.starts[-1])

    def finish(self) -> None:
        """Write the index and put both files on the disk."""
        assert self._open_length == 0, "the last document was not ended"
        if self._bin.closed:
            return
        lengths = np.frombuffer(self._lengths, dtype=np.intc)
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * self._dtype.itemsize
        code = next(code for code, known in DTYPES.items() if known == self._dtype)
        with open(f"{self.prefix}.idx", "wb") as index:
            index.write(HEADER.pack(MAGIC, INDEX_VERSION, code, len(lengths), len(self) + 1))
            index.write(lengths.astype("<i4").data)
            index.write(pointers.astype("<i8").data)
            index.write(bytes(8))
            index.write(np.frombuffer(self._ends, dtype=np.int64).astype("<i8").data)
            flush_to_disk(index)
        flush_to_disk(self._bin)
        self._bin.close()

    def abandon(self) -> None:
        """Close and remove what was written."""
        with contextlib.suppress(OSError):  # a full disk
            self._bin.close()
        for suffix in (".bin", ".idx"):
            Path(self.prefix + suffix).unlink(missing_ok=True)


class TokenFile:
    """Tokens of documents. `tokens` is an array that the system reads page by page; `document_starts`, int64 [documents
    + 1], counts in tokens, from 0 to `len(tokens)`. `kind` is the program whose file it is."""

    kind = "indexed"
    document_starts: np.ndarray

    def __init__(self, prefix: str | Path, dtype: np.dtype, offset: int = 0) -> None:
        self.prefix, path = str(prefix), f"{prefix}.bin"
        self.tokens = np.zeros(0, dtype)
        if os.path.getsize(path) > offset:
            # A plain array over the map: slices of np.memmap itself cost several times more.
            self.tokens = np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset)).view(np.ndarray)

    def __len__(self) -> int:
        """Documents."""
        return len(self.document_starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """The tokens of one document."""
        return self.tokens[self.document_starts[index] : self.document_starts[index + 1]]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of a token."""
        return self.tokens.dtype

    def manifest(self) -> dict[str, Any] | None:
        """The manifest of a pair; None if there is none. ValueError if it is damaged or not of its form."""
        return read_manifest(self.prefix) if self.kind == "indexed" else None


class IndexedDataset(TokenFile):
    """Reads a pair through a memory map. Every entry of the index is checked when it is opened."""

    def __init__(self, prefix: str | Path) -> None:
        index = read_index(prefix)
        self.document_starts = index.starts[index.firsts]
        super().__init__(prefix, index.dtype)
        if len(self.tokens) != index.starts[-1]:
            raise ValueError(f"{prefix}.bin changed while it was opened")


class ForeignBin(TokenFile):
    """A file of nanoGPT or llm.c. Each document ends with `eod`; what follows the last EOD is one more document.

    ValueError if it is neither.
    """

    def __init__(self, prefix: str | Path, eod: int) -> None:
        path, self._eod = f"{prefix}.bin", eod
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            head = np.frombuffer(file.read(LLM_C_HEADER)[: size // 4 * 4], dtype="<i4")
        offset, self.kind = 0, "nanoGPT"
        if len(head) and head[0] == LLM_C_MAGIC:
            offset, self.kind = LLM_C_HEADER, "llm.c"
            if size < offset or head[1] != 1 or size - offset != 2 * int(head[2]):
                raise ValueError(
                    f"{path} is damaged: it begins as one of llm.c's, but its header does not fit its {size} bytes"
                )
        elif size == 0 or size % 2:
            raise ValueError(f"{path} has no .idx beside it, and its {size} bytes are no uint16 tokens either")
        elif len(head) >= 16 and head.min() >= 0 and head.max() < 1 << 16:
            raise ValueError(f"{path} holds 32-bit tokens, not the uint16 ones of nanoGPT: its .idx is missing")
        super().__init__(prefix, np.dtype("<u2"), offset)

    @cached_property
    def document_starts(self) -> np.ndarray:  # type: ignore[override]
        """int64 [documents + 1], from 0 to `len(tokens)`. All tokens are read for it, once."""
        blocks = [
            np.flatnonzero(self.tokens[first : first + SEARCHED_AT_ONCE] == self._eod) + first + 1
            for first in range(0, len(self.tokens), SEARCHED_AT_ONCE)
        ]
        return np.unique(np.concatenate([[0], *blocks, [len(self.tokens)]]))


def open_tokens(path: str | Path, eod: int) -> TokenFile:
    """The token file at `path`: a pair, by its prefix or the name of one of its files, or nanoGPT's or llm.c's `.bin`,
    which has no `.idx` beside it. eod: the end-of-document id, for such a file. FileNotFoundError or ValueError, in one
    line."""
    prefix = str(path).removesuffix(".bin").removesuffix(".idx")
    if str(path) != prefix and not Path(f"{prefix}.idx").exists() and Path(f"{prefix}.bin").is_file():
        if Path(f"{prefix}.json").exists():
            raise FileNotFoundError(f"no such file: {prefix}.idx, but {prefix}.json says that it was written")
        return ForeignBin(prefix, eod)
    return IndexedDataset(prefix)


class Index(NamedTuple):
    """The content of `.idx`: dtype of the tokens; lengths, int32 [S]; starts, int64 [S + 1], in tokens; firsts, int64
    [D]."""

    dtype: np.dtype
    lengths: np.ndarray
    starts: np.ndarray
    firsts: np.ndarray


def read_index(prefix: str | Path) -> Index:
    """The index of the pair at `prefix`. FileNotFoundError if a file is missing. ValueError says what is wrong with the
    index."""

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


def read_manifest(prefix: str | Path) -> dict[str, Any] | None:
    """The manifest of a pair; None if it has none. ValueError if it is damaged or not of its form."""
    path = Path(f"{prefix}.json")
    manifest = read_sealed(path)
    if manifest is None:
        return None
    with errors_of(path):
        parts, made_by = [*manifest[".bin"], *manifest[".idx"]], manifest["tokenizer"]
        # A merged pair says nothing about text.
        of_text = ("text_bytes", "append_eod", "bad_lines", "empty_documents") * ("text_bytes" in manifest)
        counts = [manifest[name] for name in ("documents", "tokens", *of_text)] + [part["bytes"] for part in parts]
        texts = [part["sha256"] for part in parts] + [entry["file"] for entry in manifest["inputs"]]
        if made_by is not None:
            counts.append(made_by["vocab_size"])
            texts += made_by["kind"], made_by["fingerprint"]
        if not all(isinstance(count, int) and 0 <= count < 1 << 63 for count in counts):
            raise ValueError("one of its counts is not a number from 0 on")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("one of its names or hashes is not a text")
    return manifest


def write_manifest(
    prefix: str | Path, facts: dict[str, Any], bin_parts: Sequence[Part] | None = None
) -> dict[str, Any]:
    """Write the manifest of the pair at `prefix`, and return it: `facts`, and what its files show, counts, dtype and
    hashes. bin_parts: the hashes of `.bin`, if they are known already."""
    index = read_index(prefix)
    manifest = {
        "format": PAIR_MANIFEST_VERSION,
        **facts,
        "documents": len(index.firsts) - 1,
        "tokens": int(index.starts[-1]),
        "dtype": index.dtype.name,
        ".bin": list(bin_parts or hash_parts(f"{prefix}.bin")),
        ".idx": hash_parts(f"{prefix}.idx"),
    }
    write_sealed(Path(f"{prefix}.json"), manifest)
    return manifest
