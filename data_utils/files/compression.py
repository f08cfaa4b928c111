"""Files that may be compressed, recognised by their first bytes: gzip and zstd, of several members or frames."""

from __future__ import annotations

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
        return io.BufferedReader(_ZstdFile(path), BLOCK)
    return open(path, "rb", buffering=BLOCK)


class _ZstdFile(io.RawIOBase):
    """The zstandard package's own reader takes a truncated file for one that has ended."""

    def __init__(self, path: str | Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise ValueError(f"{path} is compressed by zstd, which needs the package zstandard: pip install "
                             "zstandard, or decompress it first") from None
        self._new, self._error = zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
        self._frame = self._new()
        self._begun = False  # whether `frame` has been given bytes
        self._packed, self._unpacked = b"", memoryview(b"")
        self._file = open(path, "rb")  # noqa: SIM115  closed by `close`

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        while not self._unpacked:
            self._packed = self._packed or self._file.read(BLOCK // 4)
            if not self._packed:
                if self._begun:
                    raise EOFError("it ends within a zstd frame")
                return 0
            try:
                self._unpacked, self._begun = memoryview(self._frame.decompress(self._packed)), True
            except self._error as error:
                raise EOFError(str(error)) from None
            self._packed = b""
            if self._frame.eof:
                self._packed, self._frame, self._begun = self._frame.unused_data, self._new(), False
        part = self._unpacked[:len(view)]
        view[:len(part)] = part
        self._unpacked = self._unpacked[len(part):]
        return len(part)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
