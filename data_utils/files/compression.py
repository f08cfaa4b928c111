"""Files that may be compressed, recognised by their first bytes: gzip and zstd, of several members or frames."""

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
ZSTD_SKIPPABLE = b"\x2a\x4d\x18"  # after a first byte of 0x50 to 0x5f; pzstd begins its files so
BLOCK = 1 << 18


def compression_of(path: str | Path) -> str | None:
    """`gzip`, `zstd`, or None for a file that is neither."""
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic == ZSTD or (magic[1:] == ZSTD_SKIPPABLE and magic[0] >> 4 == 5):
        return "zstd"
    return "gzip" if magic[:2] == GZIP else None


@contextlib.contextmanager
def open_bytes(path: str | Path) -> Iterator[BinaryIO]:
    """The content of a file, decompressed where it is compressed. ValueError, which names the file, where reading in
    the block shows that it is truncated or damaged."""
    try:
        with _open(path) as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _open(path: str | Path) -> BinaryIO:
    kind = compression_of(path)
    if kind == "gzip":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if kind == "zstd":
        return io.BufferedReader(_Joined(_zstd_blocks(path)), BLOCK)
    return open(path, "rb", buffering=BLOCK)


def _zstd_blocks(path: str | Path) -> Iterator[bytes]:
    """The zstandard package's own reader takes a truncated file for one that has ended."""
    try:
        import zstandard
    except ImportError:
        raise ValueError(
            f"{path} is compressed by zstd, which needs the package zstandard: pip install "
            "zstandard, or decompress it first"
        ) from None
    new_frame = zstandard.ZstdDecompressor().decompressobj
    frame, begun = new_frame(), False  # begun: whether it has been given bytes
    with open(path, "rb") as file:
        while packed := file.read(BLOCK // 4):
            while packed:
                try:
                    unpacked = frame.decompress(packed)
                except zstandard.ZstdError as error:
                    raise EOFError(str(error)) from None
                packed, begun = b"", True
                if frame.eof:
                    packed, frame, begun = frame.unused_data, new_frame(), False
                yield unpacked
    if begun:
        raise EOFError("it ends within a zstd frame")


class _Joined(io.RawIOBase):
    """A file whose content comes in blocks."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._left = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        while not self._left and (block := next(self._blocks, None)) is not None:
            self._left = memoryview(block)
        part, self._left = self._left[: len(view)], self._left[len(view) :]
        view[: len(part)] = part
        return len(part)
