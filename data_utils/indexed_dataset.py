"""Token files: Megatron's indexed dataset with a manifest, and the files of nanoGPT and llm.c.

Megatron's dataset is a pair of files. `PREFIX.bin` holds the tokens without gaps, and `PREFIX.idx` the starts of
sequences. For S sequences and D - 1 documents, `.idx` is, in little-endian:

    0   9 bytes  MMIDIDX\\0\\0
    9   u64      version, 1
    17  u8       code of the token's dtype
    18  u64      S
    26  u64      D
    34  i32[S]   length of each sequence in tokens
        i64[S]   where each begins in `.bin`, in bytes
        i64[D]   number of the first sequence of each document, and S at the end
        i8[S]    modes, optional; not read

nanoGPT's `.bin` holds only uint16 tokens. llm.c's has a header of 256 int32 (magic 20240520, version 1, number of
tokens) and uint16 tokens. In files of nanoGPT and llm.c, each document ends with the end-of-document id.

The manifest `PREFIX.json` describes how a pair was made. Its entries are `inputs` (each file's name, bytes, lines and
hashes), `tokenizer`, counts, and the sha256 of consecutive chunks of `.bin` and `.idx`. Chunks allow several workers to
hash a large `.bin`, and show where a file is damaged. The manifest ends with the sha256 of all earlier bytes of the
manifest.
"""

import contextlib
import glob
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from data_utils.files import (
    INDEX_VERSION,
    PAIR_MANIFEST_VERSION,
    ChunkHash,
    HashingWriter,
    flush_to_disk,
    read_checksummed_json,
    wrap_errors,
    write_checksummed_json,
)

if TYPE_CHECKING:
    from data_utils.tokenizers.base import Tokenizer

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
INDEX_DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}.items()
}
LLM_C_MAGIC = 20240520
LLM_C_HEADER = 1024  # number of bytes

EOD_SEARCH_TOKENS = 1 << 24


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype that Megatron chooses: uint16 for fewer than 65,500 ids, otherwise int32."""
    return INDEX_DTYPES[8] if vocab_size < 65_500 else INDEX_DTYPES[4]


class IndexedDatasetBuilder:
    """Writes a pair of files. Call `add` and `end_document` for each document, or `add_file` to append another file.

    A `with` block calls `finish` at its end, or `abandon` after an error.

    hashes: the chunk hashes of both files, by suffix, after `finish`.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self.prefix = str(prefix)
        self._bin: BinaryIO = open(f"{prefix}.bin", "wb")  # noqa: SIM115  closed by `finish` or `abandon`
        self._chunk = HashingWriter(self._bin)
        self._dtype = np.dtype(dtype)
        self._open_length = 0  # number of tokens of the open document
        self._lengths = array("i")  # number of tokens of each sequence
        self._starts = array("q", [0])  # start of each document and end of the last one, counted in sequences
        self.num_tokens = 0
        self.hashes: dict[str, list[ChunkHash]] = {".bin": [], ".idx": []}

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(self.abandon)
            if kind is None:
                self.finish()
                undo.pop_all()

    def __len__(self) -> int:
        """The number of documents."""
        return len(self._starts) - 1

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append tokens to the open document. The ids must fit the dtype."""
        self._chunk.write(np.asarray(tokens).astype(self._dtype).data)
        self._open_length += len(tokens)

    def end_document(self, eod: int | None = None) -> None:
        """End the open document, which is one sequence, after appending `eod` if it is given. Raises ValueError if the
        document has 2^31 tokens or more."""
        if eod is not None:
            self._chunk.write(eod.to_bytes(self._dtype.itemsize, "little"))
            self._open_length += 1
        if self._open_length >= 2**31:
            raise ValueError("a document of 2^31 tokens or more does not fit the .idx format: cut the file into parts")
        self._lengths.append(self._open_length)
        self._starts.append(len(self._lengths))
        self.num_tokens += self._open_length
        self._open_length = 0

    def add_file(self, file: "TokenFile", chunks: Sequence[ChunkHash] = ()) -> None:
        """Append all documents of `file`, which has the same dtype.

        chunks: the hashes of the file's tokens. Without `chunks`, the tokens are hashed.
        """
        assert self._open_length == 0 and file.dtype == self._dtype
        self._end_chunk()
        (self._bin if chunks else self._chunk).write(file.tokens.data)
        self._end_chunk()
        self.hashes[".bin"] += chunks
        self._starts.frombytes((file.document_indices[1:] + len(self._lengths)).astype(np.int64).tobytes())
        self._lengths.frombytes(file.sequence_lengths.astype(np.intc).tobytes())
        self.num_tokens += len(file.tokens)

    def _end_chunk(self) -> None:
        chunk = self._chunk.chunk()
        if chunk["bytes"]:
            self.hashes[".bin"].append(chunk)
            self._chunk = HashingWriter(self._bin)

    def finish(self) -> None:
        """Write the index and fsync both files."""
        assert self._open_length == 0, "the last document was not ended"
        lengths = np.frombuffer(self._lengths, dtype=np.intc)
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * self._dtype.itemsize
        code = next(code for code, known in INDEX_DTYPES.items() if known == self._dtype)
        with open(f"{self.prefix}.idx", "wb") as file:
            index = HashingWriter(file)
            index.write(HEADER.pack(MAGIC, INDEX_VERSION, code, len(lengths), len(self._starts)))
            index.write(lengths.astype("<i4").data)
            index.write(pointers.astype("<i8").data)
            index.write(np.frombuffer(self._starts, dtype=np.int64).astype("<i8").data)
            self.hashes[".idx"] = [index.chunk()]
            flush_to_disk(file)
        self._end_chunk()
        flush_to_disk(self._bin)
        self._bin.close()

    def write_manifest(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Write and return the manifest of the finished pair: `entries`, and the counts, dtype and hashes of its
        files."""
        manifest = {
            "format": PAIR_MANIFEST_VERSION,
            **entries,
            "documents": len(self),
            "tokens": self.num_tokens,
            "dtype": self._dtype.name,
            **self.hashes,
        }
        write_checksummed_json(Path(f"{self.prefix}.json"), manifest)
        return manifest

    def abandon(self) -> None:
        """Close and remove both files."""
        with contextlib.suppress(OSError):  # Closing fails on a full disk.
            self._bin.close()
        for suffix in (".bin", ".idx"):
            Path(self.prefix + suffix).unlink(missing_ok=True)


class TokenFile:
    """A file of tokens. `tokens` is a memory-mapped array. `document_starts`, int64 [documents + 1], is the index of
    the first token of each document, and then `len(tokens)`. `kind` names the format."""

    kind = "indexed"
    document_starts: np.ndarray

    def __init__(self, prefix: str | Path, dtype: np.dtype, offset: int = 0) -> None:
        self.prefix, path = str(prefix), f"{prefix}.bin"
        self._states = self._file_states()
        self.tokens = np.zeros(0, dtype)
        if os.path.getsize(path) > offset:
            # A plain array over the map: slicing np.memmap itself is several times slower.
            self.tokens = np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset)).view(np.ndarray)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.document_starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the tokens of one document."""
        return self.tokens[self.document_starts[index] : self.document_starts[index + 1]]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the tokens."""
        return self.tokens.dtype

    @cached_property
    def sequence_lengths(self) -> np.ndarray:
        """The number of tokens of each sequence, int [sequences]. In files without `.idx`, each document is one
        sequence."""
        return np.diff(self.document_starts)

    @cached_property
    def document_indices(self) -> np.ndarray:
        """The first sequence of each document, int64 [documents + 1], and at the end the number of sequences."""
        return np.arange(len(self) + 1)

    def _file_states(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Return the size and mtime of each file, keyed by name and inode."""
        states = {}
        for path in (f"{self.prefix}.bin", f"{self.prefix}.idx"):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path)
                states[path, status.st_ino] = status.st_size, status.st_mtime_ns
        return states

    def changed_file(self) -> str:
        """Return the name of a file that was changed in place after it was opened, or "". A file that was removed or
        replaced by a rename does not count, because the memory map keeps the old file."""
        states = self._file_states().items()
        return next((key[0] for key, state in states if self._states.get(key, state) != state), "")

    def manifest(self) -> dict[str, Any] | None:
        """Read the manifest of a pair. Return None if the manifest does not exist, or for a file of nanoGPT or llm.c.
        Raises ValueError if the manifest is damaged."""
        return read_manifest(self.prefix) if self.kind == "indexed" else None

    def check_tokenizer(self, tokenizer: "Tokenizer") -> None:
        """Raise ValueError if the manifest names a different tokenizer."""
        made_by = (self.manifest() or {}).get("tokenizer")
        if made_by and made_by["fingerprint"] != tokenizer.fingerprint:
            raise ValueError(
                f"{self.prefix} was made by another tokenizer, {made_by['kind']} of {made_by['vocab_size']:,} tokens, "
                f"not {tokenizer.kind} of {tokenizer.vocab_size:,}: give its --tokenizer-type and files"
            )


class IndexedDataset(TokenFile):
    """Reads a pair through a memory map. Checks every entry of the index when it is opened.

    Raises FileNotFoundError if a file is missing, and ValueError if the index is damaged.
    """

    def __init__(self, prefix: str | Path) -> None:
        def check(holds: bool, reason: str) -> None:
            if not holds:
                raise ValueError(f"{name} is damaged: {reason}")

        for suffix in (".idx", ".bin"):
            if not Path(f"{prefix}{suffix}").is_file():
                longer = sorted(Path(prefix).parent.glob(f"{glob.escape(Path(prefix).name)}_*{suffix}"))
                hint = f": did you mean {longer[0].with_suffix('')}?" if longer else ""
                raise FileNotFoundError(f"no such file: {prefix}{suffix}{hint}")
        name, bin_size = f"{prefix}.idx", os.path.getsize(f"{prefix}.bin")
        size = os.path.getsize(name)
        with open(name, "rb") as file:
            head = file.read(HEADER.size)
            check(len(head) == HEADER.size, "it is shorter than its header")
            magic, version, code, sequences, documents = HEADER.unpack(head)
            check(magic == MAGIC, "it does not begin with the magic of an index")
            check(version == INDEX_VERSION, f"version {version}, not {INDEX_VERSION}")
            check(
                code in INDEX_DTYPES and INDEX_DTYPES[code].kind in "iu", f"dtype code {code} is not an integer dtype"
            )
            # Check the sizes with Python's integers before memory is allocated.
            plain = HEADER.size + 12 * sequences + 8 * documents
            check(size in (plain, plain + sequences), f"{size} bytes, not the {plain} of {sequences} sequences")
            lengths = np.frombuffer(file.read(4 * sequences), dtype="<i4")
            pointers = np.frombuffer(file.read(8 * sequences), dtype="<i8")
            indices = np.frombuffer(file.read(8 * documents), dtype="<i8")
        width = INDEX_DTYPES[code].itemsize
        starts = np.zeros(sequences + 1, dtype=np.int64)
        check(sequences == 0 or int(lengths.min()) >= 0, "a negative length")
        np.cumsum(lengths, dtype=np.int64, out=starts[1:])
        check(bool(np.array_equal(pointers, starts[:-1] * width)), "its pointers are not the sums of its lengths")
        expected = int(starts[-1]) * width
        check(expected == bin_size, f"{expected} bytes of tokens, but .bin has {bin_size}")
        check(
            documents > 0 and indices[0] == 0 and indices[-1] == sequences and bool((np.diff(indices) >= 0).all()),
            f"its documents do not run from 0 to {sequences}",
        )
        self.sequence_lengths, self.document_indices, self.document_starts = lengths, indices, starts[indices]
        super().__init__(prefix, INDEX_DTYPES[code])
        check(self.tokens.nbytes == expected, f"{prefix}.bin changed while it was opened")


class RawTokenFile(TokenFile):
    """A file of nanoGPT or llm.c. Each document ends with `eod`; tokens after the last EOD are one more document.

    Raises ValueError if the file has neither the format of nanoGPT nor that of llm.c.
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
                    f"{path} is damaged: it begins like a file of llm.c, but its header does not fit its {size} bytes"
                )
        elif size == 0 or size % 2:
            raise ValueError(f"{path} has no .idx file next to it, and its {size} bytes are not uint16 tokens either")
        elif len(head) >= 16 and head.min() >= 0 and head.max() < 1 << 16:
            raise ValueError(f"{path} holds 32-bit tokens, not the uint16 ones of nanoGPT: its .idx is missing")
        super().__init__(prefix, np.dtype("<u2"), offset)

    @cached_property
    def document_starts(self) -> np.ndarray:  # type: ignore[override]
        """The index of the first token of each document, int64 [documents + 1], and then `len(tokens)`. The first
        access reads all tokens."""
        blocks = [
            np.flatnonzero(self.tokens[start : start + EOD_SEARCH_TOKENS] == self._eod) + start + 1
            for start in range(0, len(self.tokens), EOD_SEARCH_TOKENS)
        ]
        return np.unique(np.concatenate([[0], *blocks, [len(self.tokens)]]))


def open_token_file(path: str | Path, eod: int) -> TokenFile:
    """Open a token file: a pair, given by its prefix or one of its files, or a `.bin` of nanoGPT or llm.c.

    eod: the end-of-document id, for a `.bin` without `.idx`.

    Raises FileNotFoundError if a file is missing, and ValueError if a file is damaged.
    """
    prefix = str(path).removesuffix(".bin").removesuffix(".idx")
    if str(path) != prefix and not Path(f"{prefix}.idx").exists() and Path(f"{prefix}.bin").is_file():
        if Path(f"{prefix}.json").exists():
            raise FileNotFoundError(f"no such file: {prefix}.idx, but its manifest {prefix}.json exists")
        return RawTokenFile(prefix, eod)
    return IndexedDataset(prefix)


def read_manifest(prefix: str | Path) -> dict[str, Any] | None:
    """Read the manifest of a pair. Return None if the manifest does not exist. Raises ValueError if the manifest is
    damaged."""
    path = Path(f"{prefix}.json")
    manifest = read_checksummed_json(path)
    if manifest is None:
        return None
    with wrap_errors(path):
        parts, made_by = [*manifest[".bin"], *manifest[".idx"]], manifest["tokenizer"]
        # The manifest of a merged pair has no entries about text.
        of_text = ("text_bytes", "append_eod", "bad_lines", "empty_documents") * ("text_bytes" in manifest)
        counts = [manifest[name] for name in ("documents", "tokens", *of_text)] + [part["bytes"] for part in parts]
        texts = [part["sha256"] for part in parts] + [entry["file"] for entry in manifest["inputs"]]
        if made_by is not None:
            counts.append(made_by["vocab_size"])
            texts += made_by["kind"], made_by["fingerprint"]
        valid = all(isinstance(count, int) and 0 <= count < 1 << 63 for count in counts)
        if not valid or not all(isinstance(text, str) for text in texts):
            raise ValueError("one of its counts is not a number of at least 0, or a name or hash is not a text")
    return manifest
